"""The names of a device's curves, and what was measured of each: the points of its records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from statistics import fmean
from typing import Any

from parplan.profiles.machines.curves import Curve
from parplan.profiles.machines.measurements import CaseOutcome, Record
from parplan.profiles.machines.speeds import Compute, PassCurves

DROPPED_FLASH = ("dropped_flash.forward", "dropped_flash.backward")
DIRECTIONS = ("forward", "backward")
MEMBERS = {  # class of memory-bound operations -> those that have a curve of their own beside it
    "norm": ("layer_norm", "rms_norm"),
    "elementwise": (
        "gelu",
        "swiglu",
        "rotary",
        "positions",
        "dropped_positions",
        "bias_gradient",
        "accumulation",
    ),
    "residual": ("dropped_residual",),
}
NAMED = {name: of for of, members in MEMBERS.items() for name in members}
OTHERS = "elementwise"  # class of every other operation
Points = tuple[tuple[float, ...], ...]


def curves_of(compute: Compute) -> dict[str, Curve]:
    """Every curve by the name that passes of cases give it: `forward`, `norm.forward`,
    `gelu.backward`, `dropped_flash.forward`.
    """
    found: dict[str, Curve] = {}
    for field in fields(compute):
        value = getattr(compute, field.name)
        if isinstance(value, Curve):
            found[field.name] = value
        elif isinstance(value, PassCurves):
            found |= _both(field.name, value)
    for name, passes in compute.named.items():
        found |= _both(name, passes)
    return found | dict(zip(DROPPED_FLASH, compute.dropped_flash or (), strict=False))


def _both(name: str, passes: PassCurves) -> dict[str, Curve]:
    return {f"{name}.{direction}": getattr(passes, direction) for direction in DIRECTIONS}


def with_curves(compute: Compute, curves: Mapping[str, Any]) -> Compute:
    """The device with curves of those names in the place of its own: the inverse of `curves_of`."""
    changed: dict[str, Any] = {}
    for field in fields(compute):
        value = getattr(compute, field.name)
        if isinstance(value, Curve):
            changed[field.name] = curves[field.name]
        elif isinstance(value, PassCurves):
            changed[field.name] = _passes(field.name, curves)
    named = {name: _passes(name, curves) for name in compute.named}
    dropped = compute.dropped_flash and tuple(curves[name] for name in DROPPED_FLASH)
    return replace(compute, **changed, named=named, dropped_flash=dropped)


def _passes(name: str, curves: Mapping[str, Any]) -> PassCurves:
    return PassCurves(**{direction: curves[f"{name}.{direction}"] for direction in DIRECTIONS})


def points_of(records: Iterable[Record]) -> dict[str, Points]:
    """By curve, its points: the sizes in its order, and microseconds; by rising sizes, each sizes
    once (the mean of equal ones).
    """
    found: dict[str, dict[tuple[int, ...], list[float]]] = {}
    for record in records:
        if record.outcome is CaseOutcome.MEASURED and record.measured is not None:
            for one in record.case.passes:
                if one.curve and one.name in record.measured.times:
                    found.setdefault(one.curve, {}).setdefault(one.sizes, []).append(
                        record.measured.times[one.name].median_us
                    )
    return {
        curve: tuple((*sizes, fmean(times_us)) for sizes, times_us in sorted(points.items()))
        for curve, points in found.items()
    }


def with_points(compute: Compute, records: Iterable[Record]) -> Compute:
    """The device with the points of the records in every curve; a class of operations has those of
    its own name only.
    """
    points = points_of(records)
    return with_curves(
        compute,
        {
            name: replace(curve, points=points.get(name, ()))
            for name, curve in curves_of(compute).items()
        },
    )
