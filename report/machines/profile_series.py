"""The measured points of a profile beside the fitted values of its curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from parplan.profiles.machines.curves import (
    FLASH_BACKWARD_FLOPS,
    Chip,
    Curve,
    FlashCurve,
    MatmulCurve,
    MemoryCurve,
    Product,
    flash_attention_s,
    matmul_s,
    memory_bound_s,
)
from parplan.profiles.machines.machine_catalog import cluster_from_document
from parplan.profiles.machines.measured_points import curves_of
from parplan.profiles.machines.user_profile import UserProfile
from parplan.profiles.models.spec import Precision
from parplan.profiles.units import GB, TERA, US_PER_S


@dataclass(frozen=True, slots=True)
class RatedPoint:
    """One measured point of a curve.

    work      FLOPs, or bytes moved
    fitted_s  seconds of the curve for the same sizes
    """

    sizes: tuple[int, ...]
    work: float
    time_s: float
    fitted_s: float

    @property
    def rate(self) -> float:
        """FLOP/s or bytes/s."""
        return self.work / self.time_s

    @property
    def fitted_rate(self) -> float:
        return self.work / self.fitted_s


@dataclass(frozen=True, slots=True)
class CurveSeries:
    """A curve with its points by rising work."""

    name: str
    curve: Curve
    points: tuple[RatedPoint, ...]

    @property
    def unit(self) -> str:
        return "GB/s" if isinstance(self.curve, MemoryCurve) else "TFLOP/s"

    @property
    def scale(self) -> float:
        """Rate of one `unit`."""
        return GB if isinstance(self.curve, MemoryCurve) else TERA


def chip_of(profile: UserProfile) -> Chip | None:
    """Returns the datasheet speeds that curves are shares of, None if the file has no machine.

    Raises ConfigError when the machine lacks the precision.
    """
    if profile.cluster is None or profile.precision is None:
        return None
    device = cluster_from_document(profile.cluster, "cluster").device
    return Chip(
        peak_flops_per_s=device.peak(profile.precision),
        bytes_per_s=device.memory_bytes_per_s,
        num_sms=max(1, device.num_sms),
    )


def series_of(profile: UserProfile) -> tuple[CurveSeries, ...]:
    """Returns the curves with points, in the file's order; raises ConfigError like `chip_of`."""
    chip = chip_of(profile)
    if profile.profile is None or chip is None or profile.precision is None:
        return ()
    element_bytes = Precision(profile.precision).num_bytes
    all_series = []
    for name, curve in curves_of(profile.profile.compute).items():
        rate = _rater(name, curve, chip, element_bytes)
        points = sorted(
            (rate(tuple(map(int, sizes)), time_us / US_PER_S) for *sizes, time_us in curve.points),
            key=lambda point: point.work,
        )
        if points:
            all_series.append(CurveSeries(name, curve, tuple(points)))
    return tuple(all_series)


def _rater(
    name: str, curve: Curve, chip: Chip, element_bytes: int
) -> Callable[[tuple[int, ...], float], RatedPoint]:
    """Returns a function that makes a point of sizes and seconds."""

    def rate(sizes: tuple[int, ...], time_s: float) -> RatedPoint:
        if isinstance(curve, MatmulCurve):
            product = product_of(sizes, element_bytes)
            return RatedPoint(sizes, product.flops, time_s, matmul_s(product, curve, chip))
        if isinstance(curve, FlashCurve):
            heads, seq, head_dim = sizes
            passes = FLASH_BACKWARD_FLOPS if name.endswith("backward") else 1.0
            flops = passes * 2.0 * heads * seq * seq * head_dim
            fitted_s = flash_attention_s(
                flops, heads=heads, seq=seq, keys=seq / 2, head_dim=head_dim, curve=curve, chip=chip
            )
            return RatedPoint(sizes, flops, time_s, fitted_s)
        assert isinstance(curve, MemoryCurve)
        return RatedPoint(
            sizes, sizes[0], time_s, memory_bound_s(sizes[0], curve, chip.bytes_per_s)
        )

    return rate


def product_of(sizes: Sequence[int], element_bytes: int) -> Product:
    """Returns the product of `sizes`, which are (m, n, k) or (batch, m, n, k)."""
    *batch, m, n, k = sizes
    return Product(
        m=m,
        n=n,
        k=k,
        batch=math.prod(batch),
        operand_bytes=element_bytes,
        result_bytes=element_bytes,
    )
