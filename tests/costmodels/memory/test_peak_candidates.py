"""Rank memory where recompute runs ahead of the gradient: moments and sums worked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.memory.peak_candidates import PeakCandidate, peak_candidates
from parplan.costmodels.memory.peak_memory import ConstantBytes, LayerBytes, peak_bytes
from parplan.costmodels.memory.rank_memory import rank_memory
from parplan.costmodels.schedules.schedule import (
    AHEAD,
    LAST_KEEPS_ALL,
    Schedule,
    csv_rows,
    in_flight,
    legal,
)
from parplan.costmodels.step import price_step
from parplan.costmodels.strategy import LayerChoice, Strategy
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.operator_graph import LayerKind
from tests.helpers.uniform_strategies import TINY, book_of, frame_of, uniform

EARLY = Schedule.EARLY_RECOMPUTE
LAST = Schedule.LAST_NO_RECOMPUTE
SCP = Schedule.SCP
BLOCK, BOOK = LayerKind.BLOCK, book_of(TINY, 4)


def inside(stashes: int, remade: int = 0) -> PeakCandidate:
    return PeakCandidate(stashes, remade)


def alone(stashes: int, remade: int = 1) -> PeakCandidate:
    return PeakCandidate(stashes, remade, alone=True)


@pytest.mark.parametrize(
    ("schedule", "rank", "expected"),
    [
        pytest.param(EARLY, 0, (inside(5), alone(4)), id="early-cool-down-after-the-most"),
        pytest.param(EARLY, 3, (inside(2), alone(1)), id="early-last-but-one"),
        pytest.param(EARLY, 4, (inside(1),), id="early-last-does-not-wait"),
        pytest.param(
            LAST, 3, (inside(2), alone(2)), id="last-no-recompute-first-micro-batch-ahead"
        ),
        pytest.param(SCP, 0, (inside(5), alone(4)), id="scp-first"),
        pytest.param(SCP, 2, (inside(3), alone(3)), id="scp-last-but-two"),
        pytest.param(
            SCP, 3, (inside(2), alone(3)), id="scp-three-in-flight-before-the-first-backward"
        ),
        pytest.param(SCP, 4, (inside(1),), id="scp-last"),
        pytest.param(Schedule.ONE_F_ONE_B, 1, (inside(4),), id="1f1b"),
        pytest.param(Schedule.GPIPE, 1, (inside(8),), id="gpipe"),
    ],
)
def test_moments_by_hand(schedule, rank, expected):
    assert peak_candidates(rank, frame_of(pp=5, schedule=schedule, m=8)) == expected


def test_a_list_of_ones_own_may_recompute_several_ahead():
    layout = replace(
        frame_of(pp=2, schedule=Schedule.CUSTOM, m=3),
        actions=("0F0,0F1,0F2,0R0,0R1,0B0,0B1,0B2", "1F0,1F1,1F2,1I0,1W0,1B1,1B2"),
    )

    assert peak_candidates(0, layout) == (inside(1, 0), alone(3, 2))
    assert peak_candidates(1, layout) == (inside(3),)
    assert layout.recomputes_ahead


@pytest.mark.parametrize("schedule", sorted(AHEAD))
def test_more_micro_batches_have_no_other_moments(schedule):
    # a list of one's own is not cut short
    for p in range(2, 8):
        for m in range(1, 30):
            if legal(schedule, p, m, 1) is None:
                short, rows = frame_of(pp=p, schedule=schedule, m=m), csv_rows(schedule, p, m)
                whole = replace(short, schedule=Schedule.CUSTOM, actions=rows)
                for rank in range(p):
                    assert peak_candidates(rank, short) == peak_candidates(rank, whole)
                    assert max(
                        peak_candidate.stashes for peak_candidate in peak_candidates(rank, short)
                    ) == in_flight(schedule, rank, p, m)


def strategy(schedule: Schedule, recompute_level: Recompute, m: int = 8) -> Strategy:
    """Two blocks on each of four stages."""
    actual = uniform(frame_of(pp=4, schedule=schedule, m=m), 8, recompute=recompute_level)
    last = tuple(replace(choice, recompute=Recompute.NONE) for choice in actual.stages[-1])
    return (
        replace(actual, stages=(*actual.stages[:-1], last))
        if schedule in LAST_KEEPS_ALL
        else actual
    )


@pytest.mark.parametrize("recomputed", [Recompute.FULL, Recompute.SELECTIVE])
@pytest.mark.parametrize(
    ("schedule", "rank", "most", "ahead"),
    [(EARLY, 1, 3, 2), (EARLY, 2, 2, 1), (LAST, 2, 2, 2), (SCP, 1, 3, 3), (SCP, 2, 2, 3)],
)
def test_the_peak_is_stashes_and_a_stage_without_recompute_from_r_to_its_backward(
    schedule, rank, most, ahead, recomputed
):
    # middle stages, two equal blocks each
    layout = strategy(schedule, recomputed).layout
    kept = BOOK.activations(BLOCK, 1, layout.sharding, recomputed)
    whole = BOOK.activations(BLOCK, 1, layout.sharding, Recompute.NONE)
    stage, made = 2 * kept.saved, 2 * (whole.saved - kept.saved)

    memory = rank_memory(strategy(schedule, recomputed), rank, BOOK)

    assert memory.activations == max(most * stage, ahead * stage + made)
    assert memory.activations + memory.temporaries == max(
        most * stage + kept.workspace, ahead * stage + made + whole.workspace
    )
    assert memory.apart == 0


@pytest.mark.parametrize("schedule", sorted(AHEAD))
def test_without_recompute_the_memory_is_that_of_1f1b_and_one_stash_more_where_scp_holds_it(
    schedule,
):
    for rank in range(4):
        plain = rank_memory(strategy(Schedule.ONE_F_ONE_B, Recompute.NONE), rank, BOOK)
        ahead = rank_memory(strategy(schedule, Recompute.NONE), rank, BOOK)
        more = schedule is SCP and rank == 2
        assert ahead.activations == plain.activations * (1.5 if more else 1.0)
        assert (ahead.states, ahead.temporaries) == (plain.states, plain.temporaries)


@pytest.mark.parametrize("schedule", sorted(AHEAD))
def test_the_simulated_stash_is_that_of_the_moments(schedule):
    for timeline, rank in zip(
        price_step(strategy(schedule, Recompute.FULL), BOOK).simulated.ranks, range(4), strict=True
    ):
        layers, layout = (
            strategy(schedule, Recompute.FULL).stages[rank],
            frame_of(pp=4, schedule=schedule),
        )
        saved = sum(BOOK.activations(c.kind, 1, layout.sharding, c.recompute).saved for c in layers)
        made = sum(BOOK.remade_bytes(c.kind, 1, layout.sharding, c.recompute) for c in layers)
        assert timeline.peak_stash_bytes == max(
            peak_candidate.stashes * saved + peak_candidate.remade * made
            for peak_candidate in peak_candidates(rank, layout)
        )
        assert timeline.in_flight == in_flight(schedule, rank, 4, 8)


@pytest.mark.parametrize("schedule", sorted(AHEAD))
def test_the_parts_of_each_rank_and_its_idle_time_add_up_to_the_step(schedule):
    # the receives that a recompute hides are in neither
    price = price_step(strategy(schedule, Recompute.FULL), BOOK)

    for time, line in zip(price.ranks, price.simulated.ranks, strict=True):
        assert time.total.value_s + line.bubble_s == pytest.approx(price.step_s, rel=1e-9)


def test_a_last_stage_that_recomputes_is_refused():
    with pytest.raises(ConfigError, match="scp: its last stage recomputes nothing, here it does"):
        price_step(uniform(frame_of(pp=4, schedule=SCP), 8, recompute=Recompute.FULL), BOOK)


@pytest.mark.parametrize(
    ("recomputed", "expected"),
    [
        # F F F, R makes 60, the first layer back: 3 x 40 + 60 + 5; with 15 inside and no R: 3 x 40
        # + 15; gradients come with the first B
        pytest.param((20.0, 5.0), 3 * 40 + 60 + 5, id="ahead-with-all-in-flight"),
        # B2 with the recompute inside over two stashes and the gradients of both layers
        pytest.param((20.0, 205.0), 2 * 40 + 14 + 205, id="inside-after-the-gradients-are-there"),
    ],
)
def test_the_fullest_moment_of_scp_by_hand(recomputed, expected):
    saved, workspace = recomputed
    block = LayerChoice(BLOCK, Recompute.FULL, 0)
    embedding = LayerChoice(LayerKind.EMBEDDING, Recompute.FULL, 0)
    head = LayerChoice(LayerKind.HEAD, Recompute.FULL, 0)
    actual = Strategy(
        layout=frame_of(pp=3, schedule=SCP, m=4),
        stages=((embedding, block), (block, block), (block, head)),
    )
    layers = {
        block: LayerBytes(saved=saved, workspace=workspace, gradients=7.0, remade=30.0, alone=5.0)
    }

    assert peak_bytes(actual, 1, layers, ConstantBytes()) == expected
