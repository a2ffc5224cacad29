from __future__ import annotations

import pytest

from parplan.costmodels.schedules.actions import (
    Action,
    ActionKind,
    check_rows,
    csv_row,
    orders_of,
    placement_of,
)
from parplan.costmodels.schedules.schedule import Schedule, csv_rows, legal
from parplan.profiles.errors import ConfigError

GOOD = ("0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1I1,1W1")


def test_a_line_names_virtual_stages_where_an_action_names_chunks():
    order = (
        Action(ActionKind.FORWARD, 0, 0),
        Action(ActionKind.FORWARD, 1, 0),
        Action(ActionKind.INPUT_GRADIENT, 1, 0),
        Action(ActionKind.WEIGHT_GRADIENT, 1, 0),
    )

    assert csv_row(order, (1, 2)) == "1F0,2F0,2I0,2W0"
    assert orders_of(("1F0,2F0,2I0,2W0",)) == (order,)
    assert placement_of(("0F0,3F0", "1F0,2F0")) == ((0, 3), (1, 2))


def test_lists_with_whole_and_split_backwards_are_accepted():
    check_rows(GOOD, 2, 1, 2)


@pytest.mark.parametrize(
    "schedule", [Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED, Schedule.ZBV]
)
@pytest.mark.parametrize(("p", "m"), [(2, 1), (2, 4), (3, 2), (4, 8), (5, 20)])
def test_every_list_that_the_planner_makes_is_accepted(schedule, p, m):
    v = 1 if schedule in (Schedule.GPIPE, Schedule.ONE_F_ONE_B) else 2
    if legal(schedule, p, m, v) is None:
        check_rows(csv_rows(schedule, p, m, v), p, v, m)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        pytest.param(GOOD[:1], "1 lines for 2 pipeline ranks", id="rank-missing"),
        pytest.param(
            (GOOD[0], "1F0,1B0,1X1"), "rank 1, entry 3: '1X1' is no action", id="unknown-work"
        ),
        pytest.param(
            (GOOD[0], GOOD[1] + ",0F0"),
            "virtual stage 0 is on rank 0 and on rank 1",
            id="two-homes",
        ),
        pytest.param(
            ("0F0,0F1,0B0,0B1", "2F0,2B0,2F1,2B1"),
            "virtual stage 2, there are 2",
            id="no-such-stage",
        ),
        pytest.param(
            (GOOD[0], "1F0,1B0"), "stage 1 and micro-batch 1 have nothing", id="micro-batch-missing"
        ),
        pytest.param(
            (GOOD[0], "1F0,1B0,1F1,1I1"),
            "micro-batch 1 have FI, not F B, F R B or F I W",
            id="weight-gradient-missing",
        ),
        pytest.param((GOOD[0], "1F0,1B0,1B0,1F1,1B1"), "1B0 comes after FB", id="twice"),
        pytest.param(
            (GOOD[0], "1F0,1B0,1F1,1W1,1I1"), "1W1 comes after F of", id="weight-gradient-first"
        ),
        pytest.param((GOOD[0], "1B0,1F0,1F1,1B1"), "1B0 comes after nothing", id="backward-first"),
        pytest.param(
            (GOOD[0], "1F0,1B0,1F2,1B2"), "micro-batch 2, there are 2", id="micro-batch-too-many"
        ),
        pytest.param(
            ("0F0,0B0,0F1,0B1", "1F0,1F1,1B0,1B1"),
            "wait for each other for ever: rank 0 at 0B0, rank 1 at 1F1",
            id="deadlock",
        ),
    ],
)
def test_lists_that_cannot_run_are_refused_with_the_place(rows, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        check_rows(rows, 2, 1, 2)


def test_a_rank_with_too_few_stages_is_refused():
    with pytest.raises(ConfigError, match=r"rank 0: it has virtual stages \[0\], not 2 of them"):
        check_rows(("0F0,0B0", "1F0,2F0,2B0,1B0"), 2, 2, 1)
