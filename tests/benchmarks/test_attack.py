"""Attacks on proven plans change what they name, and beat no plan beyond its stated gap.

`python -m benchmarks.search.attack` has 60 requests and more changes of each.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.search.attacks import change
from benchmarks.search.attacks.allowed import LEFT_OUT, layouts, left_out
from benchmarks.search.attacks.moves import (
    block_counts,
    carried,
    fewest,
    most,
    retuned,
    with_ends,
)
from benchmarks.search.attacks.requests import NAMED, SMALL, Request, memory_requests, requests
from benchmarks.search.attacks.rounds import Attack, Outcome, attacked
from parplan.commands.options.target_options import TargetOptions
from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy
from parplan.planner.objective import Objective
from parplan.planner.request import Constraints
from parplan.profiles.models.operator_graph import LayerKind
from tests.helpers.cases import mostly_slow
from tests.helpers.planning import enumerate_candidates, find_plan

EVALUATIONS = 150
BLOCK = LayerChoice(LayerKind.BLOCK, (), 2)
OTHER = replace(BLOCK, zero=1)


def tiny(**pins: object) -> Request:
    return Request(TargetOptions(model="gpt-tiny", gpus=4, gpu="a100-80gb"), Constraints(**pins))  # type: ignore[arg-type]


def two_stages() -> Strategy:
    layout = ParallelLayout(
        mesh=Mesh(pp=2, dp=2, tp=1),
        schedule=Schedule.ONE_F_ONE_B,
        virtual_stages=1,
        micro_batch_size=1,
        num_micro_batches=8,
        sequence_parallel=False,
    )
    embedding = LayerChoice(LayerKind.EMBEDDING, Recompute.NONE, 2)
    head = LayerChoice(LayerKind.HEAD, Recompute.NONE, 2)
    return Strategy(layout=layout, stages=((embedding, BLOCK, BLOCK, BLOCK), (OTHER, head)))


@pytest.mark.parametrize("request_", mostly_slow(SMALL, SMALL[2:3]), ids=str)
def test_nothing_that_an_attack_finds_is_beyond_the_stated_gap(request_: Request) -> None:
    outcome = attacked(request_, EVALUATIONS, seed=0)

    assert not outcome.beyond, (
        f"{100 * outcome.beyond:.3f} % beyond the gap by {', '.join(outcome.kinds)}: {outcome.how}"
    )


@pytest.mark.slow
def test_nothing_is_leaner_than_the_least_redundant_plan() -> None:
    outcome = attacked(
        replace(tiny(pp=(1, 2), tp=(1,)), objective=Objective.MEMORY), EVALUATIONS, seed=0
    )

    assert not outcome.beyond, outcome.how


@pytest.mark.slow
def test_an_attack_prices_the_plan_as_it_was_priced_and_finds_what_is_better_than_a_bad_one() -> (
    None
):
    request = tiny(pp=(1,), tp=(1,))
    worse = find_plan(
        request.question.model,
        request.question.cluster,
        request.question.training,
        constraints=replace(request.pins, zero=(3,)),
    )

    attack = Attack(request, worse, EVALUATIONS, seed=0)
    start, finds = attack.start(), dict(attack.found())

    assert start is not None
    assert start.value == pytest.approx(worse.predicted.step_time_s.value, rel=1e-5)
    assert finds["zero"].value < start.value
    assert "zero" in change.kinds(start.strategy, finds["zero"].strategy)


@pytest.mark.slow
def test_the_same_seed_attacks_alike() -> None:
    first = attacked(tiny(pp=(1, 2), tp=(1,)), EVALUATIONS, seed=3)
    second = attacked(tiny(pp=(1, 2), tp=(1,)), EVALUATIONS, seed=3)

    assert (first.best, first.by_kind, first.evaluations, first.how) == (
        second.best,
        second.by_kind,
        second.evaluations,
        second.how,
    )


def test_what_is_better_within_the_gap_does_not_count_as_beyond_it() -> None:
    outcome = Outcome(
        request=tiny(),
        plan=10.0,
        gap=0.01,
        best=9.95,
        kinds=(),
        how="",
        plan_how="",
        peak_gib=1.0,
        smaller_peak_gib=None,
        by_kind={},
        evaluations=1,
        search_s=0.0,
        attack_s=0.0,
    )

    assert (outcome.beats, outcome.beyond) == (pytest.approx(0.005), 0.0)
    assert replace(outcome, best=9.8).beyond == pytest.approx(0.01)
    assert replace(outcome, plan=None, gap=0.0).beyond == 1.0


def test_moves_change_what_they_name() -> None:
    strategy = two_stages()

    assert retuned(strategy, (0,), BLOCK, OTHER, 2, last=True).stages[0][1:] == (
        BLOCK,
        OTHER,
        OTHER,
    )
    assert retuned(strategy, (0,), BLOCK, OTHER, 1, last=False).stages[0][1:] == (
        OTHER,
        BLOCK,
        BLOCK,
    )
    moved = carried(strategy, 0, 1)
    assert moved is not None
    assert block_counts(moved) == [2, 2]
    assert moved.stages[1][:2] == (OTHER, OTHER)
    assert carried(strategy, 1, 0) is None  # a stage keeps a block
    assert [
        stage[end].zero
        for stage, end in zip(with_ends(strategy, 0, 1).stages, (0, -1), strict=True)
    ] == [0, 1]


@pytest.mark.parametrize("limit", range(8))
def test_the_most_and_the_fewest_that_fit_are_those_of_trying_all(limit: int) -> None:
    assert most(lambda n: n <= limit, 6) == min(limit, 6)
    assert fewest(lambda n: n >= limit, 7) == limit


def test_frames_are_all_that_the_search_has_and_those_that_it_does_not_try() -> None:
    request = Request(TargetOptions(model="gpt-tiny", gpus=4, gpu="a100-80gb", stack="parplan"))
    every = set(layouts(request.question, request.pins))

    searched = enumerate_candidates(
        request.question.model, request.question.cluster, request.question.training, request.pins
    ).layouts

    assert set(searched) <= every
    assert any(
        layout.schedule is Schedule.GPIPE and layout.num_micro_batches > layout.mesh.pp
        for layout in every
    )
    assert not set(layouts(request.question, Constraints(pp=(1,)))) & {
        layout for layout in every if layout.mesh.pp > 1
    }


def test_what_is_left_out_has_a_reason_and_all_else_counts() -> None:
    strategy, pins = two_stages(), Constraints()
    ahead = replace(strategy, layout=replace(strategy.layout, schedule=Schedule.EARLY_RECOMPUTE))
    large = replace(strategy, layout=replace(strategy.layout, micro_batch_size=128))

    assert left_out(strategy, pins) is None
    assert left_out(ahead, pins) is None
    assert (
        left_out(retuned(ahead, (0,), BLOCK, replace(BLOCK, zero=3), 1, last=True), pins)
        in LEFT_OUT
    )
    assert left_out(large, pins) in LEFT_OUT
    assert left_out(large, Constraints(micro_batch_size=(128,))) is None


def test_requests_are_fixed_and_each_is_there_once() -> None:
    listed = list(requests(20, seed=0))

    assert listed == list(requests(20, seed=0))
    assert len(set(map(str, listed))) == 20
    assert listed[: len(NAMED)] == list(NAMED)
    assert all(request.objective is Objective.MEMORY for request in memory_requests(2, seed=0))
