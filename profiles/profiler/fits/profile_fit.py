"""Fits a machine's curves, in the forms of profiles/machines/curves.py, to its records.

Every constant is drawn towards its assumed value for an unmeasured device, with a fiftieth of the
weight of a point. Constants that no point determines stay there, so one point gives a sane curve,
and many points decide alone. A curve without points is the assumption itself, ANALYTIC. Gradients
are drawn towards the forward product, and any other backward pass towards its assumption moved as
the forward pass was, so that a time budget that ends between the two leaves no backward pass of
another machine beside a measured forward pass. Repeats run back to back, so the times include a
power limit and curves have no throttle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from parplan.profiles.machines.curve_fitting import Array, fit, rounded, rounded_curve
from parplan.profiles.machines.curves import (
    ALIGNED_BYTES,
    FLASH_BACKWARD_FLOPS,
    Chip,
    Curve,
    FlashCurve,
    MatmulCurve,
    MemoryCurve,
    Product,
    SizeBounds,
    flash_attention_s,
    matmul_s,
    memory_bound_s,
)
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.machines.measured_points import (
    DIRECTIONS,
    DROPPED_FLASH,
    MEMBERS,
    NAMED,
    OTHERS,
    with_points,
)
from parplan.profiles.machines.measurements import Case, CaseOutcome, Record
from parplan.profiles.machines.shipped_profiles import ASSUMED_SHARES, analytic_profile
from parplan.profiles.machines.speeds import Compute, InStep, Inter, Intra, PassCurves, Profile
from parplan.profiles.models.spec import Precision
from parplan.profiles.provenance import Kind
from parplan.profiles.units import US_PER_S

HOST_K_HALF = 4.0  # 1.5 was fitted to products of a core of AMD EPYC (Genoa) with torch 2.13
DRAW = 0.02  # weight of an assumption relative to a point
HALF_SPREAD = 0.1  # a point with this spread of repeats counts half
AnyCurve = TypeVar("AnyCurve", bound=Curve)
_PRODUCT = ("efficiency", "k_half", "bandwidth_share", "launch_s")
_FLASH = ("efficiency", "keys_half", "head_half", "launch_s")
_MEMORY = ("bandwidth_share", "launch_s")


@dataclass(frozen=True, slots=True)
class TimedPoint:
    """One timed pass: curve, case, sizes in the order of the curve, time and spread."""

    curve: str
    case: Case
    sizes: tuple[int, ...]
    time_s: float
    spread: float

    @property
    def weight(self) -> float:
        return 1 / (1 + self.spread / HALF_SPREAD)


@dataclass(frozen=True, slots=True)
class _Form:
    """Points and hardware shared by all fits of one device."""

    points: Mapping[str, Sequence[TimedPoint]]
    chip: Chip
    element_bytes: int

    def of(self, *names: str) -> list[TimedPoint]:
        """The points of the named curves."""
        return [point for name in names for point in self.points.get(name, ())]


def fit_profile(
    records: Sequence[Record],
    cluster: Cluster,
    precision: Precision | str,
    *,
    intra: Intra,
    inter: Inter,
    contention: float | None = None,
    in_step: InStep | None = None,
) -> Profile:
    """The profile of the cluster's device: fitted curves, and the given links."""
    compute = fit_compute(records, cluster, precision)
    return Profile(
        name=cluster.device.name,
        compute=compute,
        intra=intra,
        inter=inter,
        in_step=in_step,
        contention=contention,
    )


def fit_compute(records: Sequence[Record], cluster: Cluster, precision: Precision | str) -> Compute:
    """Fits every curve of the cluster's device and adds the points of the records.

    Raises ConfigError for a precision that the device lacks.
    """
    device = cluster.device
    arithmetic = Precision(precision)
    chip = Chip(
        peak_flops_per_s=device.peak(arithmetic),
        bytes_per_s=device.memory_bytes_per_s,
        num_sms=max(1, device.num_sms),
    )
    form = _Form(_by_curve(records), chip, arithmetic.num_bytes)
    assumed = _assumed(form, device.name)
    classes = _classes(form, assumed)
    fitted: dict[str, Any] = {**_products(form, assumed), **classes}
    flash = _flash(form, assumed.flash_forward, "flash_forward", 1.0)
    flash_backward = _moved(assumed.flash_backward, _FLASH, assumed.flash_forward, flash)
    compute = replace(
        assumed,
        **fitted,
        optimizer=_memory(form, assumed.optimizer, "optimizer"),
        flash_forward=flash,
        flash_backward=_flash(form, flash_backward, "flash_backward", FLASH_BACKWARD_FLOPS),
    )
    return with_points(
        replace(compute, dropped_flash=_dropped(form, compute), named=_named(form, classes)),
        records,
    )


