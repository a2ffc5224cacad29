"""Measurements -> profiles/data/*.yaml: `python -m profiles.calibrate --measurements DIR [--out profiles/data]`.

Fits the forms of `profiles/curves.py` to tables of published timings (their README lists sources, flags and traps) and
prints, per device and family, the rows used and the median and mean absolute percentage error, in-sample and in 5-fold
cross-validation. What ships are fitted constants and spline knots, never rows. Same tables, same bytes.

Choices, with their reasons:
- Matmul: the form with tiles, waves and split k has a cross-validated median error within one point of the same form
  corrected by a log2 grid of medians in m, n, k (A100 4.0 / 3.2 %, H100 3.2 / 2.9 %, B200 3.7 / 3.1 % where every size is
  at least 1024), and beats the grid alone where sizes are small. So there is no grid.
- H100, H200 and B200 slow down by 13-21 % in products above about 1e12 FLOPs, A100 does not: the power limit, which a
  training step reaches for good. Rows are compared with the form as measured; training is priced at the limit.
- Rows of backward products on A100-SXM and GH200 (flag tiny_gradients: gradients that underflow to zero run too fast)
  are not used; the gradients' efficiency relative to the forward product is that of the rows without the flag.
- CC BY-SA rows, `other_run_differs`, slow networks and GPUs named by inference are not used.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import yaml
from numpy.typing import NDArray

from profiles.catalog import load_cluster
from profiles.curves import (
    Bounds,
    Chip,
    CollectiveCurve,
    Curve,
    FlashCurve,
    MatmulCurve,
    MemoryCurve,
    Product,
    flash_attention_s,
    matmul_s,
    memory_bound_s,
    spline_s,
)
from profiles.hardware import Cluster
from profiles.measured import ASSUMED_SHARES, Compute, Inter, Intra, Passes, Profile, analytic_profile, assumed_memory
from profiles.provenance import Kind
from profiles.schema import document
from profiles.spec import Precision
from profiles.units import GB, US_PER_S

Row = Mapping[str, str]
Array = NDArray[np.float64]
AnyCurve = TypeVar("AnyCurve", bound=Curve)
FOLDS = 5
LEAST_LAUNCH_S = 1e-6  # no kernel starts and ends sooner
TABLE_PASSES = 3  # over the gradient of an embedding table: zeroed, read and written
TRAINED_HEAD_DIMS = (64, 80, 96, 128)
DIGITS = 4
REFUSED_FLAGS = ("tiny_gradients", "other_run_differs", "gpu_assumed", "slow_network", "slow_host_path", "list_output", "single_size")
REFUSED_SOURCES = ("stas00/ml-engineering",)
AICONFIGURATOR = "ai-dynamo/aiconfigurator"
SIMUMAX = "MooreThreads/SimuMax"
SUPERSCALER = "microsoft/SuperScaler"
TRAIN_TIME = "DebarghaG/estimate-train-time"
VTRAIN = "VIA-Research/vTrain"


class Tables:
    """The CSV files of one directory, without the rows that no profile may rest on."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tables: dict[str, list[Row]] = {}

    def rows(self, table: str, allow: str = "", **wanted: str | tuple[str, ...]) -> list[Row]:
        """Rows whose columns have one of the wanted values; `source` matches by its beginning, `allow` admits one flag."""
        if table not in self._tables:
            with (self._directory / f"{table}.csv").open(encoding="utf-8", newline="") as file:
                self._tables[table] = list(csv.DictReader(file))
        return [row for row in self._tables[table] if _usable(row, allow) and all(_matches(row, *item) for item in wanted.items())]


def _usable(row: Row, allow: str) -> bool:
    refused = {flag for flag in row["flag"].split() if flag in REFUSED_FLAGS and flag != allow}
    return not refused and not row["source"].startswith(REFUSED_SOURCES)


def _matches(row: Row, column: str, wanted: str | tuple[str, ...]) -> bool:
    values = (wanted,) if isinstance(wanted, str) else wanted
    return row[column].startswith(values) if column == "source" else row[column] in values


