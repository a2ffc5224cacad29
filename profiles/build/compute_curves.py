"""The fits of one device's compute curves."""

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
from parplan.profiles.build.recipes import FitContext
from parplan.profiles.machines.curve_fitting import (
    Array,
    CurveFamily,
    Row,
    Where,
    fit,
    fit_score,
    int_columns,
    rounded,
    sources_of,
    times_s,
)
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
from parplan.profiles.machines.shipped_profiles import (
    ASSUMED_SHARES,
    analytic_profile,
    assumed_memory,
)
from parplan.profiles.machines.speeds import Compute, PassCurves
from parplan.profiles.provenance import Kind

Efficient = TypeVar("Efficient", MatmulCurve, FlashCurve)
TABLE_PASSES = 3  # the gradient of an embedding table is zeroed, read and written
SIMUMAX = "MooreThreads/SimuMax"
SUPERSCALER = "microsoft/SuperScaler"


def _product(row: Row) -> Product:
    m, n, k = int_columns(row, "m", "n", "k")
    return Product(m=m, n=n, k=k, result_bytes=8 if "fp32_accumulate" in row["flag"] else 2)


def _product_price(chip: Chip, sustained: bool) -> Callable[[Row, MatmulCurve], float]:
    """Returns the price of one product, or of both backward products of a forward shape (dx+dw)."""

    def price(row: Row, curve: MatmulCurve) -> float:
        product = _product(row)
        if row["pass"] != "dx+dw":
            return float(matmul_s(product, curve, chip, sustained=sustained))
        gradients = (
            Product(m=product.m, n=product.k, k=product.n),
            Product(m=product.k, n=product.n, k=product.m),
        )
        return sum(float(matmul_s(each, curve, chip, sustained=sustained)) for each in gradients)

    return price


def _product_sizes(row: Row) -> tuple[float, ...]:
    return int_columns(row, "m", "n", "k")


def _training_weight(row: Row) -> float:
    """Returns the weight of a product in a fit.

    Products with a size below 256 occur in training only at high tensor parallel degrees and have a
    third of the weight.
    """
    return 1.0 if min(_product_sizes(row)) >= 256 else 0.3


def _forward_product(context: FitContext) -> MatmulCurve:
    recipe = context.recipe
    rows = context.tables.rows("matmul", {"gpu": recipe.gpu, "source": recipe.sources, "pass": "y"})
    source = f"{', '.join(recipe.sources)}: {recipe.gpu} forward"
    # all rows are too large to show launch and memory
    narrow = min(min(_product_sizes(row)) for row in rows) >= 1024

    def curve(x: Array) -> MatmulCurve:
        launch_s, share = (4e-6, 0.7) if narrow else (LEAST_LAUNCH_S + float(x[2]), float(x[3]))
        throttle, throttle_flops = 0.0, 1e12
        if recipe.throttles:
            throttle, throttle_flops = float(x[4]), float(x[5]) * 1e12
        return MatmulCurve(
            launch_s=launch_s,
            kind=Kind.INTERPOLATED,
            source=source,
            efficiency=float(x[0]),
            k_half=float(x[1]),
            bandwidth_share=share,
            throttle=throttle,
            throttle_flops=throttle_flops,
        )

    start: tuple[float, ...] = (0.8, 130.0)
    if not narrow:
        start += (3e-6, 0.75)
        if recipe.throttles:
            start += (0.15, 1.5)
    family = CurveFamily(
        device=recipe.device,
        name="matmul forward",
        rows=rows,
        curve=curve,
        price=_product_price(context.chip, sustained=False),
        sizes=_product_sizes,
        start=start,
        weight=_training_weight,
    )
    fitted = family.fitted(context.scores)
    large = [row for row in rows if min(_product_sizes(row)) >= 1024]
    family.check("  of these m, n, k >= 1024", large, fitted, context.scores)
    return _sustained(context, fitted)


