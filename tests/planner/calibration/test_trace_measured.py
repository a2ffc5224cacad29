"""Traces become the same factors as runs, and tell more of them apart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.step import rank_time
from parplan.planner.calibration.group_causes import cause_of
from parplan.planner.calibration.priced_classes import priced_classes_s
from parplan.planner.calibration.run_factors import calibrate
from parplan.planner.calibration.trace_measured import measured_by_traces, traced_parts_s
from parplan.planner.plan.plan_strategy import prices_of_plan, strategy_of
from parplan.profiles.errors import ConfigError
from parplan.profiles.traces.kineto import read_kineto
from parplan.profiles.traces.trace_record import TracedCollective, WorkClass
from tests.helpers.kineto_traces import AUTOGRAD, Kernels, host, kineto_text, marked, one_step
from tests.helpers.synthetic_runs import estimated, factors


def traced(text: str):
    return read_kineto(text, "t.json", "f" * 16, "2020-01-01")


def test_every_moment_of_a_step_has_one_cause_by_hand():
    plan = estimated(tp=2, dp=2)

    account = measured_by_traces([traced(kineto_text(one_step()))], plan).accounts[0]

    assert {cause: round(seconds * 1e6) for cause, seconds in account.by_cause.items()} == {
        "forward": 300,  # 200 + a gap of 20 + 80
        "tensor": 50,  # 10 of its 60 run beside attention
        "backward": 250,
        "data": 100,  # 50 of its 150 run beside the product
        "optimizer": 100,  # a gap of 20 + 10 + 70
        "between steps": 200,
    }
    assert account.host_s == pytest.approx(240e-6)
    exposed = {key: round(one.exposed_s * 1e6) for key, one in account.collectives.items()}
    assert exposed == {("all_reduce", "tensor", 2): 50, ("reduce_scatter", "data", 2): 100}


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL], ids=str)
def test_the_priced_classes_of_kernels_add_up_to_the_compute_of_a_rank(recompute):
    plan = estimated(tp=2, dp=2, recompute=recompute)
    prices = prices_of_plan(plan)
    strategy = strategy_of(plan, prices)

    classes = priced_classes_s(strategy, 0, prices)

    time = rank_time(strategy, 0, prices)
    assert sum(classes.values()) == pytest.approx(
        time.compute.value_s + time.recompute.value_s + time.optimizer.value_s, rel=1e-3
    )
    assert max(classes, key=classes.__getitem__) is WorkClass.PRODUCTS
    assert set(classes) == set(WorkClass) - {WorkClass.COLLECTIVES, WorkClass.COPIES}


def trace_of(plan, truth, rank: int = 0):
    """A trace whose step takes what the plan is priced at on a machine of which `truth` holds."""
    there = replace(plan, cluster=replace(plan.cluster, calibration=factors(plan, **truth)))
    price_cache = prices_of_plan(there)
    parts = traced_parts_s(strategy_of(there, price_cache), price_cache)
    pp = plan.mesh.coordinates(rank)[0]
    us = {name: seconds * 1e6 for (name, stage), seconds in parts.items() if stage == pp}
    kernels, now = Kernels(), 0.0
    for name, launched, thread in (("forward", 1, 1), ("backward", 11, AUTOGRAD)):
        kernels.run("gemm", now, now + us[name], launched, thread)
        now += us[name]
    for name, ranks in (("tensor", (0, 1)), ("data", (0, 2))):
        if us[name]:
            kernels.collective("AllReduce", now, now + us[name], 12, ranks=ranks, thread=AUTOGRAD)
            now += us[name]
    kernels.run("adam", now, now + us["optimizer"], 30)
    events = [
        marked("ProfilerStep#1", 0, 50),
        host("autograd::engine::evaluate_function: X", 10, 20, AUTOGRAD),
        marked("Optimizer.step#AdamW.step", 25, 40),
    ]
    world_size = plan.mesh.num_ranks
    return traced(kineto_text([*events, *kernels.events], rank=rank, world_size=world_size))


@pytest.mark.slow
def test_one_trace_tells_tensor_parallel_communication_from_compute():
    plan = estimated(tp=2, dp=2)
    truth = {"forward": 1.3, "backward": 0.8, "tensor": 3.0, "data": 2.0, "optimizer": 2.5}

    profile = calibrate([measured_by_traces([trace_of(plan, truth)], plan).run])

    assert {cause: profile.calibration.factor(cause).value for cause in truth} == {
        cause: pytest.approx(value, rel=1e-3) for cause, value in truth.items()
    }
    assert profile.calibration.tensor.measured
    assert profile.calibration.tensor.source == f"kineto trace {'f' * 16} of 2023-11-14"
    assert profile.runs[0].calibrated_s == pytest.approx(profile.runs[0].measured_s, rel=1e-3)
    assert abs(profile.runs[0].priced_s / profile.runs[0].measured_s - 1) > 0.05


def test_ranks_of_a_pipeline_are_measured_each_as_its_stage():
    plan = estimated(pp=2)
    truth = {"forward": 1.3, "backward": 0.8, "optimizer": 2.0}

    traces = [trace_of(plan, truth, rank) for rank in (0, 1)]
    measured = measured_by_traces(traces, plan).run

    assert {stage for _, stage in measured.parts} == {0, 1}
    calibration = calibrate([measured]).calibration
    assert calibration.backward.value == pytest.approx(0.8, rel=1e-3)
    assert not calibration.pipeline.measured


def test_passes_that_a_trace_does_not_tell_apart_get_one_factor():
    plan = estimated()
    prices = prices_of_plan(plan)
    parts = traced_parts_s(strategy_of(plan, prices), prices)
    passes_us = 1.5e6 * (parts["forward", 0] + parts["backward", 0])
    kernels = Kernels()
    kernels.run("gemm", 0, passes_us, 1)
    kernels.run("adam", passes_us, passes_us + 1e6 * parts["optimizer", 0], 2)
    text = kineto_text([event for event in kernels.events if event["cat"] == "kernel"], 0, 1)

    calibration = calibrate([measured_by_traces([traced(text)], plan).run]).calibration

    assert calibration.forward.value == pytest.approx(1.5, rel=1e-4)
    assert calibration.backward.value == pytest.approx(1.5, rel=1e-4)


def test_a_trace_of_another_run_is_refused():
    with pytest.raises(ConfigError, match=r"a run of 4 ranks, the plan has 2 \(pp 1 x dp 2"):
        measured_by_traces([traced(kineto_text(one_step()))], estimated(dp=2))
    with pytest.raises(ConfigError, match=r"distributedInfo\.rank is None"):
        measured_by_traces(
            [traced(kineto_text(one_step(), distributedInfo={}))], estimated(pp=2, dp=2)
        )


@pytest.mark.parametrize(
    ("collective", "cause"),
    [
        (TracedCollective(operation="all_reduce", ranks=(0, 1)), "tensor"),
        (TracedCollective(operation="all_reduce", ranks=(0, 2)), "data"),
        (TracedCollective(operation="all_reduce", ranks=(0, 4)), "data"),  # a tied embedding
        (TracedCollective(operation="send", ranks=(0, 4)), "pipeline"),
        (TracedCollective(operation="send_recv"), "pipeline"),
        (TracedCollective(operation="all_gather", group="TENSOR_MODEL_PARALLEL_GROUP"), "tensor"),
        (TracedCollective(operation="all_gather", group="mesh_dp_shard"), "data"),
        (TracedCollective(operation="all_to_all", group_size=4), "tensor"),
    ],
)
def test_a_group_says_the_axis_of_its_collectives(collective, cause):
    assert cause_of(collective, estimated(pp=2, dp=2, tp=2).mesh) == cause


def test_a_group_that_says_nothing_is_that_of_the_one_axis_or_unknown():
    nameless = TracedCollective(operation="all_reduce", group_size=2)

    assert cause_of(nameless, estimated(tp=2).mesh) == "tensor"
    assert cause_of(nameless, estimated(dp=4, tp=2).mesh) == "tensor"
    assert cause_of(nameless, estimated(dp=2, tp=2).mesh) == "unknown axis"
