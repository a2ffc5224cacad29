"""Fitted forms of time: products, fused attention kernels, memory-bound operations, collectives.

A curve is a few constants and their kind: its own `kind` inside the bounds it was fitted in,
ANALYTIC outside. Shares are relative to a datasheet figure, so one compute curve serves devices
that differ in memory. Plain numbers in, seconds out; `profiles/build/__main__.py` fits them,
`costmodels/operators/compute.py` and `collectives.py` read them.
"""

from __future__ import annotations

import bisect
import functools
import math
from dataclasses import dataclass

from parplan.profiles.provenance import Kind
from parplan.profiles.units import US_PER_S

# tiles that matrix libraries choose from
TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
SPLITS = (2, 4, 8)  # parts of k worked on at once when there are fewer tiles than multiprocessors
SPLIT_LAUNCH_S = 2e-6  # assumed: the kernel that adds the parts
# how sharply the bounds of compute and memory meet: 4 was best of 2, 4 and 50 on A100, H100, B200
ROOFLINE_EXPONENT = 4.0
THROTTLE_SLOPE = 3.0  # a power limit sets in over about a factor 5 of work
FLASH_BACKWARD_FLOPS = 2.5  # over the forward's: two products more, and one recomputed
ALIGNED_BYTES = 16  # loaded at once by a tensor core: rows of other lengths make products slower
FLASH_ROWS = 128  # queries of one tile of a fused attention kernel
FLASH_TAIL_WAVES = 0.5  # best of 0, 0.5, 1 and 2 on A100, and no worse than 0 on H100
FLASH_HEAD_STEP = 32  # head_dim is padded to a multiple of it

