"""Plans whose chunks are gathered and reduced one after the other, by their owners."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.chunks.chunk_operations import ChunkAction
from parplan.costmodels.host.state_location import ChunkCommunication
from parplan.executor.traced.traced_parity import run_traced_plans
from parplan.planner.plan.plan_chunks import rank_chunks_of
from parplan.planner.plan.plan_file import plan_from_document, plan_to_document
from parplan.planner.traced.traced_chunks import chunk_schedules, in_smallest_budget
from parplan.profiles.models.spec import Precision
from tests.executor.chunks.test_chunk_plans import MIXED, at, require_all, require_close
from tests.executor.traced.test_traced_chunks import made
from tests.helpers.chunked_runs import chunked_plan, run, smallest
from tests.helpers.executor_plans import LLAMA

SINGLE = replace(MIXED, communication=ChunkCommunication.SINGLE)
CASES = {
    "accumulating": {"dp": 2, "num_micro_batches": 4},
    "one-micro-batch": {"dp": 2},
    "llama": {"dp": 2, "num_micro_batches": 2, "model": LLAMA},
    "in-parameters": {"dp": 2, "precision": Precision.BF16, "gradients": Precision.BF16},
    "bf16": {"dp": 2, "num_micro_batches": 2, "precision": Precision.BF16},
}
# gloo copies what it broadcasts, in a thread of its own
COPIED_BYTES = 64 * 1024


def require_like_groups(cases: dict[str, dict]) -> None:
    """Requires the gradients of plans whose groups are gathered at once, and predicted bytes."""
    plans = []
    for choices in cases.values():
        plans.append(at(smallest(MIXED, **choices), MIXED, **choices))
        plans.append(at(smallest(SINGLE, **choices), SINGLE, **choices))
    outcomes = run(plans)
    for group, single in zip(outcomes[::2], outcomes[1::2], strict=True):
        require_close(single, group)
        require_all(single, COPIED_BYTES)


@pytest.mark.slow
@pytest.mark.multiproc
def test_two_ranks_get_the_gradients_of_whole_groups_and_move_what_is_predicted():
    require_like_groups({name: CASES[name] for name in ("llama", "in-parameters")})


@pytest.mark.slow
@pytest.mark.multiproc
def test_two_ranks_in_every_case_get_the_gradients_of_whole_groups():
    require_like_groups(CASES)


@pytest.mark.slow
@pytest.mark.multiproc
def test_four_ranks_get_the_gradients_of_whole_groups():
    require_like_groups(
        {
            "data": {"dp": 4, "num_micro_batches": 2},
            "data-and-pipeline": {"dp": 2, "pp": 2, "num_micro_batches": 4},
            "data-and-tensor": {"dp": 2, "tp": 2, "sp": True, "num_micro_batches": 2},
        }
    )


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_traced_module_trains_alike():
    priced = made(dp=2, host=2, optimizer=1)
    chunks = replace(priced.plan.chunks, communication=ChunkCommunication.SINGLE)
    single = in_smallest_budget(
        replace(priced.plan, chunks=chunks), priced.price_cache.sharded.model
    )

    (group,) = run_traced_plans([priced.plan], chunk_schedules(priced))
    (alone,) = run_traced_plans([single.plan], chunk_schedules(single))

    assert single.plan.chunks.communication is ChunkCommunication.SINGLE
    assert alone.losses == pytest.approx(group.losses, rel=1e-6)
    assert alone.norms == pytest.approx(group.norms, rel=1e-5)
    assert all(moved.as_predicted for moved in alone.moved.values())


@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_need_one_buffer_instead_of_a_group_and_the_bytes_are_the_same(ranks):
    choices = {"dp": ranks, "num_micro_batches": 2}
    group, single = (
        rank_chunks_of(at(10**9, request, **choices), 0) for request in (MIXED, SINGLE)
    )

    assert single.groups == group.groups
    for does in (ChunkAction.GATHER, ChunkAction.REDUCE):
        assert single.moved(does) == group.moved(does)
    assert (single.in_bytes, single.out_bytes) == (group.in_bytes, group.out_bytes)
    assert smallest(SINGLE, **choices) <= smallest(MIXED, **choices)


def test_the_plan_file_keeps_it_and_the_step_takes_longer():
    group, single = (at(10**9, request, dp=2) for request in (MIXED, SINGLE))

    assert plan_from_document(plan_to_document(single), "plan").chunks == single.chunks
    assert single.chunks.communication is ChunkCommunication.SINGLE
    assert single.predicted.step_time_s.value > group.predicted.step_time_s.value


def test_one_rank_has_nothing_to_gather():
    group, single = (chunked_plan(replace(each, device_bytes=10**9)) for each in (MIXED, SINGLE))

    assert single.predicted == group.predicted