def _assumed(form: _Form, device_name: str) -> Compute:
    """The assumed curves; the tiles of a host are too small to matter and need little k."""
    compute = analytic_profile(device_name).compute
    if form.chip.num_sms > 1:
        return compute
    product = replace(compute.forward, k_half=HOST_K_HALF, untiled=True)
    products = (
        "forward",
        "input_gradient",
        "weight_gradient",
        "batched_forward",
        "batched_backward",
    )
    same: dict[str, Any] = dict.fromkeys(products, product)
    return replace(compute, **same)


def _moved(
    backward: AnyCurve, names: Sequence[str], assumed: AnyCurve, fitted: AnyCurve
) -> AnyCurve:
    """Returns an assumed backward pass moved as the fit moved the assumed forward pass."""
    if not fitted.rows:
        return backward
    return replace(
        backward,
        **{
            name: getattr(backward, name) * getattr(fitted, name) / getattr(assumed, name)
            for name in names
            if getattr(assumed, name) > 0
        },
    )


def _by_curve(records: Sequence[Record]) -> dict[str, list[TimedPoint]]:
    points: dict[str, list[TimedPoint]] = {}
    for record in records:
        if record.outcome is not CaseOutcome.MEASURED or record.measured is None:
            continue
        for timed in record.case.passes:
            if timed.curve and timed.name in record.measured.times:
                timing = record.measured.times[timed.name]
                point = TimedPoint(
                    timed.curve,
                    record.case,
                    timed.sizes,
                    timing.median_us / US_PER_S,
                    timing.spread,
                )
                points.setdefault(timed.curve, []).append(point)
    return points


def _fitted(
    points: Sequence[TimedPoint],
    base: AnyCurve,
    names: Sequence[str],
    price: Callable[[TimedPoint, AnyCurve], float],
    extent: Callable[[TimedPoint], tuple[int, ...]] = lambda point: point.sizes,
    beside: Sequence[TimedPoint] = (),
) -> AnyCurve:
    """Fits the named constants of `base` to points and sets errors and bounds.

    The bounds also cover points `beside`, which are not fitted. Without points `base` stays
    ANALYTIC.
    """
    if not points:
        return replace(
            base, kind=Kind.ANALYTIC, bounds=None, rows=0, median_error=None, worst_error=None
        )
    start = np.array([getattr(base, name) for name in names])
    times_s = np.array([point.time_s for point in points])

    def curve(x: Array) -> AnyCurve:
        return replace(base, **dict(zip(names, x.tolist(), strict=True)))

    def priced(there: AnyCurve) -> Array:
        return np.array([price(point, there) for point in points])

    weights = np.array([*(point.weight for point in points), *(DRAW for _ in start)])
    constants = _least(
        lambda x: np.concatenate([priced(curve(x)), x]),
        np.concatenate([times_s, start]),
        weights,
        _starts(names, start, times_s),
    )
    fitted = rounded_curve(curve(constants))
    errors = np.abs(priced(fitted) / times_s - 1)
    sizes = np.array([extent(point) for point in (*points, *beside)])
    works = ", ".join(sorted({point.case.work for point in points}))
    return replace(
        fitted,
        kind=Kind.INTERPOLATED,
        source=f"{works} on this machine, under steady load",
        bounds=SizeBounds(
            low=tuple(sizes.min(axis=0).tolist()), high=tuple(sizes.max(axis=0).tolist())
        ),
        rows=len(points),
        median_error=rounded(float(np.median(errors))),
        worst_error=rounded(float(errors.max())),
    )


def _starts(names: Sequence[str], start: Array, times_s: Array) -> tuple[Array, ...]:
    """The assumption, and the same with a launch of half the shortest time.

    The fit does not reach a launch far above the assumption from below.
    """
    slow = start.copy()
    slow[names.index("launch_s")] = times_s.min() / 2
    return start, slow


def _least(
    predict: Callable[[Array], Array], measured: Array, weights: Array, starts: Sequence[Array]
) -> Array:
    """The best of the fits from several starts."""

    def off(constants: Array) -> float:
        return float(np.sum(weights * np.abs(np.log(predict(constants) / measured))))

    return min((fit(predict, measured, start.tolist(), weights) for start in starts), key=off)


