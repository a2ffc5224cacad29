"""The fit recovers the in-step costs that synthetic blocks were made with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.planner.calibration.in_step import BLOCK, block_model, equations, in_step_of
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack
from parplan.profiles.machines.measurements import (
    Case,
    CaseFigures,
    CaseOutcome,
    CasePass,
    Record,
    Timing,
)
from parplan.profiles.machines.shipped_profiles import analytic_profile
from parplan.profiles.models.spec import Precision
from parplan.profiles.units import US_PER_S

CLUSTER = load_cluster("cpu")
STACK = load_stack("parplan")
PROFILE = analytic_profile("cpu")
NAMES = (
    "hidden",
    "heads",
    "kv_heads",
    "head_dim",
    "ffn",
    "gated",
    "rms",
    "rotary",
    "dropout",
    "batch",
    "seq",
)
TINY, SMALL = (64, 4, 4, 16, 256, 0, 0, 0, 0, 2, 32), (256, 4, 4, 64, 1024, 0, 0, 0, 1, 4, 64)
LARGE = (768, 12, 12, 64, 3072, 0, 0, 0, 0, 4, 256)
ON_GPU = (4096, 32, 32, 128, 16384, 0, 0, 0, 0, 4, 2048)  # large for one


def case(sizes) -> Case:
    passes = (CasePass(name="forward"), CasePass(name="backward"))
    return Case(
        work=BLOCK, sizes=tuple(zip(NAMES, sizes, strict=True)), precision="fp32", passes=passes
    )


def record(sizes, forward_s: float, backward_s: float) -> Record:
    seconds = {"forward": forward_s, "backward": backward_s}
    times = {
        name: Timing(median_us=taken_s * US_PER_S, spread=0.0, repeats=5)
        for name, taken_s in seconds.items()
    }
    return Record(case=case(sizes), outcome=CaseOutcome.MEASURED, measured=CaseFigures(times=times))


def blocks(shapes, made) -> list[Record]:
    """Returns records of blocks whose passes take `made(alone_s, launches, backward)`."""
    records = [record(sizes, 1.0, 1.0) for sizes in shapes]
    lines = list(equations(records, PROFILE, CLUSTER, Precision.FP32, STACK))
    seconds = [made(line.alone_s, line.launches, line.backward) for line in lines]
    return [record(sizes, *seconds[2 * i : 2 * i + 2]) for i, sizes in enumerate(shapes)]


def test_host_time_that_adds_is_told_from_slower_kernels():
    in_step = in_step_of(
        blocks(
            (TINY, SMALL, LARGE),
            lambda alone_s, launches, backward: (
                1.1 * alone_s + launches * (9e-6 if backward else 30e-6)
            ),
        ),
        PROFILE,
        CLUSTER,
        Precision.FP32,
        STACK,
        host_adds=True,
    )

    assert in_step.kernel_slowdown == pytest.approx(1.1, rel=0.02)
    assert in_step.forward_s == pytest.approx(30e-6, rel=0.05)
    assert in_step.backward_s == pytest.approx(9e-6, rel=0.25)
    assert (in_step.stack, in_step.host_adds) == ("parplan", True)


def test_host_time_that_bounds_is_read_off_the_blocks_that_wait_for_it():
    gpu, profile = load_cluster("a100-80gb"), analytic_profile("a100-80gb")

    def of(shapes, forward_s=1.0, backward_s=1.0):
        return [
            replace(
                record(sizes, forward_s, backward_s), case=replace(case(sizes), precision="bf16")
            )
            for sizes in shapes
        ]

    alone = list(equations(of((TINY, ON_GPU)), profile, gpu, Precision.BF16, STACK))
    host_s = 3 * max(
        line.alone_s / line.launches for line in alone[:2]
    )  # a tiny block takes its launches, a large one its kernels
    assert 2 * host_s < min(line.alone_s / line.launches for line in alone[2:])
    seconds = [max(1.2 * line.alone_s, line.launches * host_s) for line in alone]

    in_step = in_step_of(
        [*of((TINY,), *seconds[:2]), *of((ON_GPU,), *seconds[2:])],
        profile,
        gpu,
        Precision.BF16,
        STACK,
        host_adds=False,
    )

    assert (in_step.forward_s, in_step.backward_s) == (
        pytest.approx(host_s, rel=1e-3),
        pytest.approx(host_s, rel=1e-3),
    )
    assert in_step.kernel_slowdown == pytest.approx(1.2, rel=1e-3)


def test_one_size_of_block_gives_a_factor_and_no_host_time():
    in_step = in_step_of(
        blocks((LARGE,), lambda alone_s, launches, backward: 1.3 * alone_s),
        PROFILE,
        CLUSTER,
        Precision.FP32,
        STACK,
        host_adds=True,
    )

    assert (in_step.forward_s, in_step.backward_s) == (0.0, 0.0)
    assert in_step.kernel_slowdown == pytest.approx(1.3, rel=0.02)


def test_host_time_is_never_negative():
    in_step = in_step_of(
        blocks(
            (TINY, LARGE),
            lambda alone_s, launches, backward: (
                (0.7 if launches and alone_s < 1e-3 else 1.0) * alone_s
            ),
        ),
        PROFILE,
        CLUSTER,
        Precision.FP32,
        STACK,
        host_adds=True,
    )

    assert min(in_step.forward_s, in_step.backward_s) >= 0


def test_without_blocks_there_is_nothing_to_say():
    failed = replace(record(TINY, 1.0, 1.0), outcome=CaseOutcome.HUNG, measured=None)

    assert in_step_of([failed], PROFILE, CLUSTER, Precision.FP32, STACK, host_adds=True) is None


def test_a_block_is_the_one_that_its_case_says():
    model, batch, seq = block_model(case((128, 8, 2, 16, 512, 1, 1, 1, 0, 3, 32)))

    assert (model.hidden_size, model.num_heads, model.num_kv_heads, model.ffn_hidden_size) == (
        128,
        8,
        2,
        512,
    )
    assert (str(model.norm), str(model.positions)) == ("rms_norm", "rotary")
    assert (model.gated_ffn, model.linear_bias, model.dropout) == (True, False, 0.0)
    assert (batch, seq) == (3, 32)


def layout(sizes, **figures: float) -> Record:
    measured = CaseFigures(figures=figures)
    return Record(
        case=replace(case(sizes), work="layouts", passes=()),
        outcome=CaseOutcome.MEASURED,
        measured=measured,
    )


def test_what_layouts_add_is_a_launchs_or_a_line_over_the_layers_bytes():
    num_bytes = [4 * (12 * hidden**2 + 13 * hidden) for hidden in (64, 768)]
    reduced_s = 2e-3 + 1e-9 * (num_bytes[1] - num_bytes[0])
    in_step = in_step_of(
        [
            *blocks((TINY, LARGE), lambda alone_s, launches, backward: alone_s),
            layout(
                TINY,
                split_backward_s=14e-4,
                staged_action_s=15e-5,
                divided_forward_s=20e-4,
                sharded_forward_s=1e-3,
                sharded_reduce_s=2e-3,
            ),
            layout(
                LARGE,
                split_backward_s=9e-3,
                divided_forward_s=10e-4,
                sharded_forward_s=1e-3,
                sharded_reduce_s=reduced_s,
            ),
        ],
        PROFILE,
        CLUSTER,
        Precision.FP32,
        STACK,
        host_adds=True,
    )

    assert in_step.split_s == pytest.approx(
        14e-4 / 14, rel=1e-3
    )  # 10 operators, 4 of them products with two gradients
    assert in_step.divided_forward_s == pytest.approx(20e-4 / 10, rel=1e-3)
    assert in_step.gather.seconds(1e9) == pytest.approx(1e-3)
    assert in_step.reduce.seconds(num_bytes[1]) == pytest.approx(reduced_s, rel=1e-3)
    assert in_step.divided_backward_s == 0.0
    assert in_step.action_s == 15e-5


def test_on_a_device_that_the_host_feeds_layouts_add_nothing():
    in_step = in_step_of(
        [
            *blocks((TINY, LARGE), lambda alone_s, launches, backward: alone_s),
            layout(TINY, split_backward_s=14e-4),
        ],
        PROFILE,
        CLUSTER,
        Precision.FP32,
        STACK,
        host_adds=False,
    )

    assert in_step.split_s == 0.0


def test_kernels_are_never_faster_in_a_layer_than_alone():
    in_step = in_step_of(
        blocks((TINY, LARGE), lambda alone_s, launches, backward: 0.8 * alone_s),
        PROFILE,
        CLUSTER,
        Precision.FP32,
        STACK,
        host_adds=True,
    )

    assert (in_step.kernel_slowdown, in_step.forward_s, in_step.backward_s) == (1.0, 0.0, 0.0)
