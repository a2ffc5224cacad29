from __future__ import annotations

from collections import Counter
from itertools import accumulate, product
from types import SimpleNamespace

import pytest

from parplan.costmodels.schedules.actions import Action, ActionKind
from parplan.costmodels.schedules.schedule import (
    Schedule,
    actions,
    in_flight,
    legal,
    uniform_step_s,
)
from parplan.profiles.errors import ConfigError
from tests.helpers.cases import of_every

GPIPE = Schedule.GPIPE
ONE_F_ONE_B = Schedule.ONE_F_ONE_B
INTERLEAVED = Schedule.INTERLEAVED
WHOLE = (GPIPE, ONE_F_ONE_B, INTERLEAVED)  # schedules that do not split the backward

LEGAL = [
    (schedule, p, m, v)
    for schedule, p, m, v in product(
        WHOLE, (1, 2, 3, 4, 7), (1, 2, 3, 4, 7, 8, 12, 21), (1, 2, 3, 5)
    )
    if legal(schedule, p, m, v) is None
]


def shown(schedule: Schedule, rank: int, p: int, m: int, v: int = 1) -> str:
    return " ".join(str(action) for action in actions(schedule, rank, p, m, v))


def held(order: tuple[Action, ...]) -> list[int]:
    """The number of stashes after each action."""
    return list(accumulate(1 if action.work is ActionKind.FORWARD else -1 for action in order))


def test_gpipe_runs_all_forwards_then_all_backwards_oldest_first():
    assert shown(GPIPE, 0, 2, 3) == "F0.0 F0.1 F0.2 B0.0 B0.1 B0.2"


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        pytest.param(
            0, "F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3", id="first-rank-warms-up-with-two"
        ),
        pytest.param(1, "F0.0 F0.1 B0.0 F0.2 B0.1 F0.3 B0.2 B0.3", id="middle-rank"),
        pytest.param(2, "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2 F0.3 B0.3", id="last-rank-alternates"),
    ],
)
def test_1f1b_orders_are_those_drawn_in_the_paper(rank, expected):
    assert shown(ONE_F_ONE_B, rank, 3, 4) == expected


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        # warm-up 2 (P - rank - 1) + (v - 1) P = 4 and 2
        pytest.param(
            0,
            "F0.0 F0.1 F1.0 F1.1 F0.2 B1.0 F0.3 B1.1 F1.2 B0.0 F1.3 B0.1 B1.2 B1.3 B0.2 B0.3",
            id="first-rank",
        ),
        pytest.param(
            1,
            "F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 F0.2 B0.0 F0.3 B0.1 F1.2 B1.2 F1.3 B1.3 B0.2 B0.3",
            id="last-rank",
        ),
    ],
)
def test_interleaved_orders_are_those_worked_by_hand(rank, expected):
    assert shown(INTERLEAVED, rank, 2, 4, 2) == expected


def test_interleaved_warm_up_is_capped_by_the_forwards_there_are():
    assert shown(INTERLEAVED, 0, 4, 4, 2).split()[:8] == [
        f"F{c}.{i}" for c in range(2) for i in range(4)
    ]


@of_every(LEGAL)
def test_each_micro_batch_goes_forward_once_and_then_backward_once_through_each_chunk(
    schedule, p, m, v
):
    for rank in range(p):
        order = actions(schedule, rank, p, m, v)
        place = {action: n for n, action in enumerate(order)}

        assert Counter(order) == Counter(
            Action(work, c, i)
            for work in (ActionKind.FORWARD, ActionKind.BACKWARD)
            for c in range(v)
            for i in range(m)
        )
        assert all(
            place[Action(ActionKind.FORWARD, c, i)] < place[Action(ActionKind.BACKWARD, c, i)]
            for c in range(v)
            for i in range(m)
        )


@of_every(LEGAL)
def test_in_flight_equals_a_count_of_the_action_list(schedule, p, m, v):
    for rank in range(p):
        assert in_flight(schedule, rank, p, m, v) == max(held(actions(schedule, rank, p, m, v)))


@pytest.mark.parametrize(
    ("schedule", "rank", "p", "m", "v", "expected"),
    [
        pytest.param(GPIPE, 3, 4, 9, 1, 9, id="gpipe-holds-all"),
        pytest.param(ONE_F_ONE_B, 0, 4, 9, 1, 4, id="1f1b-first-rank-holds-P"),
        pytest.param(ONE_F_ONE_B, 3, 4, 9, 1, 1, id="1f1b-last-rank-holds-one"),
        pytest.param(ONE_F_ONE_B, 0, 4, 2, 1, 2, id="1f1b-holds-no-more-than-M"),
        pytest.param(ONE_F_ONE_B, 0, 1, 5, 1, 1, id="one-rank-holds-one"),
        pytest.param(INTERLEAVED, 0, 4, 8, 2, 11, id="interleaved-first-rank-2x3+4+1"),
        pytest.param(INTERLEAVED, 3, 4, 8, 2, 5, id="interleaved-last-rank-4+1"),
        pytest.param(INTERLEAVED, 0, 4, 4, 2, 8, id="interleaved-holds-no-more-than-Mv"),
    ],
)
def test_in_flight_matches_hand_calculation(schedule, rank, p, m, v, expected):
    assert in_flight(schedule, rank, p, m, v) == expected


def test_interleaved_stash_of_the_first_rank_exceeds_that_of_1f1b_by_the_published_share():
    # Korthikanti 2022, arXiv:2205.05198, section 4.2.3: 1 + (P - 1) / (P v) times the layers of
    # 1F1B's P micro-batches
    p, v = 8, 4

    assert in_flight(INTERLEAVED, 0, p, 4 * p, v) / v == p * (1 + (p - 1) / (p * v))


