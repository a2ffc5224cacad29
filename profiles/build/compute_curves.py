"""The fits of one device's compute curves; `profiles/build/__main__.py` says on which rows and puts
them into profiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from parplan.profiles.build.attention_curves import (
    LEAST_LAUNCH_S,
    fitted_heads,
    flash_pair,
    flash_price,
    flash_sizes,
    head_weight,
)
from parplan.profiles.build.recipes import Bench
from parplan.profiles.machines.curves import (
    FLASH_BACKWARD_FLOPS,
    Chip,
    FlashCurve,
    MatmulCurve,
    MemoryCurve,
    Product,
    matmul_s,
    memory_bound_s,
)
from parplan.profiles.machines.curve_fitting import (
    Array,
    CurveFamily,
    Row,
    fit,
    ints,
    rounded,
    fit_score,
    sources_of,
    times_s,
)
from parplan.profiles.machines.shipped_profiles import (
    ASSUMED_SHARES,
    analytic_profile,
    assumed_memory,
)
from parplan.profiles.provenance import Kind
from parplan.profiles.machines.speeds import Compute, PassCurves

Efficient = TypeVar("Efficient", MatmulCurve, FlashCurve)
TABLE_PASSES = 3  # over the gradient of an embedding table: zeroed, read and written
SIMUMAX = "MooreThreads/SimuMax"
SUPERSCALER = "microsoft/SuperScaler"


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
    """Products with a size below 256 do not occur in training but at high tensor parallel degrees:
    a third of the weight.
    """
    return 1.0 if min(_product_sizes(row)) >= 256 else 0.3


def _forward_product(bench: Bench) -> MatmulCurve:
    recipe = bench.recipe
    rows = bench.tables.rows("matmul", {"gpu": recipe.gpu, "source": recipe.sources, "pass": "y"})
    source = f"{', '.join(recipe.sources)}: {recipe.gpu} forward"
    # too large to show launch and memory
    narrow = min(min(_product_sizes(row)) for row in rows) >= 1024

    def curve(x: Array) -> MatmulCurve:
        launch_s, share = (4e-6, 0.7) if narrow else (LEAST_LAUNCH_S + float(x[2]), float(x[3]))
        throttle, throttle_flops = (float(x[4]), float(x[5]) * 1e12) if recipe.throttles else (0.0, 1e12)
        return MatmulCurve(
            launch_s=launch_s, kind=Kind.INTERPOLATED, source=source, efficiency=float(x[0]), k_half=float(x[1]), bandwidth_share=share,
            throttle=throttle, throttle_flops=throttle_flops)

    start = (0.8, 130.0) if narrow else (0.8, 130.0, 3e-6, 0.75, *((0.15, 1.5) if recipe.throttles else ()))
    family = CurveFamily(
        device=recipe.device, name="matmul forward", rows=rows, curve=curve, price=_product_price(bench.chip, sustained=False),
        sizes=_product_sizes, start=start, weight=_training_weight)
    fitted = family.fitted(bench.scores)
    family.check("  of these m, n, k >= 1024", [row for row in rows if min(_product_sizes(row)) >= 1024], fitted, bench.scores)
    return _sustained(bench, fitted)


def _sustained(bench: Bench, curve: MatmulCurve) -> MatmulCurve:
    """The curve with the power limit of rows timed under steady load in a training framework, where
    there are such rows.
    """
    rows = bench.tables.rows("matmul", {"gpu": bench.recipe.gpu, "source": SIMUMAX, "pass": "y"})
    if not rows or not bench.recipe.throttles:
        return curve
    rested = replace(curve, throttle=0.0)
    price = _product_price(bench.chip, sustained=True)

    def priced(throttle: float) -> Array:
        return np.array([price(row, replace(rested, throttle=throttle)) for row in rows])

    throttle = rounded(float(fit(lambda x: priced(float(x[0])), times_s(rows), (0.3,))[0]))
    slowed = replace(curve, throttle=throttle, source=f"{curve.source}; throttle: {SIMUMAX}, steady load")
    bench.scores.append(fit_score(bench.recipe.device, "matmul forward, steady load", priced(throttle), times_s(rows)))
    return slowed


def _gradient_product(bench: Bench, forward: MatmulCurve, which: str) -> MatmulCurve:
    """The forward curve with its efficiency times that of the rows of one gradient, relative to the
    forward rows there.
    """
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
    line = fit_score(recipe.device, f"matmul {which} on {lender}", predicted, times_s(rows))
    bench.scores.append(line)
    same_chip = recipe.gpu.split("-")[0] == lender.split("-")[0]
    return replace(
        forward, efficiency=rounded(forward.efficiency * ratio), kind=Kind.INTERPOLATED if same_chip else Kind.ANALYTIC, rows=len(rows),
        median_error=rounded(line.median), source=f"forward curve, efficiency x {ratio:.3f} as {which} on {lender} ({sources_of(rows)})")


def _gradient_rows(bench: Bench, which: str) -> list[Row]:
    """Rows of one pass (`y`, `dx`, `dw`), those that accumulate into fp32 first; V100 has both
    gradients in one time.
    """
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
    """The products behind one row: q k^T is [S,d] x [d,S], p v is [S,S] x [S,d]; two gradients each
    in the backward pass.
    """
    batch, heads, seq, head_dim = ints(row, "batch", "heads", "seq", "head_dim")
    qk, pv = Product(m=seq, n=seq, k=head_dim, batch=batch * heads), Product(m=seq, n=head_dim, k=seq, batch=batch * heads)
    if row["direction"] == "forward":
        return (qk,) if row["kernel"] == "unfused_qk" else (pv,)
    return (pv, pv) if row["kernel"] == "unfused_qk" else (qk, pv)


def _batched(bench: Bench, forward: MatmulCurve, direction: str) -> MatmulCurve:
    """The products of un-fused attention: the forward curve with its own efficiency, k_half and
    share of bandwidth.

    Bounds are those of the sequence and head_dim. Bound by memory more than by power, the backward
    rows flagged tiny_gradients are no faster per product than the forward ones, so they count here.
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

    family = CurveFamily(
        device=recipe.device, name=f"un-fused products {direction}", rows=rows, curve=curve, price=price, sizes=flash_sizes,
        start=(forward.efficiency, forward.k_half, 0.7), weight=head_weight)
    return fitted_heads(family, bench)

