"""The fits of one device's compute curves; `profiles/calibrate.py` says on which rows and puts them into profiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np

from profiles.curves import Chip, FlashCurve, MatmulCurve, MemoryCurve, Product, flash_attention_s, matmul_s, memory_bound_s
from profiles.fitting import AnyCurve, Array, Family, Row, Score, Tables, Where, fit, ints, rounded, score, sources_of, times_s
from profiles.hardware import Cluster
from profiles.measured import ASSUMED_SHARES, Compute, FlashSpeed, Passes, analytic_profile, assumed_memory
from profiles.provenance import Kind
from profiles.spec import Precision
from profiles.stack import FlashKernel
from profiles.units import US_PER_S

Efficient = TypeVar("Efficient", MatmulCurve, FlashCurve)
LEAST_LAUNCH_S = 1e-6  # no kernel starts and ends sooner
TABLE_PASSES = 3  # over the gradient of an embedding table: zeroed, read and written
FLASH_BACKWARD_FLOPS = 2.5
TRAINED_HEAD_DIMS = (64, 80, 96, 128)
CACHE_WRITE = "with_kv_cache_write"
SIMUMAX = "MooreThreads/SimuMax"
SUPERSCALER = "microsoft/SuperScaler"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Which rows a device's profile rests on; an empty name: none.

    gpu            name of the device in the tables
    throttles      it reaches its power limit in the rows
    gradients      GPU whose backward products (free of tiny gradients) give their efficiency relative to its forward ones
    flash          kernels of the forward rows
    flash_backward a GPU with backward rows, or the kernel of a published figure on H100
    memory         GPU whose element-wise rows count
    sources        of products; collectives: of collectives
    """

    device: str
    gpu: str
    throttles: bool
    gradients: str
    flash: tuple[str, ...]
    flash_backward: str
    memory: str
    sources: tuple[str, ...]
    collectives: tuple[str, ...]


# Datasheets of parts that lend rows to others: dense 16-bit FLOP/s, bytes/s, multiprocessors.
LENDERS = {
    "A100-PCIe-80GB": Chip(peak_flops_per_s=312e12, bytes_per_s=1935e9, num_sms=108),
    "H100-SXM5-80GB": Chip(peak_flops_per_s=989e12, bytes_per_s=3350e9, num_sms=132),
    "GH200-96GB": Chip(peak_flops_per_s=989e12, bytes_per_s=4000e9, num_sms=132),
    "B200-SXM-180GB": Chip(peak_flops_per_s=2250e12, bytes_per_s=8000e9, num_sms=148),
}

# TFLOP/s of fused attention on H100-SXM5-80GB: the bars of figures 5 (forward, causal) and 6 (backward, not causal) of the
# FlashAttention-3 paper (Shah et al. 2024, arXiv 2407.08608), by head_dim, for these sequences of 16,384 tokens in all and a
# hidden size of 2,048.
PUBLISHED = "arXiv:2407.08608 figures 5 and 6"
PUBLISHED_GPU = "H100-SXM5-80GB"
PUBLISHED_SEQS = (512, 1024, 2048, 4096, 8192, 16384)
PUBLISHED_FORWARD = {
    FlashKernel.FLASH2: {64: (180, 229, 262, 284, 295, 299), 128: (191, 260, 298, 319, 333, 335)},
    FlashKernel.FLASH3: {64: (197, 265, 371, 420, 460, 473), 128: (292, 423, 521, 579, 602, 616)},
    FlashKernel.CUDNN: {64: (225, 288, 334, 363, 379, 388), 128: (315, 410, 484, 518, 529, 539)},
}
PUBLISHED_BACKWARD = {
    FlashKernel.FLASH2: {64: (198, 238, 264, 279, 287, 291), 128: (214, 260, 291, 310, 318, 322)},
    FlashKernel.FLASH3: {64: (272, 363, 422, 453, 472, 474), 128: (316, 424, 501, 542, 559, 561)},
    FlashKernel.CUDNN: {64: (266, 348, 395, 417, 432, 433), 128: (305, 408, 465, 499, 518, 516)},
}
PUBLISHED_TOKENS, PUBLISHED_HIDDEN = 16384, 2048
COMPARED_SEQ = 2048  # shorter ones show more of the launches than of the kernels
# FlashAttention 1 in Triton as of July 2023, causal, head_dim 64, batch 4, 48 heads, by sequence, forward and backward:
# triton-lang/triton pull request 1917, before it; its GPU taken for an A100 SXM, on which Triton's tutorials were timed then.
FLASH1_SOURCE = "triton-lang/triton pull request 1917"
FLASH1_TFLOPS = {2048: (102.1, 62.1), 4096: (112.9, 71.7), 8192: (119.1, 77.5), 16384: (122.2, 80.6)}
FLASH1_BATCH, FLASH1_HEADS, FLASH1_HEAD_DIM = 4, 48, 64