@pytest.mark.parametrize(
    ("p", "m", "stage_s", "v", "expected_s"),
    [
        # EQUATIONS P1: F, B, R = 1, 2, 1; the interleaved column is with full recompute
        pytest.param(4, 8, 4.0, 1, 44.0, id="1f1b-full-recompute-4x8"),
        pytest.param(8, 16, 4.0, 1, 92.0, id="1f1b-full-recompute-8x16"),
        pytest.param(8, 32, 4.0, 1, 156.0, id="1f1b-full-recompute-8x32"),
        pytest.param(4, 8, 3.0, 1, 33.0, id="1f1b-no-recompute-4x8"),
        pytest.param(8, 16, 3.0, 1, 69.0, id="1f1b-no-recompute-8x16"),
        pytest.param(8, 32, 3.0, 1, 117.0, id="1f1b-no-recompute-8x32"),
        pytest.param(4, 8, 4.0, 2, 38.0, id="interleaved-4x8"),
        pytest.param(8, 16, 4.0, 2, 78.0, id="interleaved-8x16"),
        pytest.param(8, 32, 4.0, 2, 142.0, id="interleaved-8x32"),
        pytest.param(1, 5, 4.0, 1, 20.0, id="one-rank-has-no-bubble"),
    ],
)
def test_uniform_step_matches_published_rows(p, m, stage_s, v, expected_s):
    schedule = INTERLEAVED if v > 1 else ONE_F_ONE_B

    assert uniform_step_s(schedule, p, m, v, stage_s) == expected_s


@pytest.mark.parametrize(
    ("schedule", "p", "m", "v", "reason"),
    [
        pytest.param(
            INTERLEAVED, 4, 6, 2, "multiples of the 4 pipeline ranks, found 6", id="ragged"
        ),
        pytest.param(
            INTERLEAVED, 4, 8, 1, "at least 2 virtual stages per rank, found 1", id="one-chunk"
        ),
        pytest.param(INTERLEAVED, 1, 8, 2, "at least 2 pipeline ranks, found 1", id="one-rank"),
        pytest.param(
            GPIPE, 4, 8, 2, "gpipe has 1 virtual stage per rank, found 2", id="gpipe-chunks"
        ),
        pytest.param(
            ONE_F_ONE_B, 4, 8, 3, "1f1b has 1 virtual stage per rank, found 3", id="1f1b-chunks"
        ),
        pytest.param(
            ONE_F_ONE_B,
            4,
            0,
            1,
            "at least one rank, micro-batch and virtual stage",
            id="no-micro-batch",
        ),
    ],
)
def test_an_illegal_schedule_is_refused_with_its_reason(schedule, p, m, v, reason):
    assert reason in (legal(schedule, p, m, v) or "")
    with pytest.raises(ConfigError, match=reason):
        actions(schedule, 0, p, m, v)
    with pytest.raises(ConfigError, match=reason):
        in_flight(schedule, 0, p, m, v)
    with pytest.raises(ConfigError, match=reason):
        uniform_step_s(schedule, p, m, v, 1.0)


@pytest.mark.parametrize(
    ("schedule", "p", "m", "v"),
    [
        pytest.param(GPIPE, 1, 1, 1, id="gpipe-one-rank"),
        pytest.param(ONE_F_ONE_B, 1, 3, 1, id="1f1b-one-rank"),
        pytest.param(ONE_F_ONE_B, 8, 2, 1, id="1f1b-fewer-micro-batches-than-ranks"),
        pytest.param(INTERLEAVED, 2, 2, 2, id="smallest-interleaved"),
    ],
)
def test_edge_counts_are_legal(schedule, p, m, v):
    assert legal(schedule, p, m, v) is None


def torch_order(pipeline_order, rank: int, p: int) -> str:
    """A torch rank's forwards and full backwards in our notation."""
    done = [
        action
        for action in pipeline_order[rank]
        if action is not None and action.computation_type.value in ("F", "B")
    ]
    return " ".join(
        f"{a.computation_type.value}{a.stage_index // p}.{a.microbatch_index}" for a in done
    )


def torch_stages(p: int, v: int) -> list[SimpleNamespace]:
    """Stand-ins for rank 0's stages, with the fields that torch reads to lay out its order."""
    return [
        SimpleNamespace(
            group_size=p,
            group_rank=0,
            num_stages=p * v,
            stage_index=c * p,
            is_first=c == 0,
            is_last=False,
            submod=None,
        )
        for c in range(v)
    ]


def test_the_orders_are_those_of_torch():
    pipelining = pytest.importorskip("torch.distributed.pipelining")

    for p, rounds, v in product((2, 3, 4, 8), (1, 2, 5), (2, 3)):
        interleaved = pipelining.ScheduleInterleaved1F1B(
            torch_stages(p, v), p * rounds
        ).pipeline_order
        gpipe = pipelining.ScheduleGPipe(torch_stages(p, 1)[0], p * rounds).pipeline_order
        one_f_one_b = pipelining.Schedule1F1B(torch_stages(p, 1)[0], p * rounds).pipeline_order
        for rank in range(p):
            assert shown(INTERLEAVED, rank, p, p * rounds, v) == torch_order(interleaved, rank, p)
            assert shown(GPIPE, rank, p, p * rounds) == torch_order(gpipe, rank, p)
            # torch 2.13 numbers the last rank's forwards from 1 in this table, not in what it runs
            if rank < p - 1:
                assert shown(ONE_F_ONE_B, rank, p, p * rounds) == torch_order(one_f_one_b, rank, p)
