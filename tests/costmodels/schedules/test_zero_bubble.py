"""ZBV: the properties of the papers, and torch's own list replayed in the same simulator."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from types import SimpleNamespace

import pytest

from parplan.costmodels.schedules.actions import Action, ActionKind, check_rows, orders_of
from parplan.costmodels.schedules.schedule import (
    Schedule,
    csv_rows,
    in_flight,
    legal,
    rank_of,
    stages_of,
)
from parplan.costmodels.schedules.simulator import StageCost
from parplan.costmodels.schedules.zero_bubble import zbv_lists
from tests.helpers.simulated_steps import replay, simulate

COUNTS = [
    (2, 1),
    (2, 2),
    (2, 3),
    (2, 8),
    (3, 4),
    (3, 5),
    (4, 2),
    (4, 6),
    (4, 7),
    (4, 16),
    (5, 3),
    (7, 20),
]
STEP = {ActionKind.FORWARD: 1, ActionKind.INPUT_GRADIENT: 0, ActionKind.WEIGHT_GRADIENT: -1}
WAITS = {ActionKind.FORWARD: 0, ActionKind.INPUT_GRADIENT: 1, ActionKind.WEIGHT_GRADIENT: -1}


def stage(forward_s: float = 1.0, input_s: float = 1.0, weight_s: float = 1.0) -> StageCost:
    return StageCost(
        forward_s=forward_s,
        backward_s=input_s + weight_s,
        recompute_s=0.0,
        receive_forward_s=0.0,
        receive_backward_s=0.0,
        stash_bytes=1.0,
        weight_s=weight_s,
    )


def step_s(p: int, m: int, cost: StageCost) -> float:
    return simulate(Schedule.ZBV, m, [[cost] * 2] * p).step_s


def test_the_stages_fold_into_a_v():
    assert [stages_of(Schedule.ZBV, rank, 3, 2) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert [rank_of(Schedule.ZBV, k, 3) for k in range(6)] == [0, 1, 2, 2, 1, 0]


def test_a_small_list_worked_by_hand():
    # one micro-batch goes down and up; with two stashes and a weight gradient that waits rank 1 has
    # no room for another to wait
    assert csv_rows(Schedule.ZBV, 2, 1, 2) == ("0F0,3F0,3I0,3W0,0I0,0W0", "1F0,2F0,2I0,2W0,1I0,1W0")


@pytest.mark.parametrize(("p", "m"), COUNTS)
def test_each_micro_batch_has_three_passes_through_each_chunk(p, m):
    for order in zbv_lists(p, m):
        works = (ActionKind.FORWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)
        assert Counter(order) == Counter(
            Action(work, c, i) for work in works for c in range(2) for i in range(m)
        )
    check_rows(csv_rows(Schedule.ZBV, p, m, 2), p, 2, m)


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in COUNTS if m >= 2 * p - 1])
def test_equal_parts_leave_a_bubble_of_one_part_a_rank(p, m):
    assert step_s(p, m, stage()) == 6 * m + p - 1


def test_more_ranks_do_not_change_what_a_micro_batch_more_takes():
    uneven = stage(1.0, 1.4, 0.6)

    assert step_s(4, 17, uneven) - step_s(4, 16, uneven) == pytest.approx(6.0)


@pytest.mark.parametrize(("p", "m"), COUNTS)
def test_in_flight_is_a_count_of_the_list_and_with_what_waits_never_more_than_one_more(p, m):
    for rank, order in enumerate(zbv_lists(p, m)):
        held = list(accumulate(STEP[action.work] for action in order))
        waiting = list(accumulate(WAITS[action.work] for action in order))

        assert max(held) == in_flight(Schedule.ZBV, rank, p, m, 2)
        assert max(map(sum, zip(held, waiting, strict=True))) <= max(held) + 1


@pytest.mark.parametrize(("p", "m"), COUNTS)
def test_the_stage_with_the_head_holds_one_stash(p, m):
    held = accumulate(STEP[action.work] for action in zbv_lists(p, m)[0] if action.chunk == 1)

    assert max(held) == 1


@pytest.mark.parametrize(
    ("p", "m", "v", "reason"),
    [
        (1, 4, 2, "zbv needs at least 2 pipeline ranks, found 1"),
        (4, 4, 1, "zbv has 2 virtual stages per rank, found 1"),
        (4, 4, 3, "zbv has 2 virtual stages per rank, found 3"),
        (4, 1, 2, None),
    ],
)
def test_zbv_is_legal_with_two_chunks_on_two_ranks_or_more(p, m, v, reason):
    assert legal(Schedule.ZBV, p, m, v) == reason


def torch_rows(p: int, m: int) -> tuple[str, ...]:
    """Rows of the schedule that torch makes; an entry is empty where a rank waits."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    schedule_of_torch = SimpleNamespace(pp_group_size=p, num_stages=2 * p, _n_microbatches=m)
    lists = [
        schedules.ScheduleZBVZeroBubble._calculate_single_rank_operations(schedule_of_torch, rank)
        for rank in range(p)
    ]
    return tuple(
        ",".join(str(action) for action in actions if action is not None) for actions in lists
    )


@pytest.mark.parametrize(("p", "m"), COUNTS)
def test_the_step_is_no_longer_than_that_of_torchs_list(p, m):
    rows = torch_rows(p, m)
    check_rows(rows, p, 2, m)
    placement = [stages_of(Schedule.ZBV, rank, p, 2) for rank in range(p)]

    theirs = replay(orders_of(rows), m, [[stage()] * 2] * p, placement=placement)

    assert step_s(p, m, stage()) <= theirs.step_s
    if m >= 2 * p - 1:
        assert [rank.in_flight for rank in theirs.ranks] == [
            in_flight(Schedule.ZBV, rank, p, m, 2) for rank in range(p)
        ]


@pytest.mark.parametrize(("p", "m"), COUNTS)
def test_torchs_own_validation_accepts_the_list(p, m):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    rows = csv_rows(Schedule.ZBV, p, m, 2)
    lists = {
        rank: [schedules._Action.from_str(text) for text in row.split(",")]
        for rank, row in enumerate(rows)
    }

    homes = schedules._validate_schedule(lists, p, 2 * p, m)
    completed = schedules._add_send_recv(lists, lambda k: homes[k], 2 * p)

    assert homes == {k: rank_of(Schedule.ZBV, k, p) for k in range(2 * p)}
    assert sum(map(len, completed.values())) >= 6 * m * p
