"""Recompute ahead of the gradient: the table of EQUATIONS P4 and the simulation, to the digit."""

from __future__ import annotations

import random

import pytest

from parplan.costmodels.schedules.hidden_recompute import (
    HiddenRecompute,
    hidden_passes,
    plain_and_ramp,
)
from parplan.costmodels.schedules.schedule import AHEAD, Schedule
from parplan.costmodels.schedules.simulator import StageCost
from parplan.costmodels.step import closed_form_s
from tests.helpers.simulated_steps import simulate

TABLE = [  # P, M, and the step of early recompute, last-no-recompute and SCP at F, B, R = 1, 2, 1
    (4, 8, (41, 39, 38)),
    (8, 16, (85, 83, 82)),
    (8, 32, (149, 147, 146)),
]


def closed(schedule, m, ranks):
    """`ranks`: forward, backward and recompute seconds of each."""
    pp = len(ranks)
    whole = [sum(rank) for rank in ranks]
    actual = [
        plain_and_ramp(schedule, rank, pp, whole[rank], r, b - f)
        for rank, (f, b, r) in enumerate(ranks)
    ]
    ahead = HiddenRecompute(
        hidden_passes(schedule), [plain for plain, _ in actual], [ramp for _, ramp in actual]
    )
    return closed_form_s(whole, [0.0] * pp, m, 1.0, ahead)


def simulated(schedule, m, ranks):
    costs = [
        [
            StageCost(
                forward_s=f,
                backward_s=b,
                recompute_s=r,
                receive_forward_s=0.0,
                receive_backward_s=0.0,
                stash_bytes=0.0,
            )
        ]
        for f, b, r in ranks
    ]
    return simulate(schedule, m, costs).step_s


def equal_ranks(schedule, pp, f, b, r):
    keeps = schedule is not Schedule.EARLY_RECOMPUTE
    return [(f, b, 0.0 if keeps and rank == pp - 1 else r) for rank in range(pp)]


@pytest.mark.parametrize(("pp", "m", "steps"), TABLE)
def test_the_table_of_the_schedules_is_reproduced(pp, m, steps):
    for schedule, step in zip(
        (Schedule.EARLY_RECOMPUTE, Schedule.LAST_NO_RECOMPUTE, Schedule.SCP), steps, strict=True
    ):
        assert closed(schedule, m, equal_ranks(schedule, pp, 1.0, 2.0, 1.0)) == step


@pytest.mark.parametrize("schedule", sorted(AHEAD))
def test_on_equal_ranks_it_is_the_simulated_step(schedule):
    draw = random.Random(7)
    for _ in range(100):
        pp, f = draw.choice((3, 4, 6, 8)), draw.uniform(0.5, 2.0)
        b, r = f * draw.uniform(1.0, 2.5), f * draw.uniform(0.05, 1.0)
        m = draw.randrange(max(4, pp), 3 * pp + 2)
        ranks = equal_ranks(schedule, pp, f, b, r)
        assert closed(schedule, m, ranks) == pytest.approx(simulated(schedule, m, ranks), rel=1e-12)


@pytest.mark.parametrize("schedule", sorted(AHEAD))
def test_it_is_never_below_1f1b_without_any_recompute_nor_above_1f1b_with_it(schedule):
    draw = random.Random(11)
    for _ in range(200):
        pp = draw.choice((2, 3, 4, 8))
        ranks = [(draw.uniform(1, 2), draw.uniform(1, 4), draw.uniform(0, 1)) for _ in range(pp)]
        m = draw.randrange(max(4, pp), 40)
        actual = closed(schedule, m, ranks)
        assert actual >= closed(Schedule.ONE_F_ONE_B, m, [(f, b, 0.0) for f, b, _ in ranks]) * (
            1 - 1e-12
        )
        assert actual <= closed(Schedule.ONE_F_ONE_B, m, ranks) * (1 + 1e-12)


def test_without_recompute_there_is_nothing_to_hide():
    ranks = [(1.0, 2.0, 0.0), (1.5, 2.5, 0.0), (1.0, 1.0, 0.0), (2.0, 2.0, 0.0)]
    for schedule in AHEAD:
        assert (
            closed(schedule, 8, ranks) == closed(Schedule.ONE_F_ONE_B, 8, ranks) == 7 * 4.0 + 13.0
        )