_FORBID = {"extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SizeBounds:
    """The smallest and the largest of each size that a curve was fitted to."""

    __pydantic_config__ = _FORBID

    low: tuple[int, ...]
    high: tuple[int, ...]

    def contain(self, sizes: tuple[float, ...]) -> bool:
        return all(
            low <= size <= high for low, size, high in zip(self.low, sizes, self.high, strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curve:
    """The fields that all curves share: launch of one kernel, provenance, bounds and errors.

    worst_error: the error of the row that fits worst, only in a user's own profile
    points: the measurements, only in a user's own profile: sizes in the curve's order, and
        microseconds
    """

    __pydantic_config__ = _FORBID

    launch_s: float
    kind: Kind
    source: str
    bounds: SizeBounds | None = None
    rows: int = 0
    median_error: float | None = None
    worst_error: float | None = None
    points: tuple[tuple[int | float, ...], ...] = ()

    def kind_at(self, sizes: tuple[float, ...]) -> Kind:
        """Returns the curve's own kind where it was fitted, ANALYTIC elsewhere."""
        inside = self.bounds is not None and self.bounds.contain(sizes)
        return self.kind if inside else Kind.ANALYTIC


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MatmulCurve(Curve):
    """A product [m,k] x [k,n]; bounds on m, n, k.

    efficiency       share of the device's peak when every multiprocessor works and k is infinite,
                     at the boost clock
    k_half           the k at which a tile reaches half of that (its start and end)
    bandwidth_share  share of the memory bandwidth at which operands and result move
    throttle         extra time of arithmetic, as a share, once the device is at its power limit
    throttle_flops   the size of a product that alone brings a rested device halfway there
    untiled          a host, which cuts products into very small tiles: m and n count as they are
    """

    efficiency: float
    k_half: float
    bandwidth_share: float
    throttle: float = 0.0
    throttle_flops: float = 1e12
    untiled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlashCurve(Curve):
    """A fused attention kernel; bounds on sequence and head_dim.

    efficiency  share of the peak at infinite sequence and head_dim
    keys_half   the number of keys per query at which half of that is reached
    head_half   the head_dim at which half of that is reached
    """

    efficiency: float
    keys_half: float
    head_half: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryCurve(Curve):
    """An operation bound by memory; bounds on the bytes.

    bandwidth_share: share of the memory bandwidth at which the fewest bytes that the operation must
        move are moved; an un-fused operation moves more and has a small share.
    """

    bandwidth_share: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CollectiveCurve:
    """Microseconds of one collective on `ranks` GPUs of a node.

    They are the knots of a log-log spline over bytes (EQUATIONS C7).

    Only in a user's own profile, where the knots are the measured sizes, and a collective may be a
    point_to_point:
    nodes         number of nodes on each of which the group has `ranks`
    groups        number of such groups that each of these nodes took part in at once
    median_error  median over the knots of the spread of their repeats
    """

    __pydantic_config__ = _FORBID

    collective: str
    ranks: int
    bytes: tuple[int, ...]
    time_us: tuple[float, ...]
    rows: int
    median_error: float
    nodes: int = 1
    groups: int = 1

    def kind_at(self, n_bytes: float) -> Kind:
        """Returns the kind of a curve with measured knots at a size.

        It is MEASURED at a knot, INTERPOLATED between two, ANALYTIC beyond them.
        """
        if n_bytes in self.bytes:
            return Kind.MEASURED
        return Kind.INTERPOLATED if self.bytes[0] < n_bytes < self.bytes[-1] else Kind.ANALYTIC


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A product [m,k] x [k,n], `batch` times.

    operand_bytes: bytes of one element of the operands
    result_bytes: bytes moved for one element of the result
    """

    m: int
    n: int
    k: int
    batch: int = 1
    operand_bytes: int = 2
    result_bytes: int = 2

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def num_bytes(self) -> int:
        """The fewest bytes moved: operands read, result written (EQUATIONS K1)."""
        return self.batch * (
            self.operand_bytes * (self.m * self.k + self.k * self.n)
            + self.result_bytes * self.m * self.n
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """Datasheet figures of a device at one precision."""

    peak_flops_per_s: float
    bytes_per_s: float
    num_sms: int


@functools.lru_cache(maxsize=65536)
def matmul_s(product: Product, curve: MatmulCurve, chip: Chip, *, sustained: bool = True) -> float:
    """Seconds of a matrix product (EQUATIONS K1).

        t = launch + (c^4 + d^4)^(1/4)          d = bytes / (W share)
        c = (1 + throttle) min over tiles of r x s:  waves 2 r s (k + k_half) SMs / (peak e)
        waves = ceil(ceil(m/r) ceil(n/s) / SMs)

    The fourth power is the larger of the two, rounded where they meet. `sustained`: the device is
    at its power limit, as in training; a single product on a rested device slows down only with its
    own size. Leaves out: other work, cache hits.
    """
    compute_s = _tiles_s(product, curve, chip) * (
        1 + curve.throttle * (1.0 if sustained else _heat(product.flops, curve))
    )
    memory_s = product.num_bytes / (chip.bytes_per_s * curve.bandwidth_share)
    larger, smaller = max(compute_s, memory_s), min(compute_s, memory_s)
    rounded: float = (1 + (smaller / larger) ** ROOFLINE_EXPONENT) ** (1 / ROOFLINE_EXPONENT)
    return curve.launch_s + larger * rounded


def _heat(flops: float, curve: MatmulCurve) -> float:
    """Returns how far one product alone brings a rested device to its power limit, 0..1.

    It is logistic in log10 of the product's FLOPs.
    """
    return float(1 / (1 + (flops / curve.throttle_flops) ** (-THROTTLE_SLOPE / math.log(10))))


def _tiles_s(product: Product, curve: MatmulCurve, chip: Chip) -> float:
    """Seconds of the arithmetic with the best tile: whole waves of tiles, each of k + k_half steps.

    Where tiles are fewer than multiprocessors k is split as well, and the parts are added in fp32.
    """
    sms = chip.num_sms
    rate = chip.peak_flops_per_s * curve.efficiency / sms
    if curve.untiled:
        return 2 * product.batch * product.m * product.n * (product.k + curve.k_half) / (sms * rate)
    best = math.inf
    for rows, columns in TILES:
        tiles = -(-product.m // rows) * -(-product.n // columns) * product.batch
        step_s = 2 * rows * columns / rate
        best = min(best, -(-tiles // sms) * step_s * (product.k + curve.k_half))
        if tiles < sms:
            memory_bytes_per_s = chip.bytes_per_s * curve.bandwidth_share
            part_s = 4 * product.m * product.n * product.batch / memory_bytes_per_s
            for parts in SPLITS:
                added_s = SPLIT_LAUNCH_S + (parts + 1) * part_s
                steps = product.k / parts + curve.k_half
                best = min(best, -(-tiles * parts // sms) * step_s * steps + added_s)
    return best


def flash_attention_s(
    flops: float, *, heads: int, seq: int, keys: float, head_dim: int, curve: FlashCurve, chip: Chip
) -> float:
    """Seconds of a fused attention kernel (EQUATIONS K2).

    It does `flops` for `heads` heads (batch included) of `seq` queries.

        t = launch + flops (D/d) / (peak e q K/(K + K_half) D/(D + D_half))
        q = w / (max(w, 1) + 1/2)

    d: head_dim, D: d rounded up to 32; K `keys`: the mean number of keys a query meets, half the
    sequence when causal; w: tiles of 128 queries per multiprocessor, of which the last wave is half
    empty. Leaves out: memory traffic, which it hides.
    """
    waves = heads * -(-seq // FLASH_ROWS) / chip.num_sms
    filled = waves / (max(waves, 1.0) + FLASH_TAIL_WAVES)
    padded = -(-head_dim // FLASH_HEAD_STEP) * FLASH_HEAD_STEP
    share = (
        curve.efficiency
        * filled
        * keys
        / (keys + curve.keys_half)
        * padded
        / (padded + curve.head_half)
    )
    return curve.launch_s + flops * padded / head_dim / (chip.peak_flops_per_s * share)


def memory_bound_s(n_bytes: float, curve: MemoryCurve, bytes_per_s: float) -> float:
    """Seconds of an operation that moves `n_bytes`: t = launch + n / (share W) (EQUATIONS K3).

    Leaves out: cache hits.
    """
    return curve.launch_s + n_bytes / (curve.bandwidth_share * bytes_per_s)


def spline_s(curve: CollectiveCurve, n_bytes: float) -> float:
    """Seconds at `n_bytes`, log-log between knots (EQUATIONS C7).

    The curve is flat below the first knot and proportional above the last.
    """
    knots, times_us = curve.bytes, curve.time_us
    if n_bytes <= knots[0]:
        return times_us[0] / US_PER_S
    if n_bytes >= knots[-1]:
        return times_us[-1] / US_PER_S * n_bytes / knots[-1]
    i = bisect.bisect_right(knots, n_bytes) - 1
    share = math.log(n_bytes / knots[i]) / math.log(knots[i + 1] / knots[i])
    return times_us[i] / US_PER_S * math.exp(share * math.log(times_us[i + 1] / times_us[i]))