def _times_s(rows: Sequence[Row]) -> Array:
    return np.array([float(row["time_us"]) / US_PER_S for row in rows])


def _ints(row: Row, *columns: str) -> tuple[int, ...]:
    return tuple(int(row[column]) for column in columns)


def fit(predict: Callable[[Array], Array], measured: Array, start: Sequence[float], weights: Array | None = None) -> Array:
    """Positive constants that minimise the weighted sum of |log(predicted / measured)|.

    Levenberg-Marquardt on the logarithms of the constants, re-weighted towards the absolute value: medians, not means.
    """
    x = np.log(np.array(start, dtype=float))
    base = np.ones_like(measured) if weights is None else weights
    target = np.log(measured)

    def residual(at: Array) -> Array:
        return np.log(predict(np.exp(at))) - target

    r, damping = residual(x), 1e-2
    for _ in range(40):
        w = base / np.maximum(np.abs(r), 0.01)
        jacobian = np.stack([(residual(x + step) - r) / 1e-3 for step in 1e-3 * np.eye(len(x))], axis=1)
        normal = jacobian.T @ (w[:, None] * jacobian)
        move = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), -jacobian.T @ (w * r))
        candidate = residual(x + np.clip(move, -0.5, 0.5))
        better = float(np.sum(base * np.abs(candidate))) < float(np.sum(base * np.abs(r)))
        damping = damping / 3 if better else damping * 4
        if better:
            x, r = x + np.clip(move, -0.5, 0.5), candidate
        if damping > 1e6 or (better and float(np.max(np.abs(move))) < 1e-4):
            break
    return np.exp(x)


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _rounded_constants(curve: AnyCurve) -> AnyCurve:
    values = {name: getattr(curve, name) for name in curve.__dataclass_fields__}
    return replace(curve, **{name: _rounded(value) for name, value in values.items() if isinstance(value, float)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One line of the report: errors of a shipped form on the rows it was fitted to, and cross-validated."""

    device: str
    family: str
    rows: int
    median: float
    mean: float
    cv_median: float | None = None
    cv_mean: float | None = None

    def __str__(self) -> str:
        cross = "" if self.cv_median is None or self.cv_mean is None else f"{self.cv_median:8.1%}{self.cv_mean:8.1%}"
        return f"{self.device:<12}{self.family:<34}{self.rows:>6}{self.median:9.1%}{self.mean:8.1%}{cross}"


def _errors(predicted: Array, measured: Array) -> Array:
    return np.abs(predicted / measured - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Rows of one operation, how a curve prices one of them, and how constants make a curve."""

    device: str
    name: str
    rows: Sequence[Row]
    curve: Callable[[Array], Curve]
    price: Callable[[Row, Any], float]
    start: tuple[float, ...]
    weight: Callable[[Row], float] = lambda row: 1.0

    def predict(self, rows: Sequence[Row], constants: Array) -> Array:
        curve = self.curve(constants)
        return np.array([self.price(row, curve) for row in rows])

    def fit(self, rows: Sequence[Row]) -> Array:
        weights = np.array([self.weight(row) for row in rows])
        return fit(lambda constants: self.predict(rows, constants), _times_s(rows), self.start, weights)


def _fitted(family: Family, sizes: Callable[[Row], tuple[float, ...]], scores: list[Score]) -> Curve:
    """The curve of a family with its bounds, its errors added to `scores`."""
    rows = family.rows
    constants = family.fit(rows)
    curve = _rounded_constants(family.curve(constants))
    measured = _times_s(rows)
    errors = _errors(np.array([family.price(row, curve) for row in rows]), measured)
    held_out = np.empty(len(rows))
    for fold in range(FOLDS):
        kept = [row for i, row in enumerate(rows) if i % FOLDS != fold]
        held_out[fold::FOLDS] = family.predict(rows[fold::FOLDS], family.fit(kept))
    crossed = _errors(held_out, measured)
    scores.append(Score(
        device=family.device, family=family.name, rows=len(rows), median=float(np.median(errors)), mean=float(np.mean(errors)),
        cv_median=float(np.median(crossed)), cv_mean=float(np.mean(crossed))))
    extent = np.array([sizes(row) for row in rows])
    bounds = Bounds(low=tuple(extent.min(axis=0).tolist()), high=tuple(extent.max(axis=0).tolist()))
    return replace(curve, bounds=bounds, rows=len(rows), median_error=_rounded(float(np.median(errors))))


def _checked(device: str, name: str, rows: Sequence[Row], price: Callable[[Row, Any], float], curve: Curve, scores: list[Score]) -> None:
    """Scores a curve on rows that it was not fitted to."""
    if rows:
        errors = _errors(np.array([price(row, curve) for row in rows]), _times_s(rows))
        scores.append(Score(device=device, family=name, rows=len(rows), median=float(np.median(errors)), mean=float(np.mean(errors))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Which rows a device's profile rests on; an empty name: none.

    gpu            name of the device in the tables
    throttles      it reaches its power limit in the rows
    gradients      GPU whose backward products (free of tiny gradients) give their efficiency relative to its forward ones
    flash          kernels of the forward rows; flash_trained: those of rows of a training framework with a backward
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


RECIPES = (
    Recipe(
        device="a100-80gb", gpu="A100-SXM4-80GB", throttles=False, gradients="A100-PCIe-80GB", flash=("flash2",), flash_backward="A100-SXM4-80GB",
        memory="A100-SXM4-80GB", sources=(AICONFIGURATOR, TRAIN_TIME), collectives=(AICONFIGURATOR, VTRAIN)),
    Recipe(
        device="h100-80gb", gpu="H100-SXM5-80GB", throttles=True, gradients="A100-PCIe-80GB", flash=("flash3",), flash_backward="",
        memory="GH200-96GB", sources=(AICONFIGURATOR,), collectives=(AICONFIGURATOR,)),
    Recipe(
        device="h200-141gb", gpu="H200-SXM-141GB", throttles=True, gradients="A100-PCIe-80GB", flash=("flash3",), flash_backward="",
        memory="GH200-96GB", sources=(AICONFIGURATOR,), collectives=(AICONFIGURATOR,)),
    Recipe(
        device="b200-180gb", gpu="B200-SXM-180GB", throttles=True, gradients="B200-SXM-180GB", flash=("flash_te",), flash_backward="B200-SXM-180GB",
        memory="GH200-96GB", sources=(AICONFIGURATOR,), collectives=(AICONFIGURATOR,)),
    Recipe(
        device="v100-32gb", gpu="V100-SXM2-32GB", throttles=False, gradients="V100-SXM2-32GB", flash=(), flash_backward="",
        memory="V100-SXM2-32GB", sources=(SUPERSCALER,), collectives=(SUPERSCALER,)),
)
# Datasheets of parts that only lend rows: dense 16-bit FLOP/s, bytes/s, multiprocessors.
LENDERS = {
    "A100-PCIe-80GB": Chip(peak_flops_per_s=312e12, bytes_per_s=1935e9, num_sms=108),
    "GH200-96GB": Chip(peak_flops_per_s=989e12, bytes_per_s=4000e9, num_sms=132),
}


def _chip(cluster: Cluster) -> Chip:
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
        return _chip(self.cluster)

    def lender(self, gpu: str) -> Chip:
        return LENDERS.get(gpu, self.chip)


def _product(row: Row) -> Product:
    m, n, k = _ints(row, "m", "n", "k")
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
    return _ints(row, "m", "n", "k")


def _training_weight(row: Row) -> float:
    """Products with a size below 256 do not occur in training but at high tensor parallel degrees: a third of the weight."""
    return 1.0 if min(_product_sizes(row)) >= 256 else 0.3


def _forward_product(bench: Bench) -> MatmulCurve:
    recipe = bench.recipe
    rows = bench.tables.rows("matmul", gpu=recipe.gpu, source=recipe.sources, **{"pass": "y"})
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
        device=recipe.device, name="matmul forward", rows=rows, curve=curve, price=_product_price(bench.chip, sustained=False), start=start,
        weight=_training_weight)
    fitted = _fitted(family, _product_sizes, bench.scores)
    large = [row for row in rows if min(_product_sizes(row)) >= 1024]
    _checked(recipe.device, "  of these m, n, k >= 1024", large, family.price, fitted, bench.scores)
    return _sustained(bench, fitted)


def _sustained(bench: Bench, curve: MatmulCurve) -> MatmulCurve:
    """The curve with the power limit of rows timed under steady load in a training framework, where there are such rows."""
    rows = bench.tables.rows("matmul", gpu=bench.recipe.gpu, source=SIMUMAX, **{"pass": "y"})
    if not rows or not bench.recipe.throttles:
        return curve
    rested = replace(curve, throttle=0.0)
    price = _product_price(bench.chip, sustained=True)
    throttle = fit(
        lambda x: np.array([price(row, replace(rested, throttle=float(x[0]))) for row in rows]), _times_s(rows), (0.3,))[0]
    slowed = replace(curve, throttle=_rounded(throttle), source=f"{curve.source}; throttle: {SIMUMAX}, steady load")
    _checked(bench.recipe.device, "matmul forward, steady load", rows, price, slowed, bench.scores)
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
    source = f"forward curve, efficiency x {ratio:.3f} as {which} on {lender} ({rows[0]['source'].split(' ')[0]})"
    same_chip = own or recipe.gpu.split("-")[0] == lender.split("-")[0]
    _checked(recipe.device, f"matmul {which} on {lender}", rows, price, replace(base, efficiency=efficiency), bench.scores)
    return replace(
        forward, efficiency=_rounded(forward.efficiency * ratio), kind=Kind.INTERPOLATED if same_chip else Kind.ANALYTIC, source=source,
        rows=len(rows), median_error=None)


def _gradient_rows(bench: Bench, which: str) -> list[Row]:
    rows = bench.tables.rows("matmul", gpu=bench.recipe.gradients, source=(SIMUMAX, SUPERSCALER), **{"pass": (which, "dx+dw") if which != "y" else "y"})
    accumulated = [row for row in rows if "fp32_accumulate" in row["flag"]]
    return accumulated or rows


def _efficiency(bench: Bench, curve: MatmulCurve, which: str, price: Callable[[Row, MatmulCurve], float]) -> float:
    rows = _gradient_rows(bench, which)
    constants = fit(
        lambda x: np.array([price(row, replace(curve, efficiency=float(x[0]))) for row in rows]), _times_s(rows), (curve.efficiency,))
    return _rounded(constants[0])


def _batched_products(row: Row) -> tuple[Product, ...]:
    """The products behind one row: q k^T is [S,d] x [d,S], p v is [S,S] x [S,d]; two gradients each in the backward pass."""
    batch, heads, seq, head_dim = _ints(row, "batch", "heads", "seq", "head_dim")
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
    rows = bench.tables.rows("attention", gpu=gpu, kernel=("unfused_qk", "unfused_pv"), direction=direction, allow="tiny_gradients")
    kind = Kind.INTERPOLATED if gpu == recipe.gpu else Kind.ANALYTIC
    source = f"{rows[0]['source'].split(' ')[0]}: {gpu} un-fused attention {direction}"

    def curve(x: Array) -> MatmulCurve:
        return replace(
            forward, efficiency=float(x[0]), k_half=float(x[1]), bandwidth_share=float(x[2]), throttle=0.0, kind=kind, source=source)

    def price(row: Row, curve: MatmulCurve) -> float:
        return sum(matmul_s.__wrapped__(product, curve, chip, sustained=True) for product in _batched_products(row))

    family = Family(
        device=recipe.device, name=f"un-fused products {direction}", rows=rows, curve=curve, price=price,
        start=(forward.efficiency, forward.k_half, 0.7), weight=_head_weight)
    fitted = _fitted(family, _flash_sizes, bench.scores)
    _checked(recipe.device, "  of these head_dim 64, 80, 96, 128", [r for r in rows if _head_weight(r) == 1], price, fitted, bench.scores)
    return fitted


def _flash_price(chip: Chip, work: float) -> Callable[[Row, FlashCurve], float]:
    def price(row: Row, curve: FlashCurve) -> float:
        batch, heads, seq, head_dim, v_head_dim = _ints(row, "batch", "heads", "seq", "head_dim", "v_head_dim")
        keys = seq / 2 if row["causal"] == "1" else float(seq)
        flops = work * 2.0 * batch * heads * seq * keys * (head_dim + v_head_dim)
        return flash_attention_s(flops, heads=batch * heads, seq=seq, keys=keys, head_dim=head_dim, curve=curve, chip=chip)

    return price


def _flash_sizes(row: Row) -> tuple[float, ...]:
    return _ints(row, "seq", "head_dim")


def _flash(bench: Bench, gpu: str, direction: str) -> FlashCurve:
    recipe = bench.recipe
    rows = bench.tables.rows("attention", gpu=gpu, kernel=recipe.flash, direction=direction)
    trained = [row for row in rows if "with_kv_cache_write" not in row["flag"]]
    rows = trained if any(row["head_dim"] == "128" for row in trained) else rows
    few = len(rows) < 100  # two head_dims and no short sequences: only the level and keys_half can be told
    source = f"{', '.join(sorted({row['source'].split(' ')[0] for row in rows}))}: {gpu} {', '.join(recipe.flash)} {direction}"

    def curve(x: Array) -> FlashCurve:
        launch_s, head_half = (4e-6, 20.0) if few else (LEAST_LAUNCH_S + float(x[2]), float(x[3]))
        return FlashCurve(
            launch_s=launch_s, kind=Kind.INTERPOLATED, source=source, efficiency=float(x[0]), keys_half=float(x[1]), head_half=head_half)

    family = Family(
        device=recipe.device, name=f"flash attention {direction}", rows=rows, curve=curve,
        price=_flash_price(bench.lender(gpu), 1.0 if direction == "forward" else 2.5), start=(0.7, 200.0) if few else (0.7, 200.0, 5e-6, 20.0),
        weight=_head_weight)
    fitted = _fitted(family, _flash_sizes, bench.scores)
    usual = [row for row in rows if _head_weight(row) == 1]
    _checked(recipe.device, "  of these head_dim 64, 80, 96, 128", usual, family.price, fitted, bench.scores)
    return fitted


def _flash_pair(bench: Bench, a100: Compute | None) -> tuple[FlashCurve, FlashCurve]:
    """Forward and backward; without backward rows the forward's, slowed as on A100; without any the assumptions."""
    recipe = bench.recipe
    if not recipe.flash:
        assumed = analytic_profile(recipe.device).compute
        return assumed.flash_forward, assumed.flash_backward
    forward = _flash(bench, recipe.gpu, "forward")
    if recipe.flash_backward:
        return forward, _flash(bench, recipe.flash_backward, "backward")
    if a100 is None:
        raise ValueError("the recipe of the A100 must come before those that borrow from it")
    ratio = a100.flash_backward.efficiency / a100.flash_forward.efficiency
    backward = replace(
        forward, efficiency=_rounded(forward.efficiency * ratio), kind=Kind.ANALYTIC, rows=0, median_error=None,
        source=f"forward curve, efficiency x {ratio:.3f} as flash2 on A100")
    return forward, backward


# Family of a profile -> operations in the tables that measure it, in order of preference, with their fewest bytes of one
# element, forward and backward (README of the measurements).
OPERATIONS: dict[str, tuple[tuple[str, float, float], ...]] = {
    "norm": (("layernorm", 4, 6),),
    "elementwise": (("gelu", 4, 6), ("bias_gelu", 4, 6)),
    "residual": (("residual_add", 6, 6), ("bias_dropout_residual_add", 7, 5)),
    "softmax": (("causal_softmax_fused", 3, 4),),
    "dropout": (("attention_dropout", 5, 5),),
    "embedding": (("embedding", 2, 2),),
    "cross_entropy": (("cross_entropy_unfused", 2, 2),),
}


def _memory(bench: Bench, name: str, direction: str) -> MemoryCurve | None:
    """The curve of one memory-bound family, from the device's own rows or (ANALYTIC) from those of a related GPU."""
    recipe = bench.recipe
    gpu = recipe.memory
    bytes_per_s = bench.lender(gpu).bytes_per_s
    for operation, forward_bytes, backward_bytes in OPERATIONS[name]:
        element_bytes = forward_bytes if direction == "forward" else backward_bytes
        rows = [row for row in bench.tables.rows("elementwise", gpu=gpu, op=operation, direction=direction) if "l2_resident" not in row["flag"]]
        if rows:
            break
    else:
        return None
    source = f"{rows[0]['source'].split(' ')[0]}: {gpu} {operation} {direction}"

    def curve(x: Array) -> MemoryCurve:
        return MemoryCurve(
            launch_s=LEAST_LAUNCH_S + float(x[0]), bandwidth_share=float(x[1]), kind=Kind.INTERPOLATED if gpu == recipe.gpu else Kind.ANALYTIC, source=source)

    def sizes(row: Row) -> tuple[float, ...]:
        return (element_bytes * int(row["elements"]),)

    family = Family(
        device=recipe.device, name=f"{operation} {direction}", rows=rows, curve=curve,
        price=lambda row, curve: memory_bound_s(sizes(row)[0], curve, bytes_per_s) + _table_s(row, bytes_per_s), start=(5e-6, 0.5))
    fitted = _fitted(family, sizes, bench.scores)
    assert isinstance(fitted, MemoryCurve)
    return fitted


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


def _optimizer(bench: Bench) -> MemoryCurve:
    """Adam on A100: t = a + b params + c tensors; 18 bytes (fp16 states, 4 of them zeroed) in b seconds.

    c is the allocation of a first step and is dropped. Marked ANALYTIC: K5's 28 bytes are others, and so is the kernel.
    """
    rows = bench.tables.rows("optimizer", gpu="A100-SXM4-80GB")
    params = np.array([float(row["params"]) for row in rows])
    tensors = np.array([float(row["tensors"]) for row in rows])
    a, b, _ = fit(lambda x: x[0] + x[1] * params + x[2] * tensors, _times_s(rows), (5e-6, 2e-11, 5e-5))
    predicted = a + b * params + _ * tensors
    if bench.recipe.gpu == "A100-SXM4-80GB":
        errors = _errors(predicted, _times_s(rows))
        bench.scores.append(Score(
            device=bench.recipe.device, family="first Adam step", rows=len(rows), median=float(np.median(errors)), mean=float(np.mean(errors))))
    share = _rounded(18 / b / 2039e9)
    return MemoryCurve(
        launch_s=_rounded(a), bandwidth_share=share, kind=Kind.ANALYTIC, rows=len(rows),
        source=f"{TRAIN_TIME}: A100 first FusedAdam step with fp16 states, 18 bytes per parameter; its share of the bandwidth")


def _compute(bench: Bench, a100: Compute | None) -> Compute:
    forward = _forward_product(bench)
    flash_forward, flash_backward = _flash_pair(bench, a100)
    assumed = analytic_profile(bench.recipe.device).compute
    return Compute(
        host_launch_s=assumed.host_launch_s,
        host_launch_source="assumed: eager PyTorch dispatch; the un-fused RMSNorm of about 8 kernels takes at least 73 us under its profiler (A100)",
        forward=forward,
        input_gradient=_gradient_product(bench, forward, "dx"),
        weight_gradient=_gradient_product(bench, forward, "dw"),
        batched_forward=_batched(bench, forward, "forward"),
        batched_backward=_batched(bench, forward, "backward"),
        flash_forward=flash_forward,
        flash_backward=flash_backward,
        **_passes(bench),
        optimizer=_optimizer(bench),
    )


KNOTS_BYTES = tuple(512 * 8**i for i in range(8))  # 512 B .. 1 GiB
RANKS = (2, 4, 8)


def _knots(rows: Sequence[Row]) -> tuple[int, ...]:
    sizes = sorted(int(row["bytes"]) for row in rows)
    inner = (knot for knot in KNOTS_BYTES if 2 * sizes[0] < knot < sizes[-1] / 2)
    return (sizes[0], *inner, sizes[-1])


def _spline(rows: Sequence[Row], collective: str, ranks: int, knots: tuple[int, ...]) -> CollectiveCurve:
    """The log-log spline through the knots nearest to the rows in the sum of |log|."""
    def curve(times_s: Array) -> CollectiveCurve:
        times_us = tuple(_rounded(time_s * US_PER_S) for time_s in times_s)
        return CollectiveCurve(collective=collective, ranks=ranks, bytes=knots, time_us=times_us, rows=len(rows), median_error=0.0)

    def smooth(times_s: Array) -> CollectiveCurve:
        return replace(curve(times_s), time_us=tuple(float(time_s * US_PER_S) for time_s in times_s))

    sizes, measured = [int(row["bytes"]) for row in rows], _times_s(rows)
    order = np.argsort(sizes)
    start = np.exp(np.interp(np.log(knots), np.log(np.array(sizes)[order]), np.log(measured[order])))
    times_s = fit(lambda x: np.array([spline_s(smooth(x), size) for size in sizes]), measured, start.tolist())
    return curve(times_s)


def _collective_curves(bench: Bench) -> Iterator[CollectiveCurve]:
    names = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    for name in names:
        for ranks in RANKS:
            gpus = (bench.recipe.gpu, "A100-SXM4") if bench.recipe.gpu.startswith("A100") else (bench.recipe.gpu,)
            rows = bench.tables.rows("collectives", gpu=gpus, collective=name, nodes="1", ranks=str(ranks), source=bench.recipe.collectives)
            knots = _knots(rows)
            curve = _spline(rows, name, ranks, knots)
            measured = _times_s(rows)
            errors = _errors(np.array([spline_s(curve, int(row["bytes"])) for row in rows]), measured)
            held_out = np.empty(len(rows))
            for fold in range(FOLDS):
                kept = _spline([row for i, row in enumerate(rows) if i % FOLDS != fold], name, ranks, knots)
                held_out[fold::FOLDS] = [spline_s(kept, int(row["bytes"])) for row in rows[fold::FOLDS]]
            crossed = _errors(held_out, measured)
            bench.scores.append(Score(
                device=bench.recipe.device, family=f"{name} on {ranks}", rows=len(rows), median=float(np.median(errors)),
                mean=float(np.mean(errors)), cv_median=float(np.median(crossed)), cv_mean=float(np.mean(crossed))))
            yield replace(curve, median_error=_rounded(float(np.median(errors))))


def _intra(bench: Bench) -> Intra:
    curves = tuple(_collective_curves(bench))
    link = bench.cluster.intra_node.bytes_per_s
    largest = next(curve for curve in curves if curve.collective == "all_reduce" and curve.ranks == RANKS[-1])
    bus_bytes_per_s = 2 * (1 - 1 / RANKS[-1]) * largest.bytes[-1] / spline_s(largest, largest.bytes[-1])
    pair = next(curve for curve in curves if curve.collective == "all_to_all" and curve.ranks == 2)
    pair_bytes_per_s = pair.bytes[-1] / 2 / spline_s(pair, pair.bytes[-1])
    return Intra(
        link_bytes_per_s=link, link_share=_rounded(bus_bytes_per_s / link), point_to_point_share=_rounded(pair_bytes_per_s / link),
        kind=Kind.INTERPOLATED, source=f"{', '.join(bench.recipe.collectives)}: {bench.recipe.gpu}, one node; a message is half a 2-rank all-to-all",
        curves=curves)


def _inter(tables: Tables, scores: list[Score]) -> Inter:
    """GH200 nodes with one 400 Gb/s NIC each: all-reduce as C1 over 2, 4 and 8 nodes, and messages of 16 MiB and more."""
    nic_bytes_per_s = 50.0 * GB
    rows = tables.rows("collectives", gpu="GH200-96GB", collective="all_reduce")
    sizes, ranks = (np.array([float(row[column]) for row in rows]) for column in ("bytes", "ranks"))
    alpha_s, share = fit(
        lambda x: 2 * (ranks - 1) * (x[0] + sizes / (ranks * x[1] * nic_bytes_per_s)), _times_s(rows), (1e-5, 0.9))
    errors = _errors(2 * (ranks - 1) * (alpha_s + sizes / (ranks * share * nic_bytes_per_s)), _times_s(rows))
    scores.append(Score(device="GH200", family="all_reduce between nodes (C1)", rows=len(rows), median=float(np.median(errors)), mean=float(np.mean(errors))))
    messages = [row for row in tables.rows("collectives", gpu="GH200-96GB", collective="p2p") if int(row["bytes"]) >= 2**24]
    message_share = float(np.median([float(row["busbw_gbps"]) * GB / nic_bytes_per_s for row in messages]))
    return Inter(
        nic_share=_rounded(min(share, 1.0)), point_to_point_share=_rounded(message_share), kind=Kind.ANALYTIC,
        source=f"{TRAIN_TIME}: shares of a 400 Gb/s NIC on 2 to 8 GH200 nodes, taken for every NIC; latency from the cluster file")


def _variant(profile: Profile, device: str, note: str) -> Profile:
    """The same chip with another memory: every compute curve carried over and marked ANALYTIC."""
    def carried(curve: AnyCurve) -> AnyCurve:
        return replace(curve, kind=Kind.ANALYTIC, source=f"{note}: {curve.source}")

    fields = {}
    for name in Compute.__dataclass_fields__:
        value = getattr(profile.compute, name)
        if isinstance(value, Curve):
            fields[name] = carried(value)
        elif isinstance(value, Passes):
            fields[name] = Passes(forward=carried(value.forward), backward=carried(value.backward))
    return replace(profile, name=device, compute=replace(profile.compute, **fields))


def calibrate(tables: Tables) -> tuple[tuple[Profile, ...], tuple[Score, ...]]:
    """Every shipped profile and the errors of its curves."""
    scores: list[Score] = []
    inter = _inter(tables, scores)
    profiles: list[Profile] = []
    for recipe in RECIPES:
        bench = Bench(recipe=recipe, cluster=load_cluster(recipe.device), tables=tables, scores=scores)
        a100 = profiles[0].compute if profiles else None
        profiles.append(Profile(name=recipe.device, compute=_compute(bench, a100), intra=_intra(bench), inter=inter))
    profiles.append(_variant(profiles[0], "a100-40gb", "a100-80gb, the same chip"))
    return tuple(profiles), tuple(scores)


def to_yaml(profile: Profile) -> str:
    """The file of one profile: fields in the order of the dataclasses, without those that are empty."""
    body = yaml.safe_dump(_plain(document(profile)), sort_keys=False, default_flow_style=None, width=140)
    return f"# Written by `python -m profiles.calibrate` from public measurements; do not edit. Times in s and us, sizes in bytes.\n{body}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def main(arguments: Sequence[str] | None = None) -> int:
    """Rebuilds the profiles and prints the report."""
    parser = argparse.ArgumentParser(prog="python -m profiles.calibrate", description="Rebuild profiles/data/*.yaml from measurements.")
    parser.add_argument("--measurements", type=Path, required=True, help="directory of the CSV tables")
    parser.add_argument("--out", type=Path, default=Path("profiles/data"), help="directory of the YAML files")
    options = parser.parse_args(arguments)
    profiles, scores = calibrate(Tables(options.measurements))
    for profile in profiles:
        (options.out / f"{profile.name}.yaml").write_text(to_yaml(profile), encoding="ascii")
    header = f"{'device':<12}{'family':<34}{'rows':>6}{'median':>9}{'mean':>8}{'cv med':>8}{'cv mean':>8}"
    sys.stdout.write("\n".join((header, *map(str, scores), "")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