def _sustained(context: FitContext, curve: MatmulCurve) -> MatmulCurve:
    """Returns the curve with the power limit of rows timed under steady load, where there are any.

    Those rows were timed in a training framework.
    """
    rows = context.tables.rows(
        "matmul", {"gpu": context.recipe.gpu, "source": SIMUMAX, "pass": "y"}
    )
    if not rows or not context.recipe.throttles:
        return curve
    rested = replace(curve, throttle=0.0)
    price = _product_price(context.chip, sustained=True)

    def priced(throttle: float) -> Array:
        return np.array([price(row, replace(rested, throttle=throttle)) for row in rows])

    throttle = rounded(float(fit(lambda x: priced(float(x[0])), times_s(rows), (0.3,))[0]))
    name = "matmul forward, steady load"
    context.scores.append(fit_score(context.recipe.device, name, priced(throttle), times_s(rows)))
    source = f"{curve.source}; throttle: {SIMUMAX}, steady load"
    return replace(curve, throttle=throttle, source=source)


def _gradient_product(context: FitContext, forward: MatmulCurve, which: str) -> MatmulCurve:
    """Returns the curve of one gradient: the forward curve with a scaled efficiency.

    The scale is the efficiency of the gradient's rows over that of the forward rows on the same
    GPU.
    """
    recipe = context.recipe
    lender = recipe.gradients
    chip = context.lender(lender)
    price = _product_price(chip, sustained=True)
    base = forward
    if lender != recipe.gpu:
        base = replace(forward, efficiency=_efficiency(context, forward, "y", price))
    rows = _gradient_rows(context, which)
    efficiency = _efficiency(context, base, which, price)
    ratio = efficiency / base.efficiency
    predicted = np.array([price(row, replace(base, efficiency=efficiency)) for row in rows])
    line = fit_score(recipe.device, f"matmul {which} on {lender}", predicted, times_s(rows))
    context.scores.append(line)
    same_chip = recipe.gpu.split("-")[0] == lender.split("-")[0]
    return replace(
        forward,
        efficiency=rounded(forward.efficiency * ratio),
        kind=Kind.INTERPOLATED if same_chip else Kind.ANALYTIC,
        rows=len(rows),
        median_error=rounded(line.median),
        source=f"forward curve, efficiency x {ratio:.3f} as {which} on {lender} "
        f"({sources_of(rows)})",
    )


def _gradient_rows(context: FitContext, which: str) -> list[Row]:
    """Returns rows of one pass (`y`, `dx`, `dw`), those that accumulate into fp32 if there are any.

    V100 has both gradients in one time.
    """
    passes = ("y",) if which == "y" else (which, "dx+dw")
    sources = (SIMUMAX, SUPERSCALER)
    where: Where = {"gpu": context.recipe.gradients, "source": sources, "pass": passes}
    rows = context.tables.rows("matmul", where)
    accumulated = [row for row in rows if "fp32_accumulate" in row["flag"]]
    return accumulated or rows


def _efficiency(
    context: FitContext, curve: MatmulCurve, which: str, price: Callable[[Row, MatmulCurve], float]
) -> float:
    rows = _gradient_rows(context, which)

    def priced(x: Array) -> Array:
        refitted = replace(curve, efficiency=float(x[0]))
        return np.array([price(row, refitted) for row in rows])

    constants = fit(priced, times_s(rows), (curve.efficiency,))
    return rounded(float(constants[0]))


def _batched_products(row: Row) -> tuple[Product, ...]:
    """Returns the products behind one row of un-fused attention.

    q k^T is [S,d] x [d,S], p v is [S,S] x [S,d]; each has two gradients in the backward pass.
    """
    batch, heads, seq, head_dim = int_columns(row, "batch", "heads", "seq", "head_dim")
    qk = Product(m=seq, n=seq, k=head_dim, batch=batch * heads)
    pv = Product(m=seq, n=head_dim, k=seq, batch=batch * heads)
    if row["direction"] == "forward":
        return (qk,) if row["kernel"] == "unfused_qk" else (pv,)
    return (pv, pv) if row["kernel"] == "unfused_qk" else (qk, pv)


