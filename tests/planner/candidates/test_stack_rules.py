"""The search keeps to a stack's schedules and recompute; errors name the stacks that fit a pin."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from parplan.commands.options.option_values import MESH_ORDERS
from parplan.costmodels.communication.mesh import Mesh, MeshOrder
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.candidates.never_searched import unsearched_parts
from parplan.planner.request import Constraints
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.machine_catalog import (
    load_cluster,
    load_stack,
    stack_names,
    with_gpus,
)
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.stack import EVERY_RECOMPUTE, EVERY_SCHEDULE, NEUTRAL, MeshOrderName
from tests.helpers.cases import mostly_slow
from tests.helpers.planning import enumerate_candidates, estimate_plan, find_plan

MODEL, CLUSTER = load_model("gpt-tiny").spec, with_gpus(load_cluster("a100-80gb"), 4)
TRAINING = TrainingSpec(global_batch_size=16, seq_length=64, stack=NEUTRAL)
PINS = Constraints(pp=(2,), tp=(1,), micro_batch_size=(1,))


def of(name, **changes):
    return replace(TRAINING, stack=replace(load_stack(name), **changes))


def searched(name, **pins):
    return {
        layout.schedule
        for layout in enumerate_candidates(MODEL, CLUSTER, of(name), replace(PINS, **pins)).layouts
    }


def test_the_names_that_a_stack_may_use_are_those_of_the_planner():
    assert tuple(schedule.value for schedule in Schedule) == EVERY_SCHEDULE
    assert (*(level.value for level in Recompute), "operators") == EVERY_RECOMPUTE
    assert tuple(order.value for order in MeshOrder) == get_args(MeshOrderName) == MESH_ORDERS


@pytest.mark.parametrize(
    "name",
    mostly_slow(stack_names(), {"megatron-core"}),
)
def test_every_packaged_stack_is_planned_with_tensor_parallelism(name):
    """Some stacks save more tensors of a micro-batch of several sequences."""
    pins = Constraints(pp=(1,), tp=(2,), micro_batch_size=(1, 2, 4))

    plan = find_plan(MODEL, CLUSTER, of(name), constraints=pins)

    assert plan.mesh.tp == 2


@pytest.mark.parametrize("name", stack_names())
def test_every_packaged_stack_can_leave_recompute_away_and_only_the_executors_runs_merak_s(name):
    stack = load_stack(name)

    assert "none" in stack.recompute
    assert ("scp" in stack.schedules) is (name == "parplan")


def test_a_search_has_the_schedules_of_the_stack_alone():
    assert searched("megatron-core") == {Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED}
    assert searched("torchtitan") == {Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED, Schedule.ZBV}
    assert searched("parplan") == {
        Schedule.ONE_F_ONE_B,
        Schedule.INTERLEAVED,
        Schedule.ZBV,
        Schedule.EARLY_RECOMPUTE,
        Schedule.SCP,
    }
    assert searched("fsdp1", pp=None) == {Schedule.ONE_F_ONE_B}  # without a pipeline


def test_what_a_stack_does_not_run_is_pruned_with_that_reason():
    reasons = {
        pruned.reason
        for pruned in enumerate_candidates(MODEL, CLUSTER, of("megatron-core"), PINS).pruned
    }

    assert {"megatron-core does not run zbv", "megatron-core does not run scp"} <= reasons


def test_a_stack_with_1f1b_alone_runs_a_pipeline_that_does_not_fill_as_gpipe_orders_it():
    few = replace(TRAINING, global_batch_size=2)

    def schedules(stack):
        return {
            layout.schedule
            for layout in enumerate_candidates(
                MODEL, CLUSTER, replace(few, stack=stack), PINS
            ).layouts
        }

    assert Schedule.GPIPE in schedules(load_stack("megatron-core"))
    assert not schedules(load_stack("fsdp1"))  # it has no pipeline at all


def test_gpipe_of_enough_micro_batches_is_not_1f1b():
    layouts = enumerate_candidates(
        MODEL, CLUSTER, of("nanotron"), replace(PINS, schedule=(Schedule.GPIPE,))
    ).layouts

    assert {layout.schedule for layout in layouts} == {Schedule.GPIPE}
    with pytest.raises(
        ConfigError, match="--schedule gpipe: the stack megatron-core does not run it"
    ):
        enumerate_candidates(
            MODEL, CLUSTER, of("megatron-core"), replace(PINS, schedule=(Schedule.GPIPE,))
        )


@pytest.mark.parametrize(
    ("pins", "message", "stacks"),
    [
        (
            {"schedule": (Schedule.ONE_F_ONE_B, Schedule.ZBV)},
            "--schedule zbv: the stack megatron-core does",
            ("parplan", "torchtitan"),
        ),
        (
            {"schedule": (Schedule.SCP,)},
            "--schedule scp: the stack megatron-core does",
            ("parplan",),
        ),
    ],
)
def test_a_pinned_schedule_that_the_stack_lacks_is_an_error_that_names_the_stacks_that_have_it(
    pins, message, stacks
):
    with pytest.raises(ConfigError, match=message) as error:
        find_plan(MODEL, CLUSTER, of("megatron-core"), constraints=replace(PINS, **pins))

    assert error.value.hint == f"choose a --stack that does: {', '.join(stacks)}"


def test_an_estimate_keeps_to_the_stack_too():
    layout = ParallelLayout(
        mesh=Mesh(pp=2, dp=2, tp=1),
        schedule=Schedule.ZBV,
        virtual_stages=2,
        micro_batch_size=1,
        num_micro_batches=8,
        sequence_parallel=False,
    )

    with pytest.raises(
        ConfigError,
        match="--schedule zbv: the stack nemo does not run it, it runs 1f1b, interleaved",
    ):
        estimate_plan(MODEL, CLUSTER, of("nemo"), layout)
    with pytest.raises(
        ConfigError,
        match="--recompute selective: the stack nanotron does not run it, it runs none, full",
    ):
        estimate_plan(
            MODEL,
            CLUSTER,
            of("nanotron"),
            replace(layout, schedule=Schedule.ONE_F_ONE_B, virtual_stages=1),
            recompute=Recompute.SELECTIVE,
        )
    assert estimate_plan(MODEL, CLUSTER, of("torchtitan"), layout).pipeline.schedule is Schedule.ZBV


def test_prices_of_layers_have_the_recompute_of_the_stack_alone():
    def allowed(name, **pins):
        return Constraints(**pins).resolved(load_stack(name)).recompute

    assert allowed("parplan") is None  # any list of operators
    assert allowed("megatron-core") == tuple(Recompute)
    assert allowed("nanotron") == (Recompute.NONE, Recompute.FULL)
    assert allowed("megatron-core", recompute=(Recompute.FULL,)) == (Recompute.FULL,)
    assert Constraints().resolved(NEUTRAL).recompute is None


def test_a_pinned_recompute_that_the_stack_lacks_is_an_error():
    with pytest.raises(ConfigError, match="--recompute selective: the stack nanotron"):
        enumerate_candidates(
            MODEL, CLUSTER, of("nanotron"), replace(PINS, recompute=(Recompute.SELECTIVE,))
        )


def test_bans_that_leave_nothing_of_the_recompute_of_a_stack_are_an_error():
    pins = Constraints(recompute=(Recompute.SELECTIVE,))

    with pytest.raises(ConfigError, match="leave nothing that the stack nanotron runs: none, full"):
        pins.resolved(load_stack("nanotron"))


def test_what_is_not_searched_says_that_a_stack_has_no_lists_of_operators():
    assert any(
        each.reason == "megatron-core runs none, selective, full"
        for each in unsearched_parts(PINS, load_stack("megatron-core"))
    )
    assert not any("operators" in each.what for each in unsearched_parts(PINS))


def test_a_stack_file_with_an_unknown_schedule_is_an_error(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nschedules: [1f1b, zb-h1]\n")

    with pytest.raises(ConfigError, match=r"schedules\.1"):
        load_stack(str(path))
