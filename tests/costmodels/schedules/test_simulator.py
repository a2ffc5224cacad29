from __future__ import annotations

import re
from dataclasses import fields, replace
from itertools import product

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parplan.costmodels.schedules.actions import Action, ActionKind, orders_of
from parplan.costmodels.schedules.schedule import (
    Schedule,
    actions,
    in_flight,
    legal,
    uniform_step_s,
)
from parplan.costmodels.schedules.simulator import StageCost, least_step_s
from tests.helpers.cases import of_every
from tests.helpers.simulated_steps import replay, simulate

GPIPE = Schedule.GPIPE
ONE_F_ONE_B = Schedule.ONE_F_ONE_B
INTERLEAVED = Schedule.INTERLEAVED
WHOLE = (GPIPE, ONE_F_ONE_B, INTERLEAVED)  # schedules that do not split the backward
F0, B0 = Action(ActionKind.FORWARD, 0, 0), Action(ActionKind.BACKWARD, 0, 0)


def cost(
    forward_s,
    backward_s,
    recompute_s=0.0,
    receive_forward_s=0.0,
    receive_backward_s=0.0,
    stash_bytes=1.0,
) -> StageCost:
    return StageCost(
        forward_s=forward_s,
        backward_s=backward_s,
        recompute_s=recompute_s,
        receive_forward_s=receive_forward_s,
        receive_backward_s=receive_backward_s,
        stash_bytes=stash_bytes,
    )


def equal(p: int, v: int, f: float, b: float, r: float) -> list[list[StageCost]]:
    """Ranks of equal chunks whose chunks sum to (F, B, R)."""
    return [[cost(f / v, b / v, r / v)] * v for _ in range(p)]


def forward_s(stage_cost: StageCost) -> float:
    return stage_cost.receive_forward_s + stage_cost.forward_s


def backward_s(stage_cost: StageCost) -> float:
    return stage_cost.receive_backward_s + stage_cost.recompute_s + stage_cost.backward_s


def total_s(stage_cost: StageCost) -> float:
    return forward_s(stage_cost) + backward_s(stage_cost)


def closed_form_s(m: int, costs: list[list[StageCost]]) -> float:
    """EQUATIONS P3 without a tail: (M - 1) max + sum."""
    stages = [total_s(stage_cost) for row in costs for stage_cost in row]
    return (m - 1) * max(stages) + sum(stages)


@st.composite
def pipelines(draw, schedules=WHOLE, same_forward_share=False):
    """A legal schedule, its micro-batches, and integral costs, so that sums are exact."""
    schedule = draw(st.sampled_from(schedules))
    p = draw(st.integers(2 if schedule is INTERLEAVED else 1, 5))
    v = draw(st.integers(2, 3)) if schedule is INTERLEAVED else 1
    m = p * draw(st.integers(1, 3)) if schedule is INTERLEAVED else draw(st.integers(1, 12))
    whole = st.integers(0, 9).map(float)
    if same_forward_share:
        f, b = draw(st.integers(0, 4)), draw(st.integers(0, 4))
        stage_costs = whole.map(lambda t: cost(f * t, b * t))
    else:
        stage_costs = st.builds(StageCost, **{field.name: whole for field in fields(StageCost)})
    costs = draw(st.lists(st.lists(stage_costs, min_size=v, max_size=v), min_size=p, max_size=p))
    return schedule, m, costs


GRID = [
    (schedule, p, m, v)
    for schedule, p, m, v in product(WHOLE, (1, 2, 3, 4, 8), (1, 2, 3, 4, 8, 16, 24), (1, 2, 4))
    if legal(schedule, p, m, v) is None
]


PASSES = ((1.0, 2.0, 1.0), (2.0, 1.0, 0.5), (1.0, 2.0, 0.0), (1.0, 0.0, 0.0))


