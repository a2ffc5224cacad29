"""The names of a device's curves, and the measured points of each."""

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
MEMBERS = {  # class of memory-bound operations -> its members that may have their own curve
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
NAMED = {name: group for group, members in MEMBERS.items() for name in members}
OTHERS = "elementwise"  # the class of every other operation
Points = tuple[tuple[float, ...], ...]


def curves_of(compute: Compute) -> dict[str, Curve]:
    """Returns every curve by the name that passes of cases give it.

    Names are `forward`, `norm.forward`, `gelu.backward`, `dropped_flash.forward` and the like.
    """
    curves: dict[str, Curve] = {}
    for field in fields(compute):
        value = getattr(compute, field.name)
        if isinstance(value, Curve):
            curves[field.name] = value
        elif isinstance(value, PassCurves):
            curves |= _both(field.name, value)
    for name, passes in compute.named.items():
        curves |= _both(name, passes)
    return curves | dict(zip(DROPPED_FLASH, compute.dropped_flash or (), strict=False))


def _both(name: str, passes: PassCurves) -> dict[str, Curve]:
    return {f"{name}.{direction}": getattr(passes, direction) for direction in DIRECTIONS}


def with_curves(compute: Compute, curves: Mapping[str, Any]) -> Compute:
    """Returns the device with its curves replaced by those of the same names.

    It is the inverse of `curves_of`.
    """
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
    """Returns the points of each curve: the sizes in the curve's order, and microseconds.

    They are sorted by sizes; equal sizes are one point with the mean time.
    """
    times_us: dict[str, dict[tuple[int, ...], list[float]]] = {}
    for record in records:
        if record.outcome is not CaseOutcome.MEASURED or record.measured is None:
            continue
        for case_pass in record.case.passes:
            timing = record.measured.times.get(case_pass.name)
            if case_pass.curve and timing is not None:
                by_sizes = times_us.setdefault(case_pass.curve, {})
                by_sizes.setdefault(case_pass.sizes, []).append(timing.median_us)
    return {
        curve: tuple((*sizes, fmean(equal_us)) for sizes, equal_us in sorted(by_sizes.items()))
        for curve, by_sizes in times_us.items()
    }


def with_points(compute: Compute, records: Iterable[Record]) -> Compute:
    """Returns the device with the points of the records in every curve.

    The curve of a class of operations has only the points of its own name.
    """
    points = points_of(records)
    curves = {
        name: replace(curve, points=points.get(name, ()))
        for name, curve in curves_of(compute).items()
    }
    return with_curves(compute, curves)


def with_unmeasured_of(base: Compute, fitted: Compute, source: str) -> Compute:
    """Returns the fitted device with the curves of `base` where the fitted ones have no point.

    source   of the fitted curves
    """
    kept = curves_of(base)
    curves = {
        name: replace(curve, source=source) if curve.points else kept.get(name, curve)
        for name, curve in curves_of(fitted).items()
    }
    return replace(
        with_curves(fitted, curves),
        grouped=base.grouped,
        flash_kernels=base.flash_kernels,
    )
