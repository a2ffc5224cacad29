"""One submodule under several names trains as in one process in every mesh, or is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest

from parplan.costmodels.host.offload import Offload
from parplan.costmodels.schedules.schedule import Schedule
from parplan.executor.traced.program_cut import StageCut, cut_program
from parplan.executor.traced.traced_trainer import open_plan_module
from parplan.planner.plan.pipeline_plan import LayerRange
from parplan.planner.plan.traced_plan import TracedPlan
from parplan.profiles.errors import ConfigError
from parplan.profiles.tracing.record import record
from tests.helpers.like_one_process import check_to_1e_6
from tests.helpers.traced_plans import hand_plan

# An attribute that is also the first and the last of a list; it is called under all three names.
LISTED = "tests.helpers.zoo:attribute_and_list"
INTERLEAVED = {"virtual_stages": 2, "schedule": Schedule.INTERLEAVED, "shards_a_stage": 1}


def cut(plan: TracedPlan) -> tuple[StageCut, ...]:
    size = plan.pipeline.micro_batch_size
    return cut_program(plan, record(open_plan_module(plan, 0).workload, size))


def staged(plan: TracedPlan, sizes: tuple[int, ...]) -> TracedPlan:
    """The plan with `sizes[k]` of its shards on stage k."""
    ranges = pairwise(accumulate(sizes, initial=0))
    stages = tuple(
        replace(stage, layers=(LayerRange(first=first, last=end - 1),))
        for stage, (first, end) in zip(plan.stages, ranges, strict=True)
    )
    return replace(plan, stages=stages)


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("sizes", "holders"), [pytest.param((1, 5), 2, id="two"), pytest.param((5, 1), 1, id="one")]
)
def test_names_on_one_stage_or_on_two_train_as_in_one_process(sizes, holders):
    plan = staged(hand_plan(LISTED, pp=2, shards_a_stage=3, micro_batch_size=2), sizes)

    assert sum("shared.weight" in stage.parameters for stage in cut(plan)) == holders
    check_to_1e_6(plan)


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("sizes", [(1, 5), (5, 1)], ids=["two-stages", "one-stage"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"dp": 2, "zero": 1}, id="pp-zero-1"),
        pytest.param({"dp": 2, "zero": 3}, id="pp-zero-3"),
        pytest.param({"tp": 2}, id="tp-pp"),
        pytest.param({"tp": 2, "dp": 2, "zero": 3}, id="tp-pp-zero-3"),
    ],
)
def test_names_on_one_stage_or_on_two_train_with_other_axes(sizes, options):
    check_to_1e_6(
        staged(hand_plan(LISTED, pp=2, shards_a_stage=3, micro_batch_size=2, **options), sizes)
    )


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize(
    "options",
    [
        *(pytest.param({"dp": 2, "zero": zero}, id=f"zero-{zero}") for zero in (1, 3)),
        pytest.param({"tp": 2}, id="tp"),
        pytest.param({"tp": 2, "dp": 2, "zero": 3}, id="tp-zero-3"),
        pytest.param({"pp": 4, "shards_a_stage": 1}, id="pp-4"),
        pytest.param({"pp": 2, **INTERLEAVED}, id="interleaved"),
        pytest.param({"pp": 2, "recompute": True, "lists": True}, id="recompute"),
        pytest.param({"pp": 2, "offload": (Offload.STATES,)}, id="states-on-the-host"),
    ],
)
@pytest.mark.parametrize("name", ["attribute_and_list", "same_layer_four_times"])
def test_one_submodule_under_several_names_trains_in_every_mesh(name, options):
    check_to_1e_6(hand_plan(f"tests.helpers.zoo:{name}", micro_batch_size=2, **options))


def test_a_norm_that_counts_under_two_names_is_refused_on_two_stages():
    module = "tests.helpers.zoo:same_norm_twice"
    plan = hand_plan(module, pp=2, shards_a_stage=1, micro_batch_size=2)
    program = record(open_plan_module(plan, 0).workload, 2)
    end = next(k for k, call in enumerate(program.calls) if call.meta["name"] == "module.2.linear")
    first, last = plan.shards
    last = replace(last, first=end, starts="module.2.linear")
    between = replace(plan, shards=(replace(first, end=end), last))

    with pytest.raises(ConfigError, match="which another stage counts in") as error:
        cut(between)
    assert error.value.hint == "make the plan again: no stage may end between the two"


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"dp": 2, "zero": 1}, id="zero-1"),
        pytest.param({"dp": 2, "zero": 3}, id="zero-3"),
        pytest.param({"pp": 2, "dp": 2, "zero": 2}, id="pp-zero-2"),
    ],
)
def test_fused_matrices_under_two_names_train_with_zero_and_tp(options):
    module = "tests.helpers.divided_modules:woven"
    check_to_1e_6(hand_plan(module, tp=2, micro_batch_size=2, num_micro_batches=2, **options))
