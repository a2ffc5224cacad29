"""Fits of fused attention: curves from rows or a paper's bars, relative speeds of other kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from parplan.profiles.build.recipes import LENDERS, FitContext
from parplan.profiles.machines.curve_fitting import (
    AnyCurve,
    Array,
    CurveFamily,
    Row,
    Where,
    int_columns,
    rounded,
    sources_of,
)
from parplan.profiles.machines.curves import (
    FLASH_BACKWARD_FLOPS,
    Chip,
    FlashCurve,
    flash_attention_s,
)
from parplan.profiles.machines.shipped_profiles import analytic_profile
from parplan.profiles.machines.speeds import Compute, FlashSpeed
from parplan.profiles.provenance import Kind
from parplan.profiles.stack import FlashKernel
from parplan.profiles.units import US_PER_S

LEAST_LAUNCH_S = 1e-6  # no kernel starts and ends sooner
TRAINED_HEAD_DIMS = (64, 80, 96, 128)
CACHE_WRITE = "with_kv_cache_write"
# TFLOP/s of fused attention on H100-SXM5-80GB: the bars of figures 5 (forward, causal) and 6
# (backward, not causal) of the FlashAttention-3 paper (Shah et al. 2024, arXiv 2407.08608), by
# head_dim, for these sequences of 16,384 tokens in all and a hidden size of 2,048.
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
COMPARED_SEQ = 2048  # shorter sequences show more of the launches than of the kernels
# FlashAttention 1 in Triton as of July 2023, causal, head_dim 64, batch 4, 48 heads, by sequence,
# forward and backward: triton-lang/triton pull request 1917, before it; its GPU taken for an A100
# SXM, on which Triton's tutorials were timed then.
FLASH1_SOURCE = "triton-lang/triton pull request 1917"
FLASH1_TFLOPS = {
    2048: (102.1, 62.1),
    4096: (112.9, 71.7),
    8192: (119.1, 77.5),
    16384: (122.2, 80.6),
}
FLASH1_BATCH = 4
FLASH1_HEADS = 48
FLASH1_HEAD_DIM = 64

# TFLOP/s of FlashAttention 2 on B200, not causal, by sequence: forward with head_dim 128, batch 8
# and 16 heads (meta-pytorch/tritonbench pull request 171), backward with head_dim 64 and 32 heads
# of 16,384 tokens in all (Dao-AILab/flash-attention issue 1589).
BLACKWELL_FLASH2_SOURCE = (
    "meta-pytorch/tritonbench pull request 171; Dao-AILab/flash-attention issue 1589"
)
BLACKWELL_FORWARD = {2048: 352.1, 4096: 353.9, 8192: 361.6, 16384: 330.6}
BLACKWELL_FORWARD_HEADS, BLACKWELL_FORWARD_HEAD_DIM = 8 * 16, 128
BLACKWELL_BACKWARD = {2048: 301.6, 4096: 314.7, 8192: 329.1, 16384: 334.0}
BLACKWELL_BACKWARD_HEADS, BLACKWELL_BACKWARD_HEAD_DIM = 32, 64


def head_weight(row: Row) -> float:
    """Returns 1 for head sizes that models are trained with, less for all others."""
    return 1.0 if int(row["head_dim"]) in TRAINED_HEAD_DIMS else 0.1


def fitted_heads(family: CurveFamily[AnyCurve], context: FitContext) -> AnyCurve:
    fitted = family.fitted(context.scores)
    trained = [row for row in family.rows if head_weight(row) == 1]
    family.check("  of these head_dim 64, 80, 96, 128", trained, fitted, context.scores)
    return fitted


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Prefill(FlashCurve):
    """A curve that also prices inference rows, which write k and v into a cache.

    Training does not write a cache, so neither constant ships.

    cache_passes  passes over k and v, at the memory's bandwidth, that the write takes
    slowdown      extra time of the inference kernel itself, as a share of that of a training kernel
    """

    cache_passes: float = 0.0
    slowdown: float = 0.0


def flash_price(chip: Chip, work: float) -> Callable[[Row, FlashCurve], float]:
    def price(row: Row, curve: FlashCurve) -> float:
        batch, heads, seq = int_columns(row, "batch", "heads", "seq")
        head_dim, v_head_dim = int_columns(row, "head_dim", "v_head_dim")
        keys = seq / 2 if row["causal"] == "1" else float(seq)
        flops = work * 2.0 * batch * heads * seq * keys * (head_dim + v_head_dim)
        seconds: float = flash_attention_s(
            flops,
            heads=batch * heads,
            seq=seq,
            keys=keys,
            head_dim=head_dim,
            curve=curve,
            chip=chip,
        )
        if CACHE_WRITE not in row["flag"] or not isinstance(curve, _Prefill):
            return seconds
        cache_bytes = 2 * batch * int(row["kv_heads"]) * seq * (head_dim + v_head_dim)
        return seconds * (1 + curve.slowdown) + curve.cache_passes * cache_bytes / chip.bytes_per_s

    return price


def flash_sizes(row: Row) -> tuple[float, ...]:
    return int_columns(row, "seq", "head_dim")


def _flash(context: FitContext, gpu: str, direction: str, rows: Sequence[Row]) -> FlashCurve:
    """Returns the curve of one direction.

    Where there are only inference rows, their kernel counts as one that trains.
    """
    recipe = context.recipe
    written = sum(CACHE_WRITE in row["flag"] for row in rows)
    few = (
        len(rows) < 100
    )  # too large to show the launch; and, unless published, all of one head_dim
    names = ", ".join(sorted({row["kernel"] for row in rows}))
    kind = Kind.INTERPOLATED if gpu == recipe.gpu else Kind.ANALYTIC
    started = {
        "efficiency": 2.0,
        "keys_half": 200.0,
        "head_half": 0.0 if few and gpu != PUBLISHED_GPU else 20.0,
        "launch_s": 0.0 if few else 5e-6,
        "cache_passes": 1.0 if written else 0.0,
        "slowdown": 0.1 if 0 < written < len(rows) else 0.0,
    }
    fitted_names = [name for name, start in started.items() if start]

    def curve(x: Array) -> _Prefill:
        values = dict(zip(fitted_names, x.tolist(), strict=True))
        # the odds keep the efficiency below 1, which rows hardly tell from head_half
        odds = values.pop("efficiency")
        launch_s = LEAST_LAUNCH_S + values.pop("launch_s", 3e-6)
        return _Prefill(
            kind=kind,
            source=f"{sources_of(rows)}: {gpu} {names} {direction}",
            efficiency=odds / (1 + odds),
            launch_s=launch_s,
            **{"head_half": 20.0, **values},
        )

    work = 1.0 if direction == "forward" else FLASH_BACKWARD_FLOPS
    family = CurveFamily(
        device=recipe.device,
        name=f"flash attention {direction}",
        rows=rows,
        curve=curve,
        sizes=flash_sizes,
        weight=head_weight,
        price=flash_price(context.lender(gpu), work),
        start=tuple(started[name] for name in fitted_names),
    )
    fitted = fitted_heads(family, context)
    return FlashCurve(**{field.name: getattr(fitted, field.name) for field in fields(FlashCurve)})


def _published_rows(kernel: str) -> list[Row]:
    """Returns the bars of the published figure as rows of the attention table."""
    rows: list[Row] = []
    for head_dim, bars in PUBLISHED_BACKWARD[FlashKernel(kernel)].items():
        for seq, tflops in zip(PUBLISHED_SEQS, bars, strict=True):
            flops = FLASH_BACKWARD_FLOPS * 4.0 * PUBLISHED_TOKENS * PUBLISHED_HIDDEN * seq
            rows.append(
                {
                    "kernel": kernel,
                    "batch": str(PUBLISHED_TOKENS // seq),
                    "heads": str(PUBLISHED_HIDDEN // head_dim),
                    "seq": str(seq),
                    "head_dim": str(head_dim),
                    "v_head_dim": str(head_dim),
                    "causal": "0",
                    "time_us": str(flops / tflops / 1e12 * US_PER_S),
                    "flag": "",
                    "source": PUBLISHED,
                }
            )
    return rows


def flash_pair(context: FitContext) -> tuple[FlashCurve, FlashCurve]:
    """Returns the forward and the backward curve.

    Each is from the GPU's own rows, those of a related GPU or the published figure, else assumed.
    """
    recipe = context.recipe
    if not recipe.flash:
        assumed = analytic_profile(recipe.device).compute
        return assumed.flash_forward, assumed.flash_backward
    trained: Where = {"gpu": recipe.gpu, "kernel": recipe.flash, "direction": "forward"}
    rows = context.tables.rows("attention", trained)
    forward = _flash(context, recipe.gpu, "forward", rows)
    lender = recipe.flash_backward
    if lender in {kernel.value for kernel in PUBLISHED_BACKWARD}:
        return forward, _flash(context, PUBLISHED_GPU, "backward", _published_rows(lender))
    where: Where = {"gpu": lender, "kernel": ("flash2", "flash_te"), "direction": "backward"}
    return forward, _flash(context, lender, "backward", context.tables.rows("attention", where))


def _relative(
    tflops: float,
    curve: FlashCurve,
    chip: Chip,
    work: float,
    shape: tuple[int, int, int],
    causal: bool,
) -> float:
    """Returns a published speed over that of the curve.

    shape: heads of the whole batch, sequence, head_dim
    """
    heads, seq, head_dim = shape
    keys = seq / 2 if causal else float(seq)
    flops = work * 4.0 * heads * seq * keys * head_dim
    curve_s: float = flash_attention_s(
        flops, heads=heads, seq=seq, keys=keys, head_dim=head_dim, curve=curve, chip=chip
    )
    return tflops * 1e12 / flops * curve_s


def hopper_kernels(
    compute: Compute, curve_kernel: FlashKernel, flash1: FlashSpeed
) -> dict[FlashKernel, FlashSpeed]:
    """Returns the speeds of published kernels relative to the kernel of a Hopper device's curves.

    They are medians over head_dim 64 and 128 and 2k to 16k tokens.
    """
    chip = LENDERS[PUBLISHED_GPU]

    def median(
        bars: Mapping[int, tuple[int, ...]], curve: FlashCurve, work: float, causal: bool
    ) -> float:
        speeds: list[float] = []
        for head_dim, bar in bars.items():
            for seq, tflops in zip(PUBLISHED_SEQS, bar, strict=True):
                if seq >= COMPARED_SEQ:
                    heads = PUBLISHED_TOKENS // seq * PUBLISHED_HIDDEN // head_dim
                    shape = (heads, seq, head_dim)
                    speeds.append(_relative(tflops, curve, chip, work, shape, causal))
        return float(np.median(speeds))

    def forward(bars: Mapping[int, tuple[int, ...]]) -> float:
        return median(bars, compute.flash_forward, 1.0, causal=True)

    def backward(bars: Mapping[int, tuple[int, ...]]) -> float:
        return median(bars, compute.flash_backward, FLASH_BACKWARD_FLOPS, causal=False)

    speeds = {
        kernel: FlashSpeed(
            forward=rounded(forward(PUBLISHED_FORWARD[kernel])),
            backward=rounded(backward(PUBLISHED_BACKWARD[kernel])),
            source=PUBLISHED,
        )
        for kernel in PUBLISHED_FORWARD
        if kernel is not curve_kernel
    }
    flash2 = speeds.get(FlashKernel.FLASH2, FlashSpeed(forward=1.0, backward=1.0, source=PUBLISHED))
    slower = FlashSpeed(
        forward=rounded(flash1.forward * flash2.forward),
        backward=rounded(flash1.backward * flash2.backward),
        source=f"as much slower than flash2 as on A100 ({flash1.source})",
    )
    return {FlashKernel.FLASH1: slower, **speeds}


def flash1_speed(compute: Compute, chip: Chip) -> FlashSpeed:
    """Returns the speed of FlashAttention 1 relative to the FlashAttention 2 of A100's curves."""
    ahead, back = compute.flash_forward, compute.flash_backward
    forward, backward = [], []
    for seq, (forward_tflops, backward_tflops) in FLASH1_TFLOPS.items():
        shape = (FLASH1_BATCH * FLASH1_HEADS, seq, FLASH1_HEAD_DIM)
        forward.append(_relative(forward_tflops, ahead, chip, 1.0, shape, True))
        backward.append(_relative(backward_tflops, back, chip, FLASH_BACKWARD_FLOPS, shape, True))
    return FlashSpeed(
        forward=rounded(float(np.median(forward))),
        backward=rounded(float(np.median(backward))),
        source=FLASH1_SOURCE,
    )


def blackwell_flash2(compute: Compute, chip: Chip) -> FlashSpeed:
    """Returns the speed of FlashAttention 2 relative to the kernels of a Blackwell device's curves.

    It runs Ampere's instructions there, so that it is no faster than on Hopper.
    """
    ahead, back = compute.flash_forward, compute.flash_backward
    forward, backward = [], []
    for seq, tflops in BLACKWELL_FORWARD.items():
        shape = (BLACKWELL_FORWARD_HEADS, seq, BLACKWELL_FORWARD_HEAD_DIM)
        forward.append(_relative(tflops, ahead, chip, 1.0, shape, False))
    for seq, tflops in BLACKWELL_BACKWARD.items():
        heads = PUBLISHED_TOKENS // seq * BLACKWELL_BACKWARD_HEADS
        shape = (heads, seq, BLACKWELL_BACKWARD_HEAD_DIM)
        backward.append(_relative(tflops, back, chip, FLASH_BACKWARD_FLOPS, shape, False))
    return FlashSpeed(
        forward=rounded(float(np.median(forward))),
        backward=rounded(float(np.median(backward))),
        source=BLACKWELL_FLASH2_SOURCE,
    )
