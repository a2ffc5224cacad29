"""Merak's schedules against EQUATIONS P: the orders, what they hold, and the step of equal stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate, pairwise

import pytest

from costmodels.actions import Action, Work, check, orders_of
from costmodels.schedules import AHEAD, Schedule, actions, csv_rows, in_flight, legal
from profiles.errors import ConfigError

ONE_F_ONE_B, EARLY, LAST, SCP = Schedule.ONE_F_ONE_B, Schedule.EARLY_RECOMPUTE, Schedule.LAST_NO_RECOMPUTE, Schedule.SCP
CHANGE = {Work.FORWARD: 1, Work.RECOMPUTE: 0, Work.BACKWARD: -1}


def counts(schedule: Schedule) -> list[tuple[int, int]]:
    """Ranks and micro-batches that the schedule has lists for."""
    return [(p, m) for p in range(2, 9) for m in (*range(1, 10), 20) if legal(schedule, p, m, 1) is None]


def ranks(schedule: Schedule) -> Iterator[tuple[int, int, int]]:
    yield from ((p, m, rank) for p, m in counts(schedule) for rank in range(p))


def shown(schedule: Schedule, rank: int, p: int, m: int) -> str:
    return " ".join(f"{action.work}{action.micro_batch}" for action in actions(schedule, rank, p, m))


@pytest.mark.parametrize(("schedule", "rank", "expected"), [
    pytest.param(EARLY, 0, "F0 F1 F2 F3 B0 F4 B1 R2 B2 R3 B3 R4 B4", id="early-first"),
    pytest.param(EARLY, 2, "F0 F1 B0 F2 B1 F3 B2 F4 B3 R4 B4", id="early-last-but-one"),
    pytest.param(EARLY, 3, "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4", id="early-last-never-waits"),
    pytest.param(LAST, 1, "F0 F1 F2 B0 F3 B1 F4 B2 R3 B3 R4 B4", id="last-no-recompute-as-early"),
    pytest.param(LAST, 2, "F0 F1 R0 B0 F2 B1 F3 B2 F4 B3 B4", id="last-no-recompute-last-but-one"),
    pytest.param(SCP, 0, "F0 F1 F2 F3 B0 F4 B1 R2 B2 R3 B3 R4 B4", id="scp-before-the-shift"),
    pytest.param(SCP, 1, "F0 F1 F2 R0 B0 F3 B1 F4 B2 R3 B3 R4 B4", id="scp-last-but-two"),
    pytest.param(SCP, 2, "F0 F1 F2 R0 B0 R1 B1 F3 B2 F4 B3 B4", id="scp-last-but-one"),
    pytest.param(SCP, 3, "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4", id="scp-last"),
])
def test_the_orders_are_those_of_merak(schedule, rank, expected):
    assert shown(schedule, rank, 4, 5) == expected


@pytest.mark.parametrize("schedule", sorted(AHEAD))
def test_without_the_recomputes_the_lists_are_those_of_1f1b_and_scp_moves_one_forward(schedule):
    for p, m, rank in ranks(schedule):
        rest = [action for action in actions(schedule, rank, p, m) if action.work is not Work.RECOMPUTE]
        plain = list(actions(ONE_F_ONE_B, rank, p, m))
        if schedule is SCP and rank == p - 2:
            plain[2:4] = plain[3:1:-1]
        assert rest == plain


@pytest.mark.parametrize("schedule", sorted(AHEAD))
def test_the_lists_can_be_run_and_are_read_back_from_their_text(schedule):
    for p, m in counts(schedule):
        rows = csv_rows(schedule, p, m)

        check(rows, p, 1, m)
        assert orders_of(rows) == tuple(actions(schedule, rank, p, m) for rank in range(p))


@pytest.mark.parametrize("schedule", sorted(AHEAD))
def test_in_flight_equals_a_count_of_the_list(schedule):
    for p, m, rank in ranks(schedule):
        assert in_flight(schedule, rank, p, m) == max(accumulate(CHANGE[action.work] for action in actions(schedule, rank, p, m)))


@pytest.mark.parametrize("schedule", sorted(AHEAD))
def test_each_recompute_is_just_before_its_backward_and_the_last_stage_has_none(schedule):
    for p, m, rank in ranks(schedule):
        order = actions(schedule, rank, p, m)
        for action, after in pairwise(order):
            if action.work is Work.RECOMPUTE:
                assert after == Action(Work.BACKWARD, action.chunk, action.micro_batch)
        assert Counter(action.work for action in order)[Work.RECOMPUTE] <= (0 if rank == p - 1 else p)


@pytest.mark.parametrize(("schedule", "p", "m", "v", "reason"), [
    pytest.param(EARLY, 1, 8, 1, "early-recompute needs at least 2 pipeline ranks, found 1", id="one-rank"),
    pytest.param(LAST, 2, 8, 2, "last-no-recompute has 1 virtual stage per rank, found 2", id="virtual-stages"),
    pytest.param(SCP, 2, 3, 1, "scp on 2 pipeline ranks needs at least 4 micro-batches, found 3", id="scp-four-micro-batches"),
    pytest.param(SCP, 6, 5, 1, "scp on 6 pipeline ranks needs at least 6 micro-batches, found 5", id="scp-fills-the-pipeline"),
])
def test_counts_that_a_schedule_does_not_have_are_refused(schedule, p, m, v, reason):
    assert legal(schedule, p, m, v) == reason
    with pytest.raises(ConfigError, match=reason):
        csv_rows(schedule, p, m, v)


@pytest.mark.parametrize(("rows", "message"), [
    pytest.param(("0F0,0B0,0R0", "1F0,1B0"), "0R0 comes after FB of", id="recompute-after-the-backward"),
    pytest.param(("0F0,0R0,0I0,0W0", "1F0,1B0"), "0I0 comes after FR of .* it must be F B, F R B or F I W", id="split"),
    pytest.param(("0F0,0R0", "1F0,1B0"), "have FR, not F B, F R B or F I W", id="no-backward"),
    pytest.param(("0F0,0R0,0R0,0B0", "1F0,1B0"), "0R0 comes after FR of", id="twice"),
])
def test_a_recompute_in_the_wrong_place_is_refused(rows, message):
    with pytest.raises(ConfigError, match=message):
        check(rows, 2, 1, 1)


def test_a_recompute_waits_for_no_other_stage():
    check(("0F0,0R0,0B0", "1F0,1R0,1B0"), 2, 1, 1)