def _batched(context: FitContext, forward: MatmulCurve, direction: str) -> MatmulCurve:
    """Returns the curve of the products of un-fused attention.

    It is the forward curve with its own efficiency, k_half and share of bandwidth. Its bounds are
    those of the sequence and head_dim. Bound by memory more than by power, the backward rows
    flagged tiny_gradients are no faster per product than the forward ones, so they count here.
    """
    recipe = context.recipe
    gpu, chip = recipe.memory, context.lender(recipe.memory)
    kernels = ("unfused_qk", "unfused_pv")
    where: Where = {"gpu": gpu, "kernel": kernels, "direction": direction}
    rows = context.tables.rows("attention", where, allow="tiny_gradients")
    kind = Kind.INTERPOLATED if gpu == recipe.gpu else Kind.ANALYTIC
    source = f"{sources_of(rows)}: {gpu} un-fused attention {direction}"

    def curve(x: Array) -> MatmulCurve:
        return replace(
            forward,
            efficiency=float(x[0]),
            k_half=float(x[1]),
            bandwidth_share=float(x[2]),
            throttle=0.0,
            kind=kind,
            source=source,
        )

    def price(row: Row, curve: MatmulCurve) -> float:
        products = _batched_products(row)
        return sum(float(matmul_s(each, curve, chip, sustained=True)) for each in products)

    family = CurveFamily(
        device=recipe.device,
        name=f"un-fused products {direction}",
        rows=rows,
        curve=curve,
        price=price,
        sizes=flash_sizes,
        start=(forward.efficiency, forward.k_half, 0.7),
        weight=head_weight,
    )
    return fitted_heads(family, context)


# family of a profile -> operations in the tables that measure it, in order of preference, with the
# fewest bytes of one element, forward and backward (README of the measurements)
OPERATIONS: dict[str, tuple[tuple[str, int, int], ...]] = {
    "norm": (("layernorm", 4, 6),),
    "elementwise": (("gelu", 4, 6), ("bias_gelu", 4, 6)),
    "residual": (("residual_add", 6, 6), ("bias_dropout_residual_add", 7, 5)),
    "softmax": (("causal_softmax_fused", 3, 4),),
    "dropout": (("attention_dropout", 5, 5),),
    "embedding": (("embedding", 2, 2),),
    "cross_entropy": (("cross_entropy_unfused", 2, 2),),
}


def _memory_rows(context: FitContext, name: str, direction: str) -> tuple[str, int, list[Row]]:
    """Returns the first operation of a family with rows, its bytes per element and its rows.

    The rows are those of the device or of the GPU that it borrows from.
    """
    for operation, forward_bytes, backward_bytes in OPERATIONS[name]:
        where: Where = {"gpu": context.recipe.memory, "op": operation, "direction": direction}
        rows = context.tables.rows("elementwise", where)
        if rows:
            return operation, forward_bytes if direction == "forward" else backward_bytes, rows
    return "", 0, []


def _memory(context: FitContext, name: str, direction: str) -> MemoryCurve | None:
    """Returns the curve of one memory-bound family, or None without rows.

    It is from the device's own rows or (ANALYTIC) from those of a related GPU.
    """
    gpu, device = context.recipe.memory, context.recipe.device
    operation, element_bytes, rows = _memory_rows(context, name, direction)
    if not rows:
        return None
    bytes_per_s = context.lender(gpu).bytes_per_s
    kind = Kind.INTERPOLATED if gpu == context.recipe.gpu else Kind.ANALYTIC
    source = f"{sources_of(rows)}: {gpu} {operation} {direction}"

    def curve(x: Array) -> MemoryCurve:
        return MemoryCurve(
            launch_s=LEAST_LAUNCH_S + float(x[0]),
            bandwidth_share=float(x[1]),
            kind=kind,
            source=source,
        )

    def sizes(row: Row) -> tuple[float, ...]:
        return (element_bytes * int(row["elements"]),)

    def price(row: Row, curve: MemoryCurve) -> float:
        return float(memory_bound_s(sizes(row)[0], curve, bytes_per_s)) + _table_s(row, bytes_per_s)

    family = CurveFamily(
        device=device,
        name=f"{operation} {direction}",
        rows=rows,
        curve=curve,
        price=price,
        sizes=sizes,
        start=(5e-6, 0.5),
    )
    return family.fitted(context.scores)


