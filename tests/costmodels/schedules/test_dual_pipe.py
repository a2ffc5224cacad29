"""DualPipeV: torch's lists, the stashes and the bubble that its makers state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.memory.rank_memory import peak_stash_counts
from parplan.costmodels.schedules.actions import ActionKind, check_rows
from parplan.costmodels.schedules.dual_pipe import dual_pipe_list
from parplan.costmodels.schedules.schedule import (
    Schedule,
    csv_rows,
    in_flight,
    legal,
    rank_of,
    stages_of,
)
from parplan.costmodels.strategy import ParallelLayout
from tests.costmodels.schedules.test_zero_bubble import stage
from tests.helpers.simulated_steps import simulate

COUNTS = [(2, 4), (2, 5), (2, 9), (3, 6), (3, 11), (4, 8), (4, 9), (5, 10), (8, 16), (8, 40)]
PARTS = [(1.0, 1.0, 1.0), (1.0, 1.5, 0.5), (2.0, 2.0, 1.0), (1.0, 2.0, 1.0), (3.0, 1.0, 1.0)]
STASHES = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1, ActionKind.WEIGHT_GRADIENT: -1}
WAITS = {ActionKind.INPUT_GRADIENT: 1, ActionKind.WEIGHT_GRADIENT: -1}


def idle_s(p: int, m: int, parts: tuple[float, float, float], schedule: Schedule) -> float:
    """Seconds that a rank idles in a step of equal stages."""
    return simulate(schedule, m, [[stage(*parts)] * 2] * p).step_s - 2 * m * sum(parts)


def test_the_stages_fold_into_a_v():
    assert [stages_of(Schedule.DUALPIPEV, rank, 3, 2) for rank in range(3)] == [
        (0, 5),
        (1, 4),
        (2, 3),
    ]
    assert [rank_of(Schedule.DUALPIPEV, k, 3) for k in range(6)] == [0, 1, 2, 2, 1, 0]


def torch_actions(action: Any) -> Iterator[str]:
    """Yields the passes of torch's action, of which two may overlap."""
    for each in action.sub_actions or (action,):
        yield str(each)


@pytest.mark.parametrize(("p", "m"), COUNTS)
def test_the_lists_are_those_of_torch(p, m):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    theirs = SimpleNamespace(pp_group_size=p, num_stages=2 * p, _n_microbatches=m)

    rows = csv_rows(Schedule.DUALPIPEV, p, m, 2)

    for rank, row in enumerate(rows):
        of_rank = schedules.ScheduleDualPipeV._calculate_single_rank_operations(theirs, rank)
        passes = [text for action in of_rank if action for text in torch_actions(action)]
        assert row.split(",") == passes


@pytest.mark.parametrize(("p", "m"), COUNTS)
def test_no_rank_waits_for_ever_and_every_pass_runs_once(p, m):
    check_rows(csv_rows(Schedule.DUALPIPEV, p, m, 2), p, 2, m)
    for rank in range(p):
        works = Counter(action.work for action in dual_pipe_list(rank, p, m))
        assert works[ActionKind.FORWARD] == 2 * m
        assert works[ActionKind.BACKWARD] + works[ActionKind.INPUT_GRADIENT] == 2 * m
        assert works[ActionKind.INPUT_GRADIENT] == works[ActionKind.WEIGHT_GRADIENT]


@pytest.mark.parametrize(("p", "m"), COUNTS)
def test_a_rank_holds_one_chunk_stash_more_than_there_are_stages(p, m):
    for rank in range(p):
        order = dual_pipe_list(rank, p, m)
        held = list(accumulate(STASHES.get(action.work, 0) for action in order))
        waiting = list(accumulate(WAITS.get(action.work, 0) for action in order))
        layout = ParallelLayout(
            mesh=Mesh(pp=p, dp=1, tp=1),
            schedule=Schedule.DUALPIPEV,
            virtual_stages=2,
            micro_batch_size=1,
            num_micro_batches=m,
            sequence_parallel=False,
        )
        counts = peak_stash_counts(rank, layout)

        assert max(held) == 2 * p + 1 == in_flight(Schedule.DUALPIPEV, rank, p, m, 2)
        assert max(counts)[0] == 2 * p + 1
        for moment in zip(held, waiting, strict=True):  # some count has as much of both
            assert any(most >= moment[0] and waits >= moment[1] for most, waits in counts)
        assert set(counts) <= set(zip(held, waiting, strict=True))


def test_the_stage_with_the_head_holds_one_stash():
    for p, m in COUNTS:
        order = (action for action in dual_pipe_list(0, p, m) if action.chunk == 1)
        assert max(accumulate(STASHES.get(action.work, 0) for action in order)) == 1


@pytest.mark.parametrize(("p", "m"), COUNTS)
@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_a_rank_idles_no_longer_than_its_makers_say_and_than_under_zbv(p, m, parts):
    forward_s, input_s, weight_s = parts
    backward_s = input_s + weight_s

    idle = idle_s(p, m, parts, Schedule.DUALPIPEV)

    # README of deepseek-ai/DualPipe, where a forward and a backward are one pass: F&B = F + B
    assert idle <= (p - 1) * (forward_s + 2 * backward_s - 3 * weight_s) + 1e-9
    assert idle <= idle_s(p, m, parts, Schedule.ZBV) + 1e-9


@pytest.mark.parametrize(("p", "m"), COUNTS)
def test_equal_parts_leave_a_bubble_of_one_part_a_rank(p, m):
    assert idle_s(p, m, (1.0, 1.0, 1.0), Schedule.DUALPIPEV) == pytest.approx(p - 1)


@pytest.mark.parametrize(
    ("p", "m", "v", "reason"),
    [
        (1, 4, 2, "dualpipev needs at least 2 pipeline ranks, found 1"),
        (4, 8, 1, "dualpipev has 2 virtual stages per rank, found 1"),
        (4, 7, 2, "dualpipev on 4 pipeline ranks needs at least 8 micro-batches, found 7"),
        (4, 8, 2, None),
    ],
)
def test_dualpipev_is_legal_with_two_chunks_on_two_ranks_and_enough_micro_batches(p, m, v, reason):
    assert legal(Schedule.DUALPIPEV, p, m, v) == reason