def chip_of(cluster: Cluster) -> Chip:
    device = cluster.device
    return Chip(peak_flops_per_s=device.peak(Precision.FP16), bytes_per_s=device.memory_bytes_per_s, num_sms=device.num_sms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What the fits of one device share."""

    recipe: Recipe
    cluster: Cluster
    tables: Tables
    scores: list[Score]

    @property
    def chip(self) -> Chip:
        return chip_of(self.cluster)

    def lender(self, gpu: str) -> Chip:
        return self.chip if gpu == self.recipe.gpu else LENDERS[gpu]


def _product(row: Row) -> Product:
    m, n, k = ints(row, "m", "n", "k")
    return Product(m=m, n=n, k=k, result_bytes=8 if "fp32_accumulate" in row["flag"] else 2)


def _product_price(chip: Chip, sustained: bool) -> Callable[[Row, MatmulCurve], float]:
    """Price of one product, or of both backward products of a forward shape (pass dx+dw)."""

    def price(row: Row, curve: MatmulCurve) -> float:
        product = _product(row)
        if row["pass"] != "dx+dw":
            return matmul_s.__wrapped__(product, curve, chip, sustained=sustained)
        m, n, k = product.m, product.n, product.k
        gradients = (Product(m=m, n=k, k=n), Product(m=k, n=n, k=m))
        return sum(matmul_s.__wrapped__(gradient, curve, chip, sustained=sustained) for gradient in gradients)

    return price


def _product_sizes(row: Row) -> tuple[float, ...]:
    return ints(row, "m", "n", "k")


def _training_weight(row: Row) -> float:
    """Products with a size below 256 do not occur in training but at high tensor parallel degrees: a third of the weight."""
    return 1.0 if min(_product_sizes(row)) >= 256 else 0.3


def _forward_product(bench: Bench) -> MatmulCurve:
    recipe = bench.recipe
    rows = bench.tables.rows("matmul", {"gpu": recipe.gpu, "source": recipe.sources, "pass": "y"})
    source = f"{', '.join(recipe.sources)}: {recipe.gpu} forward"
    narrow = min(min(_product_sizes(row)) for row in rows) >= 1024  # too large to show launch and memory

    def curve(x: Array) -> MatmulCurve:
        launch_s, share = (4e-6, 0.7) if narrow else (LEAST_LAUNCH_S + float(x[2]), float(x[3]))
        throttle, throttle_flops = (float(x[4]), float(x[5]) * 1e12) if recipe.throttles else (0.0, 1e12)
        return MatmulCurve(
            launch_s=launch_s, kind=Kind.INTERPOLATED, source=source, efficiency=float(x[0]), k_half=float(x[1]), bandwidth_share=share,
            throttle=throttle, throttle_flops=throttle_flops)

    start = (0.8, 130.0) if narrow else (0.8, 130.0, 3e-6, 0.75, *((0.15, 1.5) if recipe.throttles else ()))
    family = Family(
        device=recipe.device, name="matmul forward", rows=rows, curve=curve, price=_product_price(bench.chip, sustained=False),
        sizes=_product_sizes, start=start, weight=_training_weight)
    fitted = family.fitted(bench.scores)
    family.check("  of these m, n, k >= 1024", [row for row in rows if min(_product_sizes(row)) >= 1024], fitted, bench.scores)
    return _sustained(bench, fitted)


def _sustained(bench: Bench, curve: MatmulCurve) -> MatmulCurve:
    """The curve with the power limit of rows timed under steady load in a training framework, where there are such rows."""
    rows = bench.tables.rows("matmul", {"gpu": bench.recipe.gpu, "source": SIMUMAX, "pass": "y"})
    if not rows or not bench.recipe.throttles:
        return curve
    rested = replace(curve, throttle=0.0)
    price = _product_price(bench.chip, sustained=True)

    def priced(throttle: float) -> Array:
        return np.array([price(row, replace(rested, throttle=throttle)) for row in rows])

    throttle = rounded(float(fit(lambda x: priced(float(x[0])), times_s(rows), (0.3,))[0]))
    slowed = replace(curve, throttle=throttle, source=f"{curve.source}; throttle: {SIMUMAX}, steady load")
    bench.scores.append(score(bench.recipe.device, "matmul forward, steady load", priced(throttle), times_s(rows)))
    return slowed


def _gradient_product(bench: Bench, forward: MatmulCurve, which: str) -> MatmulCurve:
    """The forward curve with its efficiency times that of the rows of one gradient, relative to the forward rows there."""
    recipe = bench.recipe
    lender = recipe.gradients
    chip = bench.lender(lender)
    price = _product_price(chip, sustained=True)
    own = lender == recipe.gpu
    base = forward if own else replace(forward, efficiency=_efficiency(bench, forward, "y", price))
    rows = _gradient_rows(bench, which)
    efficiency = _efficiency(bench, base, which, price)
    ratio = efficiency / base.efficiency
    predicted = np.array([price(row, replace(base, efficiency=efficiency)) for row in rows])
    line = score(recipe.device, f"matmul {which} on {lender}", predicted, times_s(rows))
    bench.scores.append(line)
    same_chip = recipe.gpu.split("-")[0] == lender.split("-")[0]
    return replace(
        forward, efficiency=rounded(forward.efficiency * ratio), kind=Kind.INTERPOLATED if same_chip else Kind.ANALYTIC, rows=len(rows),
        median_error=rounded(line.median), source=f"forward curve, efficiency x {ratio:.3f} as {which} on {lender} ({sources_of(rows)})")


def _gradient_rows(bench: Bench, which: str) -> list[Row]:
    """Rows of one pass (`y`, `dx`, `dw`), those that accumulate into fp32 first; V100 has both gradients in one time."""
    passes = ("y",) if which == "y" else (which, "dx+dw")
    rows = bench.tables.rows("matmul", {"gpu": bench.recipe.gradients, "source": (SIMUMAX, SUPERSCALER), "pass": passes})
    accumulated = [row for row in rows if "fp32_accumulate" in row["flag"]]
    return accumulated or rows


def _efficiency(bench: Bench, curve: MatmulCurve, which: str, price: Callable[[Row, MatmulCurve], float]) -> float:
    rows = _gradient_rows(bench, which)
    constants = fit(
        lambda x: np.array([price(row, replace(curve, efficiency=float(x[0]))) for row in rows]), times_s(rows), (curve.efficiency,))
    return rounded(float(constants[0]))


def _batched_products(row: Row) -> tuple[Product, ...]:
    """The products behind one row: q k^T is [S,d] x [d,S], p v is [S,S] x [S,d]; two gradients each in the backward pass."""
    batch, heads, seq, head_dim = ints(row, "batch", "heads", "seq", "head_dim")
    qk, pv = Product(m=seq, n=seq, k=head_dim, batch=batch * heads), Product(m=seq, n=head_dim, k=seq, batch=batch * heads)
    if row["direction"] == "forward":
        return (qk,) if row["kernel"] == "unfused_qk" else (pv,)
    return (pv, pv) if row["kernel"] == "unfused_qk" else (qk, pv)


def _head_weight(row: Row) -> float:
    """Head sizes that models are trained with count in full."""
    return 1.0 if int(row["head_dim"]) in TRAINED_HEAD_DIMS else 0.1


def _batched(bench: Bench, forward: MatmulCurve, direction: str) -> MatmulCurve:
    """The products of un-fused attention: the forward curve with its own efficiency, k_half and share of bandwidth.

    Bounds are those of the sequence and head_dim. Bound by memory more than by power, the backward rows flagged
    tiny_gradients are no faster per product than the forward ones, so they count here.
    """
    recipe = bench.recipe
    gpu, chip = recipe.memory, bench.lender(recipe.memory)
    rows = bench.tables.rows(
        "attention", {"gpu": gpu, "kernel": ("unfused_qk", "unfused_pv"), "direction": direction}, allow="tiny_gradients")
    kind = Kind.INTERPOLATED if gpu == recipe.gpu else Kind.ANALYTIC
    source = f"{sources_of(rows)}: {gpu} un-fused attention {direction}"

    def curve(x: Array) -> MatmulCurve:
        return replace(
            forward, efficiency=float(x[0]), k_half=float(x[1]), bandwidth_share=float(x[2]), throttle=0.0, kind=kind, source=source)

    def price(row: Row, curve: MatmulCurve) -> float:
        return sum(matmul_s.__wrapped__(product, curve, chip, sustained=True) for product in _batched_products(row))

    family = Family(
        device=recipe.device, name=f"un-fused products {direction}", rows=rows, curve=curve, price=price, sizes=_flash_sizes,
        start=(forward.efficiency, forward.k_half, 0.7), weight=_head_weight)
    return _fitted_heads(family, bench)


def _fitted_heads(family: Family[AnyCurve], bench: Bench) -> AnyCurve:
    fitted = family.fitted(bench.scores)
    family.check("  of these head_dim 64, 80, 96, 128", [row for row in family.rows if _head_weight(row) == 1], fitted, bench.scores)
    return fitted


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Prefill(FlashCurve):
    """A curve that also prices inference rows, which write k and v into a cache; training does not: neither constant ships.

    cache_passes  passes over k and v, at the memory's bandwidth, that the write takes
    slowdown      by how much longer the inference kernel itself takes than one that trains
    """

    cache_passes: float = 0.0
    slowdown: float = 0.0


def _flash_price(chip: Chip, work: float) -> Callable[[Row, FlashCurve], float]:
    def price(row: Row, curve: FlashCurve) -> float:
        batch, heads, seq, head_dim, v_head_dim = ints(row, "batch", "heads", "seq", "head_dim", "v_head_dim")
        keys = seq / 2 if row["causal"] == "1" else float(seq)
        flops = work * 2.0 * batch * heads * seq * keys * (head_dim + v_head_dim)
        seconds = flash_attention_s(flops, heads=batch * heads, seq=seq, keys=keys, head_dim=head_dim, curve=curve, chip=chip)
        if CACHE_WRITE not in row["flag"] or not isinstance(curve, _Prefill):
            return seconds
        cache_bytes = 2 * batch * int(row["kv_heads"]) * seq * (head_dim + v_head_dim)
        return seconds * (1 + curve.slowdown) + curve.cache_passes * cache_bytes / chip.bytes_per_s

    return price


def _flash_sizes(row: Row) -> tuple[float, ...]:
    return ints(row, "seq", "head_dim")


def _flash(bench: Bench, gpu: str, direction: str, rows: Sequence[Row]) -> FlashCurve:
    """The curve of one direction; where only inference rows are known, their kernel counts as one that trains."""
    recipe = bench.recipe
    written = sum(CACHE_WRITE in row["flag"] for row in rows)
    few = len(rows) < 100  # too large to show the launch; and unless published, of one head_dim
    names = ", ".join(sorted({row["kernel"] for row in rows}))
    kind = Kind.INTERPOLATED if gpu == recipe.gpu else Kind.ANALYTIC
    started = {
        "efficiency": 2.0, "keys_half": 200.0, "head_half": 0.0 if few and gpu != PUBLISHED_GPU else 20.0, "launch_s": 0.0 if few else 5e-6,
        "cache_passes": 1.0 if written else 0.0, "slowdown": 0.1 if 0 < written < len(rows) else 0.0}
    fitted_names = [name for name, start in started.items() if start]

    def curve(x: Array) -> _Prefill:
        values = dict(zip(fitted_names, x.tolist(), strict=True))
        odds = values.pop("efficiency")  # keeps the efficiency below 1: it and head_half tell little apart
        launch_s = LEAST_LAUNCH_S + values.pop("launch_s", 3e-6)
        return _Prefill(
            kind=kind, source=f"{sources_of(rows)}: {gpu} {names} {direction}", efficiency=odds / (1 + odds), launch_s=launch_s,
            **{"head_half": 20.0, **values})

    fitted = _fitted_heads(Family(
        device=recipe.device, name=f"flash attention {direction}", rows=rows, curve=curve, sizes=_flash_sizes, weight=_head_weight,
        price=_flash_price(bench.lender(gpu), 1.0 if direction == "forward" else FLASH_BACKWARD_FLOPS),
        start=tuple(started[name] for name in fitted_names)), bench)
    return FlashCurve(**{one.name: getattr(fitted, one.name) for one in fields(FlashCurve)})


def _published_rows(kernel: str) -> list[Row]:
    """The bars of the published figure as rows of the attention table."""
    rows: list[Row] = []
    for head_dim, bars in PUBLISHED_BACKWARD[FlashKernel(kernel)].items():
        for seq, tflops in zip(PUBLISHED_SEQS, bars, strict=True):
            flops = FLASH_BACKWARD_FLOPS * 4.0 * PUBLISHED_TOKENS * PUBLISHED_HIDDEN * seq
            rows.append({
                "kernel": kernel, "batch": str(PUBLISHED_TOKENS // seq), "heads": str(PUBLISHED_HIDDEN // head_dim), "seq": str(seq),
                "head_dim": str(head_dim), "v_head_dim": str(head_dim), "causal": "0", "time_us": str(flops / tflops / 1e12 * US_PER_S),
                "flag": "", "source": PUBLISHED})
    return rows


def _flash_pair(bench: Bench) -> tuple[FlashCurve, FlashCurve]:
    """Forward and backward, each from the GPU's own rows, a related GPU's or the published figure; without any assumed."""
    recipe = bench.recipe
    if not recipe.flash:
        assumed = analytic_profile(recipe.device).compute
        return assumed.flash_forward, assumed.flash_backward
    rows = bench.tables.rows("attention", {"gpu": recipe.gpu, "kernel": recipe.flash, "direction": "forward"})
    forward = _flash(bench, recipe.gpu, "forward", rows)
    lender = recipe.flash_backward
    if lender in {kernel.value for kernel in PUBLISHED_BACKWARD}:
        return forward, _flash(bench, PUBLISHED_GPU, "backward", _published_rows(lender))
    where: Where = {"gpu": lender, "kernel": ("flash2", "flash_te"), "direction": "backward"}
    return forward, _flash(bench, lender, "backward", bench.tables.rows("attention", where))


def _relative(tflops: float, curve: FlashCurve, chip: Chip, work: float, shape: tuple[int, int, int], causal: bool) -> float:
    """A published speed over that of the curve, at (heads of the whole batch, sequence, head_dim)."""
    heads, seq, head_dim = shape
    keys = seq / 2 if causal else float(seq)
    flops = work * 4.0 * heads * seq * keys * head_dim
    return tflops * 1e12 / flops * flash_attention_s(flops, heads=heads, seq=seq, keys=keys, head_dim=head_dim, curve=curve, chip=chip)


def hopper_kernels(compute: Compute, own: FlashKernel, flash1: FlashSpeed) -> dict[FlashKernel, FlashSpeed]:
    """Published kernels beside the `own` one of the curves of a Hopper device: medians over head_dim 64 and 128, 2k to 16k tokens."""
    chip = LENDERS[PUBLISHED_GPU]

    def median(bars: Mapping[int, tuple[int, ...]], curve: FlashCurve, work: float, causal: bool) -> float:
        return float(np.median([
            _relative(tflops, curve, chip, work, (PUBLISHED_TOKENS // seq * PUBLISHED_HIDDEN // head_dim, seq, head_dim), causal)
            for head_dim, speeds in bars.items() for seq, tflops in zip(PUBLISHED_SEQS, speeds, strict=True) if seq >= COMPARED_SEQ]))

    speeds = {
        kernel: FlashSpeed(
            forward=rounded(median(PUBLISHED_FORWARD[kernel], compute.flash_forward, 1.0, causal=True)),
            backward=rounded(median(PUBLISHED_BACKWARD[kernel], compute.flash_backward, FLASH_BACKWARD_FLOPS, causal=False)),
            source=PUBLISHED)
        for kernel in PUBLISHED_FORWARD if kernel is not own}
    flash2 = speeds.get(FlashKernel.FLASH2, FlashSpeed(forward=1.0, backward=1.0, source=PUBLISHED))
    slower = FlashSpeed(
        forward=rounded(flash1.forward * flash2.forward), backward=rounded(flash1.backward * flash2.backward),
        source=f"as much slower than flash2 as on A100 ({flash1.source})")
    return {FlashKernel.FLASH1: slower, **speeds}


def flash1_speed(compute: Compute, chip: Chip) -> FlashSpeed:
    """FlashAttention 1 beside the FlashAttention 2 of A100's curves."""
    shapes = {seq: (FLASH1_BATCH * FLASH1_HEADS, seq, FLASH1_HEAD_DIM) for seq in FLASH1_TFLOPS}
    forward = [_relative(both[0], compute.flash_forward, chip, 1.0, shapes[seq], True) for seq, both in FLASH1_TFLOPS.items()]
    backward = [
        _relative(both[1], compute.flash_backward, chip, FLASH_BACKWARD_FLOPS, shapes[seq], True) for seq, both in FLASH1_TFLOPS.items()]
    return FlashSpeed(forward=rounded(float(np.median(forward))), backward=rounded(float(np.median(backward))), source=FLASH1_SOURCE)


# Family of a profile -> operations in the tables that measure it, in order of preference, with their fewest bytes of one
# element, forward and backward (README of the measurements).
OPERATIONS: dict[str, tuple[tuple[str, int, int], ...]] = {
    "norm": (("layernorm", 4, 6),),
    "elementwise": (("gelu", 4, 6), ("bias_gelu", 4, 6)),
    "residual": (("residual_add", 6, 6), ("bias_dropout_residual_add", 7, 5)),
    "softmax": (("causal_softmax_fused", 3, 4),),
    "dropout": (("attention_dropout", 5, 5),),
    "embedding": (("embedding", 2, 2),),
    "cross_entropy": (("cross_entropy_unfused", 2, 2),),
}


def _memory_rows(bench: Bench, name: str, direction: str) -> tuple[str, int, list[Row]]:
    """The first operation of a family that the device (or the GPU it borrows from) has rows of, and its bytes per element."""
    for operation, forward_bytes, backward_bytes in OPERATIONS[name]:
        rows = bench.tables.rows("elementwise", {"gpu": bench.recipe.memory, "op": operation, "direction": direction})
        if rows:
            return operation, forward_bytes if direction == "forward" else backward_bytes, rows
    return "", 0, []


def _memory(bench: Bench, name: str, direction: str) -> MemoryCurve | None:
    """The curve of one memory-bound family, from the device's own rows or (ANALYTIC) from those of a related GPU."""
    gpu, device = bench.recipe.memory, bench.recipe.device
    operation, element_bytes, rows = _memory_rows(bench, name, direction)
    if not rows:
        return None
    bytes_per_s = bench.lender(gpu).bytes_per_s
    kind = Kind.INTERPOLATED if gpu == bench.recipe.gpu else Kind.ANALYTIC
    source = f"{sources_of(rows)}: {gpu} {operation} {direction}"

    def curve(x: Array) -> MemoryCurve:
        return MemoryCurve(launch_s=LEAST_LAUNCH_S + float(x[0]), bandwidth_share=float(x[1]), kind=kind, source=source)

    def sizes(row: Row) -> tuple[float, ...]:
        return (element_bytes * int(row["elements"]),)

    def price(row: Row, curve: MemoryCurve) -> float:
        return memory_bound_s(sizes(row)[0], curve, bytes_per_s) + _table_s(row, bytes_per_s)

    family = Family(
        device=device, name=f"{operation} {direction}", rows=rows, curve=curve, price=price, sizes=sizes, start=(5e-6, 0.5))
    return family.fitted(bench.scores)


def _table_s(row: Row, bytes_per_s: float) -> float:
    """Seconds of the passes over the gradient of an embedding table, at the share that gelu's backward reaches on A100."""
    if row["op"] != "embedding" or row["direction"] == "forward":
        return 0.0
    vocab_shard = 128 * -(-50257 // (128 * int(row["tp"])))
    return TABLE_PASSES * 2 * vocab_shard * int(row["hidden"]) / (0.8 * bytes_per_s)


def _passes(bench: Bench) -> dict[str, Passes]:
    """Every memory-bound family. Rows of one direction serve both; families without rows are assumed."""
    passes = {}
    for name, (forward_share, backward_share) in ASSUMED_SHARES.items():
        forward, backward = _memory(bench, name, "forward"), _memory(bench, name, "backward")
        same = replace(forward, kind=Kind.ANALYTIC, source=f"{forward.source}, taken for the backward") if forward else None
        passes[name] = Passes(forward=forward or assumed_memory(forward_share), backward=backward or same or assumed_memory(backward_share))
    return passes


def _optimizer(elementwise: MemoryCurve) -> MemoryCurve:
    """Adam at the share of the bandwidth that an element-wise kernel reaches: both stream long tensors (EQUATIONS K5).

    The measured FusedAdam steps are first ones, which allocate and zero their states: 21 ps a parameter of 18 bytes, half of
    the bandwidth. Steps of vTrain's single-node A100 grid grow by 16 ps a parameter of 28 bytes: 0.84 of the bandwidth.
    """
    return MemoryCurve(
        launch_s=elementwise.launch_s, bandwidth_share=elementwise.bandwidth_share, kind=Kind.ANALYTIC,
        source=f"taken from element-wise kernels ({elementwise.source}); the measured Adam steps are first ones, with allocation")


def _levelled(
    bench: Bench, name: str, rows: Sequence[Row], curve: Efficient, price: Callable[[Row, Efficient], float],
    sizes: Callable[[Row], tuple[float, ...]],
) -> Efficient:
    """The curve of a lender with its efficiency, and nothing else, fitted to rows of the device."""
    source = f"{sources_of(rows)}: efficiency on {bench.recipe.gpu}; else {curve.source}"
    base = replace(curve, kind=Kind.INTERPOLATED, source=source)
    return Family(
        device=bench.recipe.device, name=name, rows=rows, curve=lambda x: replace(base, efficiency=float(x[0])), price=price, sizes=sizes,
        start=(base.efficiency,)).fitted(bench.scores)


def retimed_curves(bench: Bench, compute: Compute, lender: Compute) -> Compute:
    """The curves carried from a lender, with the efficiency of products and fused attention from the device's own few rows."""
    gpu, tables = bench.recipe.gpu, bench.tables

    def product(curve: MatmulCurve, which: str) -> MatmulCurve:
        rows = tables.rows("matmul", {"gpu": gpu, "source": SIMUMAX, "pass": which})
        return _levelled(bench, f"matmul {which}", rows, curve, _product_price(bench.chip, sustained=True), _product_sizes)

    def flash(curve: FlashCurve, direction: str, work: float) -> FlashCurve:
        rows = tables.rows("attention", {"gpu": gpu, "kernel": "flash_te", "direction": direction})
        return _levelled(bench, f"flash attention {direction}", rows, curve, _flash_price(bench.chip, work), _flash_sizes)

    return replace(
        compute, forward=product(lender.forward, "y"), input_gradient=product(lender.input_gradient, "dx"),
        weight_gradient=product(lender.weight_gradient, "dw"), flash_forward=flash(lender.flash_forward, "forward", 1.0),
        flash_backward=flash(lender.flash_backward, "backward", FLASH_BACKWARD_FLOPS))


def compute_curves(bench: Bench) -> Compute:
    """Every curve of one device."""
    forward = _forward_product(bench)
    flash_forward, flash_backward = _flash_pair(bench)
    assumed = analytic_profile(bench.recipe.device).compute
    passes = _passes(bench)
    return replace(
        assumed,
        forward=forward,
        input_gradient=_gradient_product(bench, forward, "dx"),
        weight_gradient=_gradient_product(bench, forward, "dw"),
        batched_forward=_batched(bench, forward, "forward"),
        batched_backward=_batched(bench, forward, "backward"),
        flash_forward=flash_forward,
        flash_backward=flash_backward,
        norm=passes["norm"],
        elementwise=passes["elementwise"],
        residual=passes["residual"],
        softmax=passes["softmax"],
        dropout=passes["dropout"],
        embedding=passes["embedding"],
        cross_entropy=passes["cross_entropy"],
        optimizer=_optimizer(passes["elementwise"].backward),
    )