def _table_s(row: Row, bytes_per_s: float) -> float:
    """Seconds of the passes over the gradient of an embedding table.

    They run at the share that gelu's backward reaches on A100.
    """
    if row["op"] != "embedding" or row["direction"] == "forward":
        return 0.0
    vocab_shard = 128 * -(-50257 // (128 * int(row["tp"])))
    return TABLE_PASSES * 2 * vocab_shard * int(row["hidden"]) / (0.8 * bytes_per_s)


def _passes(context: FitContext) -> dict[str, PassCurves]:
    """Returns the curves of every memory-bound family.

    Rows of one direction serve both; families without rows are assumed.
    """
    passes = {}
    for name, (forward_share, backward_share) in ASSUMED_SHARES.items():
        forward, backward = _memory(context, name, "forward"), _memory(context, name, "backward")
        if forward and not backward:
            source = f"{forward.source}, taken for the backward"
            backward = replace(forward, kind=Kind.ANALYTIC, source=source)
        passes[name] = PassCurves(
            forward=forward or assumed_memory(forward_share),
            backward=backward or assumed_memory(backward_share),
        )
    return passes


def _optimizer(elementwise: MemoryCurve) -> MemoryCurve:
    """Returns the curve of Adam, at the bandwidth share of an element-wise kernel (EQUATIONS K5).

    Both stream long tensors. The measured FusedAdam steps are first ones, which allocate and zero
    their states: 21 ps a parameter of 18 bytes, half of the bandwidth. Steps of vTrain's
    single-node A100 grid grow by 16 ps a parameter of 28 bytes: 0.84 of the bandwidth.
    """
    return MemoryCurve(
        launch_s=elementwise.launch_s,
        bandwidth_share=elementwise.bandwidth_share,
        kind=Kind.ANALYTIC,
        source=f"taken from element-wise kernels ({elementwise.source}); "
        "the measured Adam steps are first ones, with allocation",
    )


def _with_efficiency(
    context: FitContext,
    name: str,
    rows: Sequence[Row],
    curve: Efficient,
    price: Callable[[Row, Efficient], float],
    sizes: Callable[[Row], tuple[float, ...]],
) -> Efficient:
    """Returns the curve of a lender with only its efficiency fitted to rows of the device."""
    source = f"{sources_of(rows)}: efficiency on {context.recipe.gpu}; else {curve.source}"
    base = replace(curve, kind=Kind.INTERPOLATED, source=source)
    return CurveFamily(
        device=context.recipe.device,
        name=name,
        rows=rows,
        curve=lambda x: replace(base, efficiency=float(x[0])),
        price=price,
        sizes=sizes,
        start=(base.efficiency,),
    ).fitted(context.scores)


def retimed_curves(context: FitContext, compute: Compute, lender: Compute) -> Compute:
    """Returns curves that are carried from a lender, refitted to the device's own few rows.

    Only the efficiency of products and fused attention is fitted.
    """
    gpu = context.recipe.gpu
    tables = context.tables

    def product(curve: MatmulCurve, which: str) -> MatmulCurve:
        rows = tables.rows("matmul", {"gpu": gpu, "source": SIMUMAX, "pass": which})
        price = _product_price(context.chip, sustained=True)
        return _with_efficiency(context, f"matmul {which}", rows, curve, price, _product_sizes)

    def flash(curve: FlashCurve, direction: str, work: float) -> FlashCurve:
        rows = tables.rows("attention", {"gpu": gpu, "kernel": "flash_te", "direction": direction})
        price = flash_price(context.chip, work)
        return _with_efficiency(
            context, f"flash attention {direction}", rows, curve, price, flash_sizes
        )

    return replace(
        compute,
        forward=product(lender.forward, "y"),
        input_gradient=product(lender.input_gradient, "dx"),
        weight_gradient=product(lender.weight_gradient, "dw"),
        flash_forward=flash(lender.flash_forward, "forward", 1.0),
        flash_backward=flash(lender.flash_backward, "backward", FLASH_BACKWARD_FLOPS),
    )


def compute_curves(context: FitContext) -> Compute:
    """Returns every curve of one device."""
    forward = _forward_product(context)
    flash_forward, flash_backward = flash_pair(context)
    assumed = analytic_profile(context.recipe.device).compute
    passes = _passes(context)
    return replace(
        assumed,
        forward=forward,
        input_gradient=_gradient_product(context, forward, "dx"),
        weight_gradient=_gradient_product(context, forward, "dw"),
        batched_forward=_batched(context, forward, "forward"),
        batched_backward=_batched(context, forward, "backward"),
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