def _products(form: _Form, assumed: Compute) -> dict[str, MatmulCurve]:
    """Curves of linear layers' products, and of un-fused attention's by sequence and head_dim."""

    def price(point: TimedPoint, curve: MatmulCurve) -> float:
        m, n, k = point.sizes
        product = Product(
            m=m, n=n, k=k, operand_bytes=form.element_bytes, result_bytes=form.element_bytes
        )
        return float(matmul_s(product, curve, form.chip, sustained=True))

    def batched(point: TimedPoint, curve: MatmulCurve) -> float:
        batch, m, n, k = _batched_sizes(point)
        product = Product(
            m=m,
            n=n,
            k=k,
            batch=batch,
            operand_bytes=form.element_bytes,
            result_bytes=form.element_bytes,
        )
        return float(matmul_s(product, curve, form.chip, sustained=True))

    def heads(point: TimedPoint) -> tuple[int, ...]:
        _, m, n, k = _batched_sizes(point)
        return m, min(n, k)

    def linear(name: str, base: MatmulCurve) -> MatmulCurve:
        return _fitted(_aligned(form, name), base, _PRODUCT, price, beside=form.of(name))

    forward = linear("forward", assumed.forward)
    batched_forward = _fitted(
        form.of("batched_forward"), assumed.batched_forward, _PRODUCT, batched, heads
    )
    batched_backward = _moved(
        assumed.batched_backward, _PRODUCT, assumed.batched_forward, batched_forward
    )
    return {
        "forward": forward,
        "input_gradient": linear("input_gradient", forward),
        "weight_gradient": linear("weight_gradient", forward),
        "batched_forward": batched_forward,
        "batched_backward": _fitted(
            form.of("batched_backward"), batched_backward, _PRODUCT, batched, heads
        ),
    }


def _aligned(form: _Form, name: str) -> list[TimedPoint]:
    """The points of a product; on an accelerator only those with aligned rows, if there are any.

    Rows are aligned if they are whole loads.
    """
    points = form.of(name)
    if form.chip.num_sms == 1:
        return points
    whole = [
        point for point in points if _row_elements(point) * form.element_bytes % ALIGNED_BYTES == 0
    ]
    return whole or points


def _row_elements(point: TimedPoint) -> int:
    first, second, third = point.sizes
    return math.gcd(first, second) if point.curve == "weight_gradient" else math.gcd(second, third)


def _batched_sizes(point: TimedPoint) -> tuple[int, ...]:
    """Returns (batch, m, n, k) of a product of un-fused attention."""
    return tuple(point.case.size(name) for name in ("batch", "m", "n", "k"))


def _flash(form: _Form, base: FlashCurve, name: str, work: float) -> FlashCurve:
    """Fused causal attention, bounded by sequence and head_dim."""

    def price(point: TimedPoint, curve: FlashCurve) -> float:
        heads, seq, head_dim = point.sizes
        flops = work * 4.0 * heads * seq * seq / 2 * head_dim
        time_s: float = flash_attention_s(
            flops,
            heads=heads,
            seq=seq,
            keys=seq / 2,
            head_dim=head_dim,
            curve=curve,
            chip=form.chip,
        )
        return time_s

    return _fitted(form.of(name), base, _FLASH, price, lambda point: point.sizes[1:])


def _dropped(form: _Form, compute: Compute) -> tuple[FlashCurve, FlashCurve] | None:
    """Fused attention with dropout, drawn towards that without; None if it was not measured."""
    if not form.of(*DROPPED_FLASH):
        return None
    forward, backward = DROPPED_FLASH
    return (
        _flash(form, compute.flash_forward, forward, 1.0),
        _flash(form, compute.flash_backward, backward, FLASH_BACKWARD_FLOPS),
    )


def _memory(form: _Form, base: MemoryCurve, *names: str) -> MemoryCurve:
    def price(point: TimedPoint, curve: MemoryCurve) -> float:
        return float(memory_bound_s(point.sizes[0], curve, form.chip.bytes_per_s))

    return _fitted(form.of(*names), base, _MEMORY, price)


def _classes(form: _Form, assumed: Compute) -> dict[str, PassCurves]:
    """The classes of memory-bound operations, each fitted over the points of all its members."""
    return {
        name: _passes(form, getattr(assumed, name), (name, *MEMBERS.get(name, ())))
        for name in ASSUMED_SHARES
    }


def _passes(form: _Form, base: PassCurves, members: Sequence[str]) -> PassCurves:
    """Fits the two passes of operations, the second drawn towards what the first says of it."""
    first, second = DIRECTIONS
    forward = _memory(form, getattr(base, first), *(f"{each}.{first}" for each in members))
    moved = _moved(getattr(base, second), _MEMORY, getattr(base, first), forward)
    backward = _memory(form, moved, *(f"{each}.{second}" for each in members))
    return PassCurves(**{first: forward, second: backward})


def _named(form: _Form, classes: Mapping[str, PassCurves]) -> dict[str, PassCurves]:
    """Single operations with points, drawn towards their class.

    The class also replaces a pass without points.
    """
    measured = {curve.rpartition(".")[0] for curve in form.points}
    names = sorted(measured - {"", *classes, *(name.rpartition(".")[0] for name in DROPPED_FLASH)})
    return {name: _passes(form, classes[NAMED.get(name, OTHERS)], (name,)) for name in names}