# Family of a profile -> operations in the tables that measure it, in order of preference, with
# their fewest bytes of one element, forward and backward (README of the measurements).
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
    """The first operation of a family that the device (or the GPU it borrows from) has rows of, and
    its bytes per element.
    """
    for operation, forward_bytes, backward_bytes in OPERATIONS[name]:
        rows = bench.tables.rows("elementwise", {"gpu": bench.recipe.memory, "op": operation, "direction": direction})
        if rows:
            return operation, forward_bytes if direction == "forward" else backward_bytes, rows
    return "", 0, []


def _memory(bench: Bench, name: str, direction: str) -> MemoryCurve | None:
    """The curve of one memory-bound family, from the device's own rows or (ANALYTIC) from those of
    a related GPU.
    """
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

    family = CurveFamily(
        device=device, name=f"{operation} {direction}", rows=rows, curve=curve, price=price, sizes=sizes, start=(5e-6, 0.5))
    return family.fitted(bench.scores)


def _table_s(row: Row, bytes_per_s: float) -> float:
    """Seconds of the passes over the gradient of an embedding table, at the share that gelu's
    backward reaches on A100.
    """
    if row["op"] != "embedding" or row["direction"] == "forward":
        return 0.0
    vocab_shard = 128 * -(-50257 // (128 * int(row["tp"])))
    return TABLE_PASSES * 2 * vocab_shard * int(row["hidden"]) / (0.8 * bytes_per_s)


def _passes(bench: Bench) -> dict[str, PassCurves]:
    """Every memory-bound family. Rows of one direction serve both; families without rows are
    assumed.
    """
    passes = {}
    for name, (forward_share, backward_share) in ASSUMED_SHARES.items():
        forward, backward = _memory(bench, name, "forward"), _memory(bench, name, "backward")
        same = replace(forward, kind=Kind.ANALYTIC, source=f"{forward.source}, taken for the backward") if forward else None
        passes[name] = PassCurves(forward=forward or assumed_memory(forward_share), backward=backward or same or assumed_memory(backward_share))
    return passes


def _optimizer(elementwise: MemoryCurve) -> MemoryCurve:
    """Adam at the share of the bandwidth that an element-wise kernel reaches: both stream long
    tensors (EQUATIONS K5).

    The measured FusedAdam steps are first ones, which allocate and zero their states: 21 ps a
    parameter of 18 bytes, half of the bandwidth. Steps of vTrain's single-node A100 grid grow by 16
    ps a parameter of 28 bytes: 0.84 of the bandwidth.
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
    return CurveFamily(
        device=bench.recipe.device, name=name, rows=rows, curve=lambda x: replace(base, efficiency=float(x[0])), price=price, sizes=sizes,
        start=(base.efficiency,)).fitted(bench.scores)


def retimed_curves(bench: Bench, compute: Compute, lender: Compute) -> Compute:
    """The curves carried from a lender, with the efficiency of products and fused attention from
    the device's own few rows.
    """
    gpu, tables = bench.recipe.gpu, bench.tables

    def product(curve: MatmulCurve, which: str) -> MatmulCurve:
        rows = tables.rows("matmul", {"gpu": gpu, "source": SIMUMAX, "pass": which})
        return _levelled(bench, f"matmul {which}", rows, curve, _product_price(bench.chip, sustained=True), _product_sizes)

    def flash(curve: FlashCurve, direction: str, work: float) -> FlashCurve:
        rows = tables.rows("attention", {"gpu": gpu, "kernel": "flash_te", "direction": direction})
        return _levelled(bench, f"flash attention {direction}", rows, curve, flash_price(bench.chip, work), flash_sizes)

    return replace(
        compute, forward=product(lender.forward, "y"), input_gradient=product(lender.input_gradient, "dx"),
        weight_gradient=product(lender.weight_gradient, "dw"), flash_forward=flash(lender.flash_forward, "forward", 1.0),
        flash_backward=flash(lender.flash_backward, "backward", FLASH_BACKWARD_FLOPS))


def compute_curves(bench: Bench) -> Compute:
    """Every curve of one device."""
    forward = _forward_product(bench)
    flash_forward, flash_backward = flash_pair(bench)
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