@of_every([(*case, *passes) for case in GRID for passes in PASSES])
def test_equal_stages_take_exactly_the_closed_form(schedule, p, m, v, f, b, r):
    assert simulate(schedule, m, equal(p, v, f, b, r)).step_s == uniform_step_s(
        schedule, p, m, v, f + b + r
    )


@pytest.mark.parametrize(
    ("p", "m", "recompute_s", "v", "expected_s"),
    [
        # EQUATIONS P1 (F, B = 1, 2)
        pytest.param(4, 8, 1.0, 1, 44.0, id="1f1b-full-recompute-4x8"),
        pytest.param(8, 16, 1.0, 1, 92.0, id="1f1b-full-recompute-8x16"),
        pytest.param(8, 32, 1.0, 1, 156.0, id="1f1b-full-recompute-8x32"),
        pytest.param(4, 8, 0.0, 1, 33.0, id="1f1b-no-recompute-4x8"),
        pytest.param(8, 16, 0.0, 1, 69.0, id="1f1b-no-recompute-8x16"),
        pytest.param(8, 32, 0.0, 1, 117.0, id="1f1b-no-recompute-8x32"),
        pytest.param(4, 8, 1.0, 2, 38.0, id="interleaved-full-recompute-4x8"),
        pytest.param(8, 16, 1.0, 2, 78.0, id="interleaved-full-recompute-8x16"),
        pytest.param(8, 32, 1.0, 2, 142.0, id="interleaved-full-recompute-8x32"),
    ],
)
def test_published_rows_are_reproduced(p, m, recompute_s, v, expected_s):
    schedule = INTERLEAVED if v > 1 else ONE_F_ONE_B

    assert simulate(schedule, m, equal(p, v, 1.0, 2.0, recompute_s)).step_s == expected_s


def test_a_step_worked_by_hand_has_these_timelines():
    # rank 0: F takes 1, B 0.5 + 2; rank 1: F takes 0.5 + 2, B 1 + 5; rank 0 waits for rank 1's
    # backwards at 9.5 and 18
    costs = [
        [cost(1.0, 2.0, receive_backward_s=0.5, stash_bytes=10.0)],
        [cost(2.0, 5.0, 1.0, receive_forward_s=0.5, stash_bytes=7.0)],
    ]

    step = simulate(ONE_F_ONE_B, 2, costs, tail_s=(1.0, 5.0), keep_events=True)

    assert [(str(e.action), e.start_s, e.end_s) for e in step.ranks[0].events] == [
        ("F0.0", 0.0, 1.0),
        ("F0.1", 1.0, 2.0),
        ("B0.0", 9.5, 12.0),
        ("B0.1", 18.0, 20.5),
    ]
    assert [(str(e.action), e.start_s, e.end_s) for e in step.ranks[1].events] == [
        ("F0.0", 1.0, 3.5),
        ("B0.0", 3.5, 9.5),
        ("F0.1", 9.5, 12.0),
        ("B0.1", 12.0, 18.0),
    ]
    assert step.step_s == 23.0
    first, last = step.ranks
    assert (first.busy_s, first.transfer_s, first.finish_s, first.tail_s, first.bubble_s) == (
        6.0,
        1.0,
        20.5,
        1.0,
        15.0,
    )
    assert (last.busy_s, last.transfer_s, last.finish_s, last.tail_s, last.bubble_s) == (
        16.0,
        1.0,
        18.0,
        5.0,
        1.0,
    )
    assert (first.peak_stash_bytes, first.in_flight) == (20.0, 2)
    assert (last.peak_stash_bytes, last.in_flight) == (7.0, 1)


def test_the_peak_of_unequal_chunks_is_the_largest_sum_held():
    # rank 0 of P = 2, M = 2, v = 2: F0.0 F0.1 F1.0 F1.1, then all backwards: everything is held
    costs = [[cost(1.0, 1.0, stash_bytes=100.0), cost(1.0, 1.0, stash_bytes=1.0)]] * 2

    step = simulate(INTERLEAVED, 2, costs)

    assert step.ranks[0].peak_stash_bytes == 202.0
    # rank 1: F0.0 F0.1 F1.0, then B1.0 leaves before F1.1 comes
    assert step.ranks[1].peak_stash_bytes == 201.0


