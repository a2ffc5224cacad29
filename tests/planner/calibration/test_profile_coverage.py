"""Coverage tells the measured kernels of a plan, and how to measure the missing ones."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest
from rich.console import Console

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.calibration.profile_cases import ProfiledWorkload, cases_of
from parplan.planner.calibration.profile_coverage import coverage, missing_cases
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.plan_file import read_plan, write_plan
from parplan.profiles.machines.machine_catalog import (
    load_cluster,
    load_stack,
    with_gpus,
)
from parplan.profiles.machines.measurements import Case, CaseFigures, CaseOutcome, Record, Timing
from parplan.profiles.machines.shipped_profiles import analytic_profile
from parplan.profiles.machines.speeds import InStep, Profile
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import Precision, TrainingSpec
from parplan.profiles.profiler.communication.comm_cases import TIMED
from parplan.profiles.profiler.fits.profile_fit import fit_compute
from parplan.profiles.provenance import Kind
from parplan.report.plans.summary import print_summary
from parplan.report.plans.summary_context import SummaryContext
from tests.helpers.planning import estimate_plan

CPU = load_cluster("cpu")
TINY = load_model("gpt-tiny")
TRAINING = TrainingSpec(
    global_batch_size=16,
    seq_length=64,
    precision=Precision.FP32,
    stack=replace(load_stack("parplan"), fused_accumulation=True),
)


def profile_of(cases) -> Profile:
    """Returns a profile that measured these cases, at made-up times."""
    records = [
        Record(
            case=case,
            outcome=CaseOutcome.MEASURED,
            measured=CaseFigures(
                times={
                    timed_pass.name: Timing(
                        median_us=5 + math.prod(timed_pass.sizes) / 1000, spread=0.0, repeats=5
                    )
                    for timed_pass in case.passes
                    if timed_pass.curve
                }
            ),
        )
        for case in cases
        if case.work not in TIMED
    ]
    return replace(analytic_profile("cpu"), compute=fit_compute(records, CPU, Precision.FP32))


def plan_of(
    profile: Profile | None,
    *,
    pp: int = 1,
    dp: int = 1,
    tp: int = 1,
    micro_batch_size: int = 16,
    training=TRAINING,
    model=TINY.spec,
) -> Plan:
    mesh = Mesh(pp=pp, dp=dp, tp=tp)
    layout = ParallelLayout(
        mesh=mesh,
        schedule=Schedule.ONE_F_ONE_B,
        virtual_stages=1,
        micro_batch_size=micro_batch_size,
        num_micro_batches=16 // (dp * micro_batch_size),
        sequence_parallel=False,
    )
    cluster = replace(with_gpus(CPU, mesh.num_ranks), profile=profile)
    return estimate_plan(
        model, cluster, training, layout, zero=1 if dp > 1 else 0, recompute=Recompute.NONE
    )


def works(cases) -> set[str]:
    return {case.work for case in cases}


ALL = cases_of([ProfiledWorkload(model=TINY.spec, training=TRAINING)], CPU)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{}, {"tp": 2}], ids=["one", "tp2"])
def test_every_operator_of_a_plan_at_measured_sizes_is_measured(mesh):
    covered = coverage(plan_of(profile_of(ALL), **mesh))

    kinds = {
        case: kind
        for case, kind in covered.cases
        if case.work not in (*TIMED, "adamw", "gradient_norm")
    }
    assert set(kinds.values()) == {Kind.MEASURED}
    assert set(kinds) <= set(ALL) | {
        case
        for case in kinds
        if {timed_pass.sizes for timed_pass in case.passes}
        <= {timed_pass.sizes for measured_case in ALL for timed_pass in measured_case.passes}
    }
    assert covered.beyond == ()


def test_a_plan_between_measured_sizes_is_interpolated_and_misses_nothing():
    covered = coverage(plan_of(profile_of(ALL), micro_batch_size=4))

    kinds = {kind for case, kind in covered.cases if case.work == "linear"}
    assert kinds == {Kind.INTERPOLATED}
    assert covered.missing == ()


@pytest.mark.slow
def test_what_is_missing_is_what_was_left_out_and_measuring_it_leaves_nothing():
    left_out = [case for case in ALL if case.work not in ("linear", "adamw", "gelu")]
    plan = plan_of(profile_of(left_out))

    missing = missing_cases(plan)

    assert works(missing) == {"linear", "adamw", "gelu"}
    assert {case.key for case in missing if case.work == "linear"} == {
        "linear m=1024 n=192 k=64 bias=1 fp32",
        "linear m=1024 n=64 k=64 bias=1 fp32",
        "linear m=1024 n=256 k=64 bias=1 fp32",
        "linear m=1024 n=64 k=256 bias=1 fp32",
        "linear m=1024 n=512 k=64 bias=0 fp32",
    }
    assert missing_cases(plan, profile_of([*left_out, *missing])) == ()


def test_without_a_measured_norm_of_the_gradients_nothing_is_missed_for_it_costs_nothing():
    plan = plan_of(profile_of([case for case in ALL if case.work != "gradient_norm"]))

    assert "gradient_norm" not in {case.work for case, _ in coverage(plan).cases}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        # gradients in fp32 of a block (49,984 parameters) and of the embedding (512 + 128 rows of
        # 64), and the same gathered; too little to matter: those of the head's norm (128)
        pytest.param(
            {"dp": 2, "micro_batch_size": 8},
            {
                f"{work} bytes={4 * count} nodes=1 ranks_per_node=2 groups=1 fp32"
                for work in ("all_gather", "reduce_scatter")
                for count in (49984, 40960)
            },
            id="dp2",
            marks=pytest.mark.slow,
        ),
        # what ends the products of 16 sequences of 64 tokens, 64 wide, and per token the loss's
        # sums
        pytest.param(
            {"tp": 2},
            {
                f"all_reduce bytes={4 * count} nodes=1 ranks_per_node=2 groups=1 fp32"
                for count in (16 * 64 * 64, 16 * 64)
            },
            id="tp2",
        ),
        pytest.param(
            {"pp": 2, "micro_batch_size": 1},
            {f"point_to_point bytes={4 * 64 * 64} nodes=1 ranks_per_node=2 groups=1 fp32"},
            id="pp2",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_messages_are_missing_by_the_shape_of_their_group(mesh, expected):
    missing = missing_cases(plan_of(profile_of(ALL), **mesh))

    assert {case.key for case in missing if case.work in TIMED} == expected
    assert not works(missing_cases(plan_of(profile_of(ALL), **mesh), messages=False)) & set(TIMED)


def test_a_group_across_nodes_is_missing_as_it_shares_the_nics():
    whole = replace(CPU, gpus_per_node=2, nodes=2, profile=profile_of(ALL))
    layout = ParallelLayout(
        mesh=Mesh(pp=1, dp=2, tp=2),
        schedule=Schedule.ONE_F_ONE_B,
        virtual_stages=1,
        micro_batch_size=8,
        num_micro_batches=1,
        sequence_parallel=False,
    )

    missing = missing_cases(estimate_plan(TINY.spec, whole, TRAINING, layout, zero=0))

    shapes = {
        (case.work, *(case.size(name) for name in ("nodes", "ranks_per_node", "groups")))
        for case in missing
        if case.work in TIMED
    }
    assert shapes == {("all_reduce", 1, 2, 1), ("all_reduce", 2, 1, 2)}


def test_what_no_case_measures_is_named():
    covered = coverage(plan_of(profile_of(ALL), model=load_model("mixtral-tiny").spec))

    assert set(covered.beyond) >= {"dispatch", "combine"}


def printed(plan: Plan, **context) -> str:
    out = io.StringIO()
    print_summary(plan, Console(file=out, width=160), SummaryContext(whole=True, **context))
    return out.getvalue()


@pytest.mark.slow
def test_the_summary_says_how_much_was_measured_and_how_to_measure_the_rest(tmp_path):
    plan = plan_of(profile_of([case for case in ALL if case.work != "linear"]))

    text = printed(plan, profile="mine.yaml", plan_file="plan.yaml")

    row = next(line for line in text.splitlines() if line.startswith("  profile"))
    covered = coverage(plan)
    counts = [covered.count(kind, of_ranks=False) for kind in Kind]
    assert row.split(maxsplit=4)[:4] == ["profile", "mine.yaml", "of", "cpu"]
    assert row.split("of cpu")[1].strip() == f"{counts[0]} shapes measured, {counts[2]} analytic"
    assert counts[2] == 5
    assert "measure what is analytic: plan profile -o mine.yaml --missing plan.yaml" in text
    assert "of this plan's kind: stack parplan 0, chip another chip 0" in text
    assert "--comm" not in text
    write_plan(plan, tmp_path / "plan.yaml")
    assert f"{counts[0]} shapes measured" in printed(read_plan(tmp_path / "plan.yaml"))


@pytest.mark.slow
def test_messages_that_were_not_measured_have_a_command_of_their_own():
    inside = printed(
        plan_of(profile_of(ALL), dp=2, micro_batch_size=8),
        profile="mine.yaml",
        plan_file="plan.yaml",
    )
    across = plan_of(profile_of(ALL), dp=2, micro_batch_size=8)
    across = replace(across, cluster=replace(across.cluster, nodes=2, gpus_per_node=1))

    assert "; 4 sizes of messages analytic" in inside
    assert "measure what is analytic: plan profile -o mine.yaml --comm" in inside
    assert "--missing" not in inside
    assert (
        "-o mine.yaml --add COMM, "
        "of torchrun --nnodes 2 ... -m parplan.profiles.profile_comm -o COMM"
    ) in printed(across, profile="mine.yaml")


@pytest.mark.slow
def test_the_summary_says_nothing_of_it_without_a_profile():
    plan = plan_of(None)

    assert coverage(plan) is None
    assert works(missing_cases(plan)) == works(ALL) - {
        "launch",
        "allocator",
        "device_copy",
        "block",
        "layouts",
        "gradient_norm",
    }
    assert missing_cases(plan, profile_of(ALL)) == ()
    assert "profile" not in printed(plan, profile="", plan_file="plan.yaml")


def test_a_step_of_measured_kernels_is_no_measured_step():
    profile = replace(
        profile_of(ALL),
        in_step=InStep(
            stack="nemo",
            kernel_slowdown=1.1,
            forward_s=0.0,
            backward_s=0.0,
            host_adds=False,
            source="made up",
        ),
    )
    training = replace(TRAINING, stack=replace(TRAINING.stack, host_operator_s=0.0))
    plan = plan_of(profile, training=training)

    assert plan.predicted.breakdown.compute_s.kind is Kind.MEASURED
    assert plan.predicted.step_time_s.kind is Kind.INTERPOLATED
    assert "whole blocks were measured as nemo runs them, what a step adds is parplan's" in printed(
        plan
    )


def test_cases_that_are_missing_are_cases_that_a_profiler_takes():
    for case in missing_cases(plan_of(profile_of([]), tp=2)):
        assert isinstance(case, Case)
        assert case.precision == "fp32"
        assert all(timed_pass.curve and timed_pass.sizes for timed_pass in case.passes)
