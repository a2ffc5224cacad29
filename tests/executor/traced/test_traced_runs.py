"""Traced modules run by their plan train as the user's code does in one process.

The plan cuts the code into stages.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch

from parplan.costmodels.communication.mesh import MeshOrder
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.schedules.schedule import Schedule
from parplan.executor.checking.parity import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    gradient_errors,
    loss_errors,
)
from parplan.executor.rules.traced_rules import validate_traced_plan
from parplan.executor.run_options import Options
from parplan.executor.traced.program_cut import check_recompute, cut_program
from parplan.executor.traced.stage_values import open_module
from parplan.executor.traced.traced_parity import run_traced_plans, run_traced_reference
from parplan.executor.traced.traced_trainer import open_plan_module
from parplan.planner.plan.pipeline_plan import LayerRange
from parplan.planner.plan.plan_file import any_plan_from_document, plan_to_document
from parplan.planner.plan.traced_plan import ShardStage, TracedPlan
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.module_source import ModuleSource
from parplan.profiles.models.spec import Optimizer
from parplan.profiles.tracing.program import PARAMETER
from parplan.profiles.tracing.record import record
from tests.helpers.cases import mostly_slow
from tests.helpers.traced_modules import HUGGING_FACE
from tests.helpers.traced_plans import hand_plan

MODULES = "tests.helpers.traced_modules"


def check(plan: TracedPlan) -> None:
    (actual,), expected = run_traced_plans([plan]), run_traced_reference(plan, by_micro_batch=True)

    assert actual.agree
    assert max(loss_errors(actual, expected)) <= LOSS_TOLERANCE
    assert max(gradient_errors(actual, expected).values()) <= GRADIENT_TOLERANCE / 10
    assert actual.norms == pytest.approx(expected.norms, rel=1e-5)
    assert all(predicted == measured for predicted, measured in actual.states.values())


@pytest.mark.multiproc
def test_skip_connections_go_through_virtual_stages_and_come_back():
    check(
        hand_plan(
            f"{MODULES}:unet", pp=2, virtual_stages=2, schedule=Schedule.INTERLEAVED, recompute=True
        )
    )


@pytest.mark.multiproc
@pytest.mark.parametrize(
    "sizes", [(3, 1, 1, 3), pytest.param((1, 2, 4, 1), marks=pytest.mark.slow)]
)
def test_parts_of_unequal_size_train_as_in_one_process(sizes):
    plan = hand_plan(
        f"{MODULES}:unet", pp=2, virtual_stages=2, schedule=Schedule.INTERLEAVED, zero=0
    )
    ranges = pairwise(accumulate(sizes, initial=0))
    stages = tuple(
        replace(stage, layers=(LayerRange(first=first, last=end - 1),), recompute=(first,))
        for stage, (first, end) in zip(plan.stages, ranges, strict=True)
    )

    check(replace(plan, stages=stages))


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_table_that_three_shards_read_has_one_gradient_on_two_stages():
    check(hand_plan(f"{MODULES}:translator", pp=2, shards_a_stage=2))


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize(
    "optimizer",
    mostly_slow([Optimizer.SGD, Optimizer.SGD_MOMENTUM], {Optimizer.SGD_MOMENTUM}),
)
def test_a_traced_module_trains_with_sgd(optimizer):
    plan = hand_plan(f"{MODULES}:translator", pp=2, zero=0, shards_a_stage=2)

    check(replace(plan, training=replace(plan.training, optimizer=optimizer)))


@pytest.mark.slow
@pytest.mark.multiproc
def test_states_on_the_host_and_recompute_lists_leave_the_results_as_they_are():
    on_host = {"zero": 3, "lists": True, "offload": (Offload.STATES,)}
    check(hand_plan(f"{MODULES}:translator", pp=2, shards_a_stage=2, **on_host))


@pytest.mark.slow
@pytest.mark.multiproc
def test_recompute_lists_run_in_a_pipeline_with_zero_3():
    check(hand_plan(HUGGING_FACE["bert"], pp=2, dp=2, zero=3, lists=True))


@pytest.mark.slow
@pytest.mark.multiproc
def test_stages_that_are_nearer_than_copies_train_as_in_one_process():
    plan = hand_plan(f"{MODULES}:translator", pp=2, dp=2, zero=1, shards_a_stage=2)

    check(replace(plan, mesh=replace(plan.mesh, order=MeshOrder.DP_PP_TP)))


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("module", "options"),
    [
        pytest.param(
            HUGGING_FACE["vit"],
            {"pp": 2, "recompute": True, "lists": True, "schedule": Schedule.EARLY_RECOMPUTE},
            id="lists-ahead",
        ),
        pytest.param(
            f"{MODULES}:unet",
            {"pp": 2, "virtual_stages": 2, "schedule": Schedule.INTERLEAVED, "lists": True},
            id="lists-interleaved",
        ),
        pytest.param(HUGGING_FACE["t5"], {"pp": 2, "dp": 2, "zero": 3, "recompute": True}, id="t5"),
        pytest.param(HUGGING_FACE["bert"], {"pp": 4}, id="bert"),
        pytest.param(HUGGING_FACE["albert"], {"pp": 2, "dp": 2, "zero": 1}, id="albert"),
        pytest.param(
            HUGGING_FACE["vit"],
            {"pp": 4, "recompute": True, "schedule": Schedule.EARLY_RECOMPUTE},
            id="vit",
        ),
        pytest.param(f"{MODULES}:unet", {"pp": 2, "dp": 2, "zero": 3}, id="unet"),
        pytest.param(
            f"{MODULES}:shares",
            {"pp": 2, "virtual_stages": 2, "schedule": Schedule.INTERLEAVED, "dp": 2, "zero": 2},
            id="shares",
        ),
        pytest.param(
            f"{MODULES}:in_place", {"pp": 2, "dp": 2, "zero": 1, "shards_a_stage": 1}, id="in-place"
        ),
        *(
            pytest.param(
                f"{MODULES}:shares",
                {"pp": 2, "dp": 2, "zero": zero, "recompute": True, "offload": (Offload.STATES,)},
                id=f"states on the host, zero {zero}",
            )
            for zero in range(4)
        ),
    ],
)
def test_modules_train_as_in_one_process(module, options):
    check(hand_plan(module, **options))


@pytest.mark.slow
@pytest.mark.multiproc
def test_batch_norms_train_as_in_one_process():
    """The step is that of SGD. Before a norm, gradient entries cancel to rounding errors.

    Adam divides each entry by its own size, so that its second step depends on those errors.
    """
    plan = hand_plan(f"{MODULES}:resnet", pp=2, dp=2, micro_batch_size=2)

    check(replace(plan, training=replace(plan.training, optimizer=Optimizer.SGD_MOMENTUM)))


@pytest.fixture(scope="module")
def plan() -> TracedPlan:
    return hand_plan(f"{MODULES}:translator", pp=2, shards_a_stage=2)


def test_stages_hand_on_values_with_gradients_and_hold_what_they_read(plan):
    program = record(open_plan_module(plan, 0).workload, 1)

    first, last = cut_program(plan, program)

    assert first.receives == last.sends == ()
    assert first.sends == last.receives
    assert all(node.meta["val"].requires_grad for node in first.sends)
    assert {*first.parameters, *last.parameters} == {
        node.target
        for node in program.graph.nodes
        if node.op == "get_attr" and node.meta["origin"] == PARAMETER
    }
    assert "table.weight" in {*first.parameters} & {*last.parameters}


def test_a_plan_of_another_trace_is_refused(plan):
    program = record(open_plan_module(plan, 0).workload, 1)
    second = replace(
        plan, shards=(replace(plan.shards[0], starts="something else"), *plan.shards[1:])
    )

    with pytest.raises(ConfigError, match="in this trace, the plan has something else"):
        cut_program(second, program)


def test_a_shard_that_writes_into_its_input_is_not_run_again():
    plan = hand_plan(f"{MODULES}:in_place", pp=1, shards_a_stage=2)
    program = record(open_plan_module(plan, 0).workload, 1)
    target = next(i for i, call in enumerate(program.calls) if call.meta["written"] and i)
    shards = (
        replace(plan.shards[0], end=target),
        replace(plan.shards[1], first=target, starts=program.calls[target].meta["name"]),
    )
    (stage,) = cut_program(replace(plan, shards=shards), program)

    with pytest.raises(ConfigError, match="writes into its input"):
        check_recompute(stage.shards[1], shards[1])


@pytest.mark.parametrize(
    ("change", "actual"),
    [
        pytest.param(
            {"mesh": {"tp": 2}, "cluster": {"nodes": 2}},
            "how the operators of a traced module are divided",
            id="tp",
        ),
        pytest.param({"training": {"global_batch_size": 5}}, "global_batch_size is 5", id="batch"),
        pytest.param(
            {"pipeline": {"schedule": "interleaved", "virtual_stages": 2}},
            "there are 2, pp 2 x virtual_stages 2 are 4",
            id="ranks",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused_when_it_is_read(plan, change, actual):
    body = plan_to_document(plan)
    changed = {key: {**body[key], **values} for key, values in change.items()}

    with pytest.raises(ConfigError, match=actual):
        any_plan_from_document({**body, **changed}, "plan")


@pytest.mark.parametrize(
    ("schedule", "actions", "ranks", "actual"),
    [
        pytest.param(Schedule.ZBV, (), (0, 1, 1, 0), "splits backward passes", id="zbv"),
        pytest.param(
            Schedule.CUSTOM,
            ("0F0,0I0,0W0", "1F0,1I0,1W0"),
            (0, 1),
            "splits backward passes",
            id="split",
        ),
        pytest.param(
            Schedule.CUSTOM,
            ("1F0,1B0", "0F0,0B0"),
            (1, 0),
            "2 on ranks 1, 0; .* virtual stages has them on 0, 1",
            id="ranks",
        ),
    ],
)
def test_what_cannot_run_is_refused(plan, schedule, actions, ranks, actual):
    size = len(plan.shards) // len(ranks)
    stages = tuple(
        ShardStage(rank=rank, layers=(LayerRange(first=k * size, last=(k + 1) * size - 1),), zero=0)
        for k, rank in enumerate(ranks)
    )
    pipeline = replace(
        plan.pipeline,
        schedule=schedule,
        virtual_stages=len(ranks) // 2,
        actions=tuple(map(_of_all_micro_batches, actions)),
    )
    whole = any_plan_from_document(
        plan_to_document(replace(plan, pipeline=pipeline, stages=stages)), "plan"
    )

    with pytest.raises(ConfigError, match=actual):
        validate_traced_plan(whole)


def _of_all_micro_batches(first: str) -> str:
    """The actions of micro-batch 0, and then the same of the others."""
    return ",".join(first.replace("0,", f"{n},")[:-1] + str(n) for n in range(4))


def test_data_of_a_file_is_refused(plan, tmp_path):
    with pytest.raises(ConfigError, match="draws its own batches"):
        validate_traced_plan(plan, Options(data=tmp_path / "tokens.bin"))


def test_a_parameter_has_one_value_in_every_process_and_none_of_the_others_memory():
    opened = [
        open_module(
            ModuleSource(factory=f"{MODULES}:shares"), seq_length=8, seed=3, at_least_bytes=0
        )
        for _ in range(2)
    ]

    assert all(parameter.is_meta for parameter in opened[0].workload.module.parameters())
    assert torch.equal(*(each.value("head.weight") for each in opened))
    assert opened[0].note is None