@of_every(GRID)
def test_the_peak_of_equal_chunks_is_in_flight_times_the_stash(schedule, p, m, v):
    costs = [[cost(1.0, 2.0, stash_bytes=3.0)] * v] * p

    for rank, timeline in enumerate(simulate(schedule, m, costs).ranks):
        assert timeline.in_flight == in_flight(schedule, rank, p, m, v)
        assert timeline.peak_stash_bytes == 3.0 * timeline.in_flight


def test_a_large_interleaved_step_is_simulated_exactly():
    # 64 ranks x 512 micro-batches x 2 chunks x 2 = 131,072 actions
    assert simulate(INTERLEAVED, 512, equal(64, 2, 1.0, 2.0, 1.0)).step_s == (512 + 63 / 2) * 4.0


def test_lists_that_wait_for_each_other_are_a_deadlock_that_names_the_stuck_actions():
    with pytest.raises(
        AssertionError,
        match=re.escape(
            "deadlock, rank: next actions that never start: 0: B0.0 F0.0; 1: F0.0 B0.0"
        ),
    ):
        replay([(B0, F0), (F0, B0)], 1, equal(2, 1, 1.0, 1.0, 0.0))


def test_a_forward_that_is_missing_from_the_lists_is_a_deadlock():
    with pytest.raises(AssertionError, match=re.escape("0: B0.0; 1: F0.0 B0.0")):
        replay([(B0,), (F0, B0)], 1, equal(2, 1, 1.0, 1.0, 0.0))


