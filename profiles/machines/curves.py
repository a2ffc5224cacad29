"""Fitted forms of time: products, fused attention kernels, memory-bound operations, collectives.

A curve is a few constants and their kind: its own `kind` inside the bounds it was fitted in,
ANALYTIC outside. Shares are relative to a datasheet figure, so one compute curve serves devices
that differ in memory. Plain numbers in, seconds out; `profiles/build/__main__.py` fits them,
`costmodels/operators/compute.py` and `collectives.py` read them.
"""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import dataclass

from parplan.profiles.elementwise import (
    Number,
    anywhere,
    chosen,
    exp,
    interpolated,
    larger_of,
    log,
    smaller_of,
    sqrt,
)
from parplan.profiles.errors import ConfigError
from parplan.profiles.provenance import Kind, Kinds, kinds_where
from parplan.profiles.units import US_PER_S

# tiles that matrix libraries choose from
TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
SPLITS = (2, 4, 8)  # parts of k worked on at once when there are fewer tiles than multiprocessors
SPLIT_LAUNCH_S = 2e-6  # assumed: the kernel that adds the parts
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

    def contain(self, sizes: tuple[Number, ...]) -> Number:
        inside: Number = True
        for low, size, high in zip(self.low, sizes, self.high, strict=True):
            inside = inside & (low <= size) & (size <= high)
        return inside


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

    def kind_at(self, sizes: tuple[Number, ...]) -> Kinds:
        """Returns the curve's own kind where it was fitted, ANALYTIC elsewhere."""
        if self.bounds is None:
            return Kind.ANALYTIC
        return kinds_where(self.bounds.contain(sizes), self.kind, Kind.ANALYTIC)


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
class GroupedCurve(Curve):
    """One product for each group of rows, as of the experts of a rank; bounds on a group's m, n, k.

    It is relative to the curve of single products, whose tiles of all groups share the waves. Here
    `launch_s` is the time that each group adds.

    slowdown  time of the arithmetic over that of a single product of as many tiles
    """

    slowdown: float


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

    def __post_init__(self) -> None:
        """Raises ConfigError for other numbers than positive ones at growing sizes."""
        grows = all(map(operator.lt, (0, *self.bytes), self.bytes))
        if not self.bytes or not grows or len(self.time_us) != len(self.bytes):
            problem = (
                f"{len(self.time_us)} times at the bytes {', '.join(map(str, self.bytes[:9]))}"
            )
        elif min(self.time_us) <= 0:
            problem = f"a time of {min(self.time_us):g} us"
        else:
            return
        raise ConfigError(
            f"a curve of {self.collective} has {problem}, needed are growing bytes and a positive "
            "time at each",
            hint="measure it again",
        )

    def kind_at(self, n_bytes: Number) -> Kinds:
        """Returns the kind of a curve with measured knots at a size.

        It is MEASURED at a knot, INTERPOLATED between two, ANALYTIC beyond them.
        """
        between = (self.bytes[0] < n_bytes) & (n_bytes < self.bytes[-1])
        beside = kinds_where(between, Kind.INTERPOLATED, Kind.ANALYTIC)
        measured: Number = False
        for knot in self.bytes:
            measured = measured | (n_bytes == knot)
        return kinds_where(measured, Kind.MEASURED, beside)


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A product [m,k] x [k,n], `batch` times.

    Its sizes may be arrays, for many products at once.

    operand_bytes: bytes of one element of the operands
    result_bytes: bytes moved for one element of the result
    """

    m: Number
    n: Number
    k: Number
    batch: Number = 1
    operand_bytes: float = 2
    result_bytes: int = 2

    @property
    def flops(self) -> Number:
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def num_bytes(self) -> Number:
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


def matmul_s(product: Product, curve: MatmulCurve, chip: Chip, *, sustained: bool = True) -> Number:
    """Seconds of a matrix product (EQUATIONS K1).

        t = launch + (c^4 + d^4)^(1/4)          d = bytes / (W share)
        c = (1 + throttle) min over tiles of r x s:  waves 2 r s (k + k_half) SMs / (peak e)
        waves = ceil(ceil(m/r) ceil(n/s) / SMs)

    The fourth power, which is the larger of the two, rounded where they meet, was best of 2, 4 and
    50 on A100, H100 and B200. `sustained`: the device is
    at its power limit, as in training; a single product on a rested device slows down only with its
    own size. Leaves out: other work, cache hits.
    """
    compute_s = _tiles_s(product, curve, chip) * (
        1 + curve.throttle * (1.0 if sustained else _heat(product.flops, curve))
    )
    memory_s = product.num_bytes / (chip.bytes_per_s * curve.bandwidth_share)
    larger = larger_of(compute_s, memory_s)
    squared = (smaller_of(compute_s, memory_s) / larger) ** 2
    return curve.launch_s + larger * sqrt(sqrt(1 + squared * squared))


def grouped_s(single_s: Number, groups: Number, curve: GroupedCurve) -> Number:
    """Seconds of a product over groups, t = slowdown single + groups launch (EQUATIONS K1).

    single_s  seconds of one product with the tiles of all groups (`matmul_s` with a batch)

    Leaves out: groups of unlike sizes, which a caller prices by the fullest rank.
    """
    return curve.slowdown * single_s + groups * curve.launch_s


def _heat(flops: Number, curve: MatmulCurve) -> Number:
    """Returns how far one product alone brings a rested device to its power limit, 0..1.

    It is logistic in log10 of the product's FLOPs.
    """
    return 1 / (1 + (flops / curve.throttle_flops) ** (-THROTTLE_SLOPE / math.log(10)))


def _tiles_s(product: Product, curve: MatmulCurve, chip: Chip) -> Number:
    """Seconds of the arithmetic with the best tile: whole waves of tiles, each of k + k_half steps.

    Where tiles are fewer than multiprocessors k is split as well, and the parts are added in fp32.
    """
    sms = chip.num_sms
    rate = chip.peak_flops_per_s * curve.efficiency / sms
    if curve.untiled:
        return 2 * product.batch * product.m * product.n * (product.k + curve.k_half) / (sms * rate)
    best: Number = math.inf
    part_s = 4 * product.m * product.n * product.batch / (chip.bytes_per_s * curve.bandwidth_share)
    for rows, columns in TILES:
        tiles = -(-product.m // rows) * -(-product.n // columns) * product.batch
        step_s = 2 * rows * columns / rate
        best = smaller_of(best, -(-tiles // sms) * step_s * (product.k + curve.k_half))
        few = tiles < sms
        if not anywhere(few):
            continue
        for parts in SPLITS:
            added_s = SPLIT_LAUNCH_S + (parts + 1) * part_s
            steps = product.k / parts + curve.k_half
            split_s = -(-tiles * parts // sms) * step_s * steps + added_s
            best = smaller_of(best, chosen(few, split_s, math.inf))
    return best


def flash_attention_s(
    flops: Number,
    *,
    heads: Number,
    seq: Number,
    keys: Number,
    head_dim: Number,
    curve: FlashCurve,
    chip: Chip,
) -> Number:
    """Seconds of a fused attention kernel (EQUATIONS K2).

    It does `flops` for `heads` heads (batch included) of `seq` queries.

        t = launch + flops (D/d) / (peak e q K/(K + K_half) D/(D + D_half))
        q = w / (max(w, 1) + 1/2)

    d: head_dim, D: d rounded up to 32; K `keys`: the mean number of keys a query meets, half the
    sequence when causal; w: tiles of 128 queries per multiprocessor, of which the last wave is half
    empty. Leaves out: memory traffic, which it hides.
    """
    waves = heads * -(-seq // FLASH_ROWS) / chip.num_sms
    filled = waves / (larger_of(waves, 1.0) + FLASH_TAIL_WAVES)
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


def deterministic_share(heads: Number, chip: Chip) -> Number:
    """Returns the share of multiprocessors at work in a deterministic backward pass (EQUATIONS K2).

    It is that of FlashAttention 2.

        blocks = ceil(SMs / H) H        share = blocks / (SMs ceil(blocks / SMs))

    `heads` H include the batch. A head has as many thread blocks as fill the multiprocessors once,
    each with its own sum of dq, and a multiprocessor runs one block at a time
    (Dao-AILab/flash-attention 0251105a csrc/flash_attn/src/flash_bwd_launch_template.h).
    """
    blocks = -(-chip.num_sms // heads) * heads
    return blocks / (chip.num_sms * -(-blocks // chip.num_sms))


def memory_bound_s(n_bytes: Number, curve: MemoryCurve, bytes_per_s: float) -> Number:
    """Seconds of an operation that moves `n_bytes`: t = launch + n / (share W) (EQUATIONS K3).

    Leaves out: cache hits.
    """
    return curve.launch_s + n_bytes / (curve.bandwidth_share * bytes_per_s)


def spline_s(curve: CollectiveCurve, n_bytes: Number) -> Number:
    """Seconds at `n_bytes`, log-log between knots (EQUATIONS C7).

    The curve is flat below the first knot and proportional above the last.
    """
    last = curve.bytes[-1]
    knots, log_times = _logarithms(curve)
    within = log(larger_of(smaller_of(n_bytes, last), curve.bytes[0]))
    return exp(interpolated(within, knots, log_times)) / US_PER_S * larger_of(n_bytes / last, 1.0)


@functools.lru_cache(maxsize=512)
def _logarithms(curve: CollectiveCurve) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns the logarithms of the knots and of their microseconds."""
    return tuple(map(math.log, curve.bytes)), tuple(map(math.log, curve.time_us))
