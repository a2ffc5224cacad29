"""Merak's schedules against EQUATIONS P4: orders, held micro-batches and steps of equal stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise
from random import Random

import pytest

from parplan.costmodels.schedules.actions import Action, ActionKind, check_rows, orders_of
from parplan.costmodels.schedules.schedule import (
    AHEAD,
    LAST_KEEPS_ALL,
    Schedule,
    actions,
    csv_rows,
    in_flight,
    legal,
    recomputed_step_s,
)
from parplan.costmodels.schedules.simulator import StageCost, least_step_s
from parplan.profiles.errors import ConfigError
from tests.helpers.simulated_steps import replay, simulate

ONE_F_ONE_B = Schedule.ONE_F_ONE_B
EARLY = Schedule.EARLY_RECOMPUTE
LAST = Schedule.LAST_NO_RECOMPUTE
SCP = Schedule.SCP
CHANGE = {ActionKind.FORWARD: 1, ActionKind.RECOMPUTE: 0, ActionKind.BACKWARD: -1}


def counts(schedule: Schedule) -> list[tuple[int, int]]:
    """Ranks and micro-batches that the schedule has lists for."""
    return [
        (p, m) for p in range(2, 9) for m in (*range(1, 10), 20) if legal(schedule, p, m, 1) is None
    ]


def ranks(schedule: Schedule) -> Iterator[tuple[int, int, int]]:
    yield from ((p, m, rank) for p, m in counts(schedule) for rank in range(p))


def shown(schedule: Schedule, rank: int, p: int, m: int) -> str:
    return " ".join(
        f"{action.work}{action.micro_batch}" for action in actions(schedule, rank, p, m)
    )


@pytest.mark.parametrize(
    ("schedule", "rank", "expected"),
    [
        pytest.param(EARLY, 0, "F0 F1 F2 F3 B0 F4 B1 R2 B2 R3 B3 R4 B4", id="early-first"),
        pytest.param(EARLY, 2, "F0 F1 B0 F2 B1 F3 B2 F4 B3 R4 B4", id="early-last-but-one"),
        pytest.param(EARLY, 3, "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4", id="early-last-never-waits"),
        pytest.param(
            LAST, 1, "F0 F1 F2 B0 F3 B1 F4 B2 R3 B3 R4 B4", id="last-no-recompute-as-early"
        ),
        pytest.param(
            LAST, 2, "F0 F1 R0 B0 F2 B1 F3 B2 F4 B3 B4", id="last-no-recompute-last-but-one"
        ),
        pytest.param(SCP, 0, "F0 F1 F2 F3 B0 F4 B1 R2 B2 R3 B3 R4 B4", id="scp-before-the-shift"),
        pytest.param(SCP, 1, "F0 F1 F2 R0 B0 F3 B1 F4 B2 R3 B3 R4 B4", id="scp-last-but-two"),
        pytest.param(SCP, 2, "F0 F1 F2 R0 B0 R1 B1 F3 B2 F4 B3 B4", id="scp-last-but-one"),
        pytest.param(SCP, 3, "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4", id="scp-last"),
    ],
)
def test_the_orders_are_those_of_merak(schedule, rank, expected):
    assert shown(schedule, rank, 4, 5) == expected


@pytest.mark.parametrize("schedule", sorted(AHEAD))
def test_without_the_recomputes_the_lists_are_those_of_1f1b_and_scp_moves_one_forward(schedule):
    for p, m, rank in ranks(schedule):
        rest = [
            action
            for action in actions(schedule, rank, p, m)
            if action.work is not ActionKind.RECOMPUTE
        ]
        plain = list(actions(ONE_F_ONE_B, rank, p, m))
        if schedule is SCP and rank == p - 2:
            plain[2:4] = plain[3:1:-1]
        assert rest == plain


@pytest.mark.parametrize("schedule", sorted(AHEAD))
def test_the_lists_can_be_run_and_are_read_back_from_their_text(schedule):
    for p, m in counts(schedule):
        rows = csv_rows(schedule, p, m)

        check_rows(rows, p, 1, m)
        assert orders_of(rows) == tuple(actions(schedule, rank, p, m) for rank in range(p))


@pytest.mark.parametrize("schedule", sorted(AHEAD))
def test_in_flight_equals_a_count_of_the_list(schedule):
    for p, m, rank in ranks(schedule):
        assert in_flight(schedule, rank, p, m) == max(
            accumulate(CHANGE[action.work] for action in actions(schedule, rank, p, m))
        )


@pytest.mark.parametrize("schedule", sorted(AHEAD))
def test_each_recompute_is_just_before_its_backward_and_the_last_stage_has_none(schedule):
    for p, m, rank in ranks(schedule):
        order = actions(schedule, rank, p, m)
        for action, after in pairwise(order):
            if action.work is ActionKind.RECOMPUTE:
                assert after == Action(ActionKind.BACKWARD, action.chunk, action.micro_batch)
        assert Counter(action.work for action in order)[ActionKind.RECOMPUTE] <= (
            0 if rank == p - 1 else p
        )


@pytest.mark.parametrize(
    ("schedule", "p", "m", "v", "reason"),
    [
        pytest.param(
            EARLY,
            1,
            8,
            1,
            "early-recompute needs at least 2 pipeline ranks, found 1",
            id="one-rank",
        ),
        pytest.param(
            LAST,
            2,
            8,
            2,
            "last-no-recompute has 1 virtual stage per rank, found 2",
            id="virtual-stages",
        ),
        pytest.param(
            SCP,
            2,
            3,
            1,
            "scp on 2 pipeline ranks needs at least 4 micro-batches, found 3",
            id="scp-four-micro-batches",
        ),
        pytest.param(
            SCP,
            6,
            5,
            1,
            "scp on 6 pipeline ranks needs at least 6 micro-batches, found 5",
            id="scp-fills-the-pipeline",
        ),
    ],
)
def test_counts_that_a_schedule_does_not_have_are_refused(schedule, p, m, v, reason):
    assert legal(schedule, p, m, v) == reason
    with pytest.raises(ConfigError, match=reason):
        csv_rows(schedule, p, m, v)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        pytest.param(
            ("0F0,0B0,0R0", "1F0,1B0"), "0R0 comes after FB of", id="recompute-after-the-backward"
        ),
        pytest.param(
            ("0F0,0R0,0I0,0W0", "1F0,1B0"),
            "0I0 comes after FR of .* it must be F B, F R B or F I W",
            id="split",
        ),
        pytest.param(("0F0,0R0", "1F0,1B0"), "have FR, not F B, F R B or F I W", id="no-backward"),
        pytest.param(("0F0,0R0,0R0,0B0", "1F0,1B0"), "0R0 comes after FR of", id="twice"),
    ],
)
def test_a_recompute_in_the_wrong_place_is_refused(rows, message):
    with pytest.raises(ConfigError, match=message):
        check_rows(rows, 2, 1, 1)


def stages(
    schedule: Schedule, p: int, f: float, b: float, r: float, receive_s: float = 0.0
) -> list[list[StageCost]]:
    """Equal stages, of which the last recomputes nothing where the schedule says so."""
    return [
        [
            StageCost(
                forward_s=f,
                backward_s=b,
                recompute_s=0.0 if schedule in LAST_KEEPS_ALL and s == p - 1 else r,
                stash_bytes=1.0,
                receive_forward_s=receive_s * (s > 0),
                receive_backward_s=receive_s * (s < p - 1),
            )
        ]
        for s in range(p)
    ]


def step_s(
    schedule: Schedule,
    p: int,
    m: int,
    f: float = 1.0,
    b: float = 2.0,
    r: float = 1.0,
    receive_s: float = 0.0,
) -> float:
    return simulate(schedule, m, stages(schedule, p, f, b, r, receive_s)).step_s


@pytest.mark.parametrize(
    ("p", "m", "expected"),
    [(4, 8, (44, 41, 39, 38)), (8, 16, (92, 85, 83, 82)), (8, 32, (156, 149, 147, 146))],
)
def test_the_published_table_comes_out_to_the_digit(p, m, expected):
    # EQUATIONS P4: F, B, R = 1, 2, 1; test_schedules.py has interleaved and no recompute
    assert tuple(step_s(schedule, p, m) for schedule in (ONE_F_ONE_B, EARLY, LAST, SCP)) == expected


@pytest.mark.parametrize("schedule", [ONE_F_ONE_B, *sorted(AHEAD)])
def test_the_closed_form_equals_the_simulation_exactly(schedule):
    # durations are multiples of a quarter, of which floats add up exactly
    draw = Random(7)
    for _ in range(400):
        p = draw.randint(2, 7)
        m = draw.randint(max(4, p), 3 * p + 4)
        r = draw.randint(0, 12) / 4
        f = r + draw.randint(0, 8) / 4
        b = f + draw.randint(0, 12) / 4
        assert step_s(schedule, p, m, f, b, r) == recomputed_step_s(schedule, p, m, f, b, r), (
            p,
            m,
            f,
            b,
            r,
        )


@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 8), (8, 16), (8, 32)])
@pytest.mark.parametrize("receive_s", [0.125, 0.5, 1.0])
def test_a_transfer_adds_the_same_to_all(p, m, receive_s):
    added = {
        step_s(schedule, p, m, receive_s=receive_s) - step_s(schedule, p, m)
        for schedule in (ONE_F_ONE_B, EARLY, LAST, SCP)
    }

    assert len(added) == 1
    assert added.pop() >= 2 * (p - 1) * receive_s


def test_without_recompute_all_are_1f1b():
    for schedule in AHEAD:
        assert step_s(schedule, 5, 9, 1.0, 1.75, 0.0, 0.25) == step_s(
            ONE_F_ONE_B, 5, 9, 1.0, 1.75, 0.0, 0.25
        )


def test_a_closed_form_outside_of_its_range_is_refused():
    with pytest.raises(ConfigError, match="closed form for backward >= forward >= recompute"):
        recomputed_step_s(SCP, 4, 8, 1.0, 2.0, 1.5)
    with pytest.raises(ConfigError, match="enough micro-batches"):
        recomputed_step_s(LAST, 2, 2, 1.0, 2.0, 1.0)


def test_a_gradient_is_received_while_its_recompute_runs():
    # F 0-1; on the next stage it is received 1-2, F 2-3, b 3-5; received 5-6 under what is left of
    # an R that began at 1, b 6-8
    def two(recompute_s: float) -> list[list[StageCost]]:
        plain = StageCost(
            forward_s=1.0,
            backward_s=2.0,
            recompute_s=recompute_s,
            receive_forward_s=0.0,
            receive_backward_s=1.0,
            stash_bytes=1.0,
        )
        return [
            [plain],
            [replace(plain, recompute_s=0.0, receive_forward_s=1.0, receive_backward_s=0.0)],
        ]

    def end_s(recompute_s: float) -> float:
        return replay(orders_of(("0F0,0R0,0B0", "1F0,1B0")), 1, two(recompute_s)).step_s

    assert [end_s(r) for r in (0.0, 0.5, 1.0, 5.0, 6.0)] == [8.0, 8.0, 8.0, 8.0, 9.0]


def by_definition_s(orders: Sequence[Sequence[Action]], costs: list[list[StageCost]]) -> float:
    """Seconds of the step of lists of one chunk a rank.

    Each action begins when the actions before it are over.
    """
    place = {
        (rank, action): n for rank, order in enumerate(orders) for n, action in enumerate(order)
    }

    @cache
    def end_s(rank: int, n: int) -> float:
        if n < 0:
            return 0.0
        action = orders[rank][n]
        cost = costs[rank][0]
        free_s = end_s(rank, n - 1)
        if action.work is ActionKind.RECOMPUTE:
            return free_s + cost.recompute_s
        second = rank - 1 if action.work is ActionKind.FORWARD else rank + 1
        sent_s = end_s(second, place[second, action]) if 0 <= second < len(orders) else 0.0
        if action.work is ActionKind.FORWARD:
            return max(free_s, sent_s) + cost.receive_forward_s + cost.forward_s
        ahead = place.get((rank, replace(action, work=ActionKind.RECOMPUTE)))
        if ahead is None:
            return (
                max(free_s, sent_s) + cost.receive_backward_s + cost.recompute_s + cost.backward_s
            )
        return (
            max(free_s, max(end_s(rank, ahead - 1), sent_s) + cost.receive_backward_s)
            + cost.backward_s
        )

    return max(end_s(rank, len(order) - 1) for rank, order in enumerate(orders))


@pytest.mark.parametrize("schedule", [ONE_F_ONE_B, *sorted(AHEAD)])
def test_unequal_stages_take_what_the_definition_says_and_no_less_than_the_bound(schedule):
    draw = Random(3)
    for _ in range(60):
        p = draw.randint(2, 5)
        m = draw.randint(max(4, p), 9)
        costs = [
            [
                StageCost(
                    forward_s=draw.randint(0, 9),
                    backward_s=draw.randint(0, 9),
                    recompute_s=draw.randint(0, 9),
                    stash_bytes=1.0,
                    receive_forward_s=draw.randint(0, 4),
                    receive_backward_s=draw.randint(0, 4),
                )
            ]
            for _ in range(p)
        ]
        step = simulate(schedule, m, costs)

        assert step.step_s == by_definition_s(
            [actions(schedule, rank, p, m) for rank in range(p)], costs
        )
        assert all(
            rank.busy_s + rank.transfer_s + rank.bubble_s == step.step_s for rank in step.ranks
        )
        assert least_step_s(m, costs, [0.0] * p, ahead=schedule in AHEAD) <= step.step_s


def test_a_recompute_waits_for_no_other_stage():
    check_rows(("0F0,0R0,0B0", "1F0,1R0,1B0"), 2, 1, 1)