def longest_path_s(schedule: Schedule, m: int, costs: list[list[StageCost]]) -> float:
    """Seconds of the step by its definition.

    It is the longest path through a graph of list order and data dependencies.
    """
    p, v = len(costs), len(costs[0])
    graph = nx.DiGraph()
    for rank in range(p):
        order = [
            (a.work, a.chunk * p + rank, a.micro_batch) for a in actions(schedule, rank, p, m, v)
        ]
        nx.add_path(graph, order)
    for stage, i in product(range(p * v), range(m)):
        graph.add_edge((ActionKind.FORWARD, stage, i), (ActionKind.BACKWARD, stage, i))
        if stage:
            graph.add_edge((ActionKind.FORWARD, stage - 1, i), (ActionKind.FORWARD, stage, i))
            graph.add_edge((ActionKind.BACKWARD, stage, i), (ActionKind.BACKWARD, stage - 1, i))
    end_s: dict[tuple[ActionKind, int, int], float] = {}
    for work, stage, i in nx.topological_sort(graph):
        stage_cost = costs[stage % p][stage // p]
        start_s = max(
            (end_s[before] for before in graph.predecessors((work, stage, i))), default=0.0
        )
        end_s[work, stage, i] = start_s + (
            forward_s(stage_cost) if work is ActionKind.FORWARD else backward_s(stage_cost)
        )
    return max(end_s.values())


@settings(deadline=None)
@given(pipelines())
def test_the_step_equals_the_longest_path_of_the_dependency_graph(pipeline):
    assert simulate(*pipeline).step_s == longest_path_s(*pipeline)


@settings(deadline=None)
@given(pipelines())
def test_the_step_is_at_least_a_ranks_work_plus_the_way_to_it_and_back(pipeline):
    # rank z starts after the forwards, and the step ends after the backwards, of the stages before
    # it
    schedule, m, costs = pipeline
    step = simulate(schedule, m, costs)

    for rank, rank_costs in enumerate(costs):
        assert step.step_s >= m * sum(map(total_s, rank_costs)) + sum(
            total_s(row[0]) for row in costs[:rank]
        )
        assert step.step_s >= step.ranks[rank].busy_s


@settings(deadline=None)
@given(pipelines(), st.data())
def test_the_lower_bound_is_never_above_the_step(pipeline, data):
    schedule, m, costs = pipeline
    tail_s = data.draw(
        st.lists(st.integers(0, 30).map(float), min_size=len(costs), max_size=len(costs))
    )

    assert least_step_s(m, costs, tail_s) <= simulate(schedule, m, costs, tail_s).step_s


@of_every(GRID)
def test_the_lower_bound_of_equal_stages_is_their_step(schedule, p, m, v):
    costs = equal(p, v, 1.0, 2.0, 1.0)

    assert least_step_s(m, costs, [5.0] * p) == pytest.approx(
        simulate(schedule, m, costs, [5.0] * p).step_s, rel=1e-12
    )


@settings(deadline=None)
@given(pipelines())
def test_the_step_is_at_least_the_way_of_one_micro_batch(pipeline):
    schedule, m, costs = pipeline

    assert simulate(schedule, m, costs).step_s >= sum(
        total_s(stage_cost) for row in costs for stage_cost in row
    )


@settings(deadline=None)
@given(pipelines(), st.data())
def test_the_step_grows_with_each_cost(pipeline, data):
    schedule, m, costs = pipeline
    rank = data.draw(st.integers(0, len(costs) - 1))
    chunk = data.draw(st.integers(0, len(costs[0]) - 1))
    name = data.draw(st.sampled_from([field.name for field in fields(StageCost)]))
    dearer = [list(row) for row in costs]
    dearer[rank][chunk] = replace(
        costs[rank][chunk], **{name: getattr(costs[rank][chunk], name) + 3.0}
    )

    before, after = simulate(schedule, m, costs), simulate(schedule, m, dearer)

    assert after.step_s >= before.step_s
    assert after.ranks[rank].peak_stash_bytes >= before.ranks[rank].peak_stash_bytes


@settings(deadline=None)
@given(pipelines(), st.data())
def test_the_parts_of_each_rank_sum_to_the_step(pipeline, data):
    schedule, m, costs = pipeline
    tails = data.draw(
        st.lists(st.integers(0, 9).map(float), min_size=len(costs), max_size=len(costs))
    )

    step = simulate(schedule, m, costs, tails)

    assert step.step_s == max(rank_time.finish_s + rank_time.tail_s for rank_time in step.ranks)
    for rank in step.ranks:
        assert rank.busy_s + rank.transfer_s + rank.tail_s + rank.bubble_s == step.step_s


@settings(deadline=None)
@given(pipelines())
def test_the_actions_of_a_rank_never_overlap_and_follow_the_list(pipeline):
    schedule, m, costs = pipeline

    for rank, rank_time in enumerate(simulate(schedule, m, costs, keep_events=True).ranks):
        assert tuple(event.action for event in rank_time.events) == actions(
            schedule, rank, len(costs), m, len(costs[0])
        )
        assert all(
            a.end_s <= b.start_s
            for a, b in zip(rank_time.events, rank_time.events[1:], strict=False)
        )
        assert rank_time.events[-1].end_s == rank_time.finish_s


def test_events_are_kept_only_when_asked_for():
    assert simulate(GPIPE, 2, equal(2, 1, 1.0, 1.0, 0.0)).ranks[0].events == ()


@settings(deadline=None)
@given(pipelines(schedules=(ONE_F_ONE_B,), same_forward_share=True))
def test_1f1b_stays_within_the_closed_form_and_misses_it_by_the_stages_after_the_slowest(
    pipeline,
):
    schedule, m, costs = pipeline
    stages = [total_s(row[0]) for row in costs]
    slowest = len(stages) - 1 - stages[::-1].index(max(stages))

    step_s = simulate(schedule, m, costs).step_s

    assert 0 <= closed_form_s(m, costs) - step_s <= sum(stages[slowest + 1 :])


@settings(deadline=None)
@given(pipelines(schedules=(GPIPE,)))
def test_gpipe_takes_its_slowest_forward_and_its_slowest_backward_per_micro_batch(pipeline):
    # two flow lines one after the other: sum + (M - 1) (max F + max B), above (M - 1) max (F + B) +
    # sum
    schedule, m, costs = pipeline
    forwards, backwards = (
        [forward_s(row[0]) for row in costs],
        [backward_s(row[0]) for row in costs],
    )

    step_s = simulate(schedule, m, costs).step_s

    assert step_s == sum(forwards) + sum(backwards) + (m - 1) * (max(forwards) + max(backwards))
    assert step_s >= closed_form_s(m, costs)


@pytest.mark.parametrize(
    ("p", "m", "expected_s", "closed_s"),
    [
        pytest.param(3, 6, 8.0, 7.0, id="three-ranks"),
        pytest.param(4, 16, 19.0, 17.0, id="four-ranks"),
    ],
)
def test_1f1b_exceeds_the_closed_form_when_forward_and_backward_have_different_slowest_stages(
    p, m, expected_s, closed_s
):
    # (P - 2) (max F + max B - Z) more: the light last ranks hold no stage back while both lines
    # fill and drain
    costs = [[cost(1.0, 0.0)], [cost(0.0, 1.0)], *[[cost(0.0, 0.0)]] * (p - 2)]

    assert simulate(ONE_F_ONE_B, m, costs).step_s == expected_s
    assert closed_form_s(m, costs) == closed_s


def test_split_backwards_by_hand():
    """Two ranks run one micro-batch: 1F takes 2 s, 0F takes 1 s.

    The input gradient of stage 1 (3 s) frees rank 0, its weight gradient (2 s) does not.
    """
    first = StageCost(
        forward_s=1.0,
        backward_s=4.0,
        recompute_s=0.0,
        receive_forward_s=0.0,
        receive_backward_s=0.5,
        stash_bytes=10.0,
        weight_s=1.5,
        waiting_bytes=4.0,
    )
    second = replace(
        first,
        forward_s=2.0,
        backward_s=5.0,
        weight_s=2.0,
        receive_forward_s=0.25,
        receive_backward_s=0.0,
    )
    orders = orders_of(("0F0,0I0,0W0", "1F0,1I0,1W0"))

    step = replay(orders, 1, [[first], [second]], keep_events=True)

    # stage 1: forward 1 .. 3.25, input gradient .. 6.25, weight gradient .. 8.25; the whole
    # backward of stage 0, whose input has no gradient, is in its weight gradient: receive .. 6.75,
    # backward .. 10.75
    assert [[event.end_s for event in rank.events] for rank in step.ranks] == [
        [1.0, 6.75, 10.75],
        [3.25, 6.25, 8.25],
    ]
    assert step.step_s == 10.75
    assert [rank.peak_stash_bytes for rank in step.ranks] == [14.0, 14.0]
    assert step.ranks[0].bubble_s == pytest.approx(10.75 - 1.0 - 4.0 - 0.5)


def test_whole_and_split_backwards_may_be_mixed_and_split_ones_let_the_stage_before_start_sooner():
    cost = StageCost(
        forward_s=1.0,
        backward_s=4.0,
        recompute_s=0.0,
        receive_forward_s=0.0,
        receive_backward_s=0.0,
        stash_bytes=1.0,
        weight_s=2.0,
    )
    whole = orders_of(("0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1"))
    split = orders_of(("0F0,0F1,0B0,0B1", "1F0,1I0,1F1,1W0,1B1"))

    # 1F0 ends at 2; its whole backward at 6, its input gradient at 4: 0B0 ends at 10 or at 8, 0B1
    # waits for 1B1 (11)
    assert replay(whole, 2, [[cost], [cost]]).step_s == 15.0
    assert replay(split, 2, [[cost], [cost]], keep_events=True).ranks[0].events[2].end_s == 8.0
