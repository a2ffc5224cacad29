"""A rule for the recompute of the stages: its shares by hand, and the search under it."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.step import StepPrice, price_step
from parplan.costmodels.strategy import ParallelLayout, Strategy
from parplan.planner.baselines.stage_aware import stage_aware
from parplan.planner.forbid import parse_bans
from parplan.planner.objective import Objective
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.plan_strategy import strategy_of
from parplan.planner.request import Constraints, SearchOptions
from parplan.planner.stage_recompute import (
    RecomputeRule,
    illegal_stage_recompute,
    listed,
    one_knob,
    parse_stage_recompute,
    recomputed,
)
from parplan.profiles.errors import ConfigError, InfeasibleError
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.stack import NEUTRAL
from parplan.profiles.units import GIB
from tests.helpers.planning import estimate_plan, find_plan

FRAME = ParallelLayout(
    mesh=Mesh(pp=4, dp=2, tp=1),
    schedule=Schedule.ONE_F_ONE_B,
    virtual_stages=1,
    micro_batch_size=2,
    num_micro_batches=8,
    sequence_parallel=False,
)
SHIFTED = replace(FRAME, schedule=Schedule.SCP)
HALF, QUARTER = Fraction(1, 2), Fraction(1, 4)
MEMORY = RecomputeRule()
MODEL = replace(load_model("gpt-1.5b").spec, num_layers=9)
TRAINING = TrainingSpec(global_batch_size=16, seq_length=1024, stack=NEUTRAL)
CLUSTER = with_gpus(load_cluster("a10g-24gb"), 4)
PINS = Constraints(pp=(2,), dp=(2,), tp=(1,), micro_batch_size=(2,))


@pytest.mark.parametrize(
    ("layout", "r0", "shares"),
    [
        (FRAME, "1/2", ("1/2", "1/4", 0, 0)),  # 1 - 3/2 * 1/2, and 1 - 3 * 1/2 below 0
        (SHIFTED, "1/2", ("1/2", "1/4", "1/4", 0)),
        (FRAME, "9/10", ("9/10", "17/20", "7/10", 0)),
        (FRAME, 1, (1, 1, 1, 0)),
        (FRAME, 0, (0, 0, 0, 0)),
    ],
)
def test_one_knob_by_hand(layout, r0, shares):
    assert one_knob(Fraction(r0), layout) == tuple(map(Fraction, shares))


def test_a_short_list_goes_on_with_its_last_share_and_layers_are_rounded_down():
    assert listed((Fraction(1, 2), Fraction(1, 4)), FRAME) == tuple(
        map(Fraction, ("1/2", "1/4", "1/4", "1/4"))
    )
    assert recomputed((5, 7, 8, 3), listed((Fraction(1, 2), Fraction(1, 4)), FRAME)) == (2, 1, 2, 0)


def test_a_model_in_one_stage_is_all_of_it_the_first_stage():
    assert one_knob(HALF, replace(FRAME, mesh=Mesh(pp=1, dp=8, tp=1))) == (HALF,)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("memory", MEMORY),
        ("0.5", RecomputeRule((HALF,))),
        ("1/2", RecomputeRule((HALF,))),
        ("0.5,.25,0", RecomputeRule((HALF, QUARTER, Fraction(0)))),
    ],
)
def test_a_rule_is_a_share_several_shares_or_memory(text, expected):
    assert parse_stage_recompute(text) == expected


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("1.5", "has 1.5, a share of layers is from 0 to 1"),
        ("0.5,-1", "has -1, a share"),
        ("half", "is 'half', it must be shares of layers or memory"),
        ("0.5,", "it must be shares of layers or memory"),
        ("1/0", "it must be shares of layers or memory"),
    ],
)
def test_other_rules_are_errors(text, match):
    with pytest.raises(ConfigError, match=match):
        parse_stage_recompute(text)


@pytest.mark.parametrize(
    ("layout", "rule", "reason"),
    [
        (FRAME, RecomputeRule((HALF,)), None),
        (FRAME, RecomputeRule((HALF,) * 5), "has 5 shares, pp is 4"),
        (SHIFTED, RecomputeRule((HALF,)), None),
        (SHIFTED, RecomputeRule((HALF, HALF)), "the last stage of scp recomputes nothing"),
        (SHIFTED, MEMORY, None),
        (replace(FRAME, virtual_stages=2, schedule=Schedule.INTERLEAVED), MEMORY, "one model"),
        (replace(FRAME, virtual_stages=2, schedule=Schedule.ZBV), MEMORY, "without recompute"),
        (replace(FRAME, chunked=True), MEMORY, "states in chunks"),
    ],
)
def test_layouts_that_no_rule_has(layout, rule, reason):
    found = illegal_stage_recompute(layout, rule)

    assert found is None if reason is None else reason in found


@pytest.mark.parametrize(
    ("pins", "match"),
    [
        ({"recompute": (Recompute.FULL,)}, "none is excluded"),
        ({"recompute": (Recompute.NONE, Recompute.SELECTIVE)}, "full is excluded"),
        ({"forbid": parse_bans(("recompute=none",))}, "none is excluded"),
        ({"pp": (1,)}, "has 2 shares, --pp has at most 1 stages"),
        ({"virtual_stages": (2, 3)}, "--virtual-stages excludes it"),
        ({"schedule": (Schedule.ZBV,)}, "--schedule zbv has several"),
    ],
)
def test_pins_that_leave_no_rule_are_errors(pins, match):
    with pytest.raises(ConfigError, match=match):
        Constraints(recompute_first_stage=RecomputeRule((HALF, HALF)), **pins)


def book() -> PriceCache:
    return PriceCache(MODEL, TRAINING, machine_for(CLUSTER))


def counts_of(plan: Plan) -> list[tuple[int, int]]:
    """Returns the blocks of each stage, and those that are recomputed in full."""
    prices = book()
    levels = {
        prices.recompute_operators(LayerKind.BLOCK, level): level is Recompute.FULL
        for level in (Recompute.NONE, Recompute.FULL)
    }
    counts = []
    for stage in strategy_of(plan, prices).stages:
        blocks = [choice for choice in stage if choice.kind is LayerKind.BLOCK]
        again = [
            levels[prices.recompute_operators(LayerKind.BLOCK, block.recompute)] for block in blocks
        ]
        counts.append((len(blocks), sum(again)))
    return counts


def with_zeros(strategy: Strategy, zeros: tuple[int, int, int, int]) -> Strategy:
    """Returns a strategy of two stages with a ZeRO stage for kept and for recomputed layers."""
    stages = []
    for stage, (kept, again) in zip(strategy.stages, (zeros[:2], zeros[2:]), strict=True):
        stages.append(
            tuple(
                replace(choice, zero=again if choice.recompute is Recompute.FULL else kept)
                for choice in stage
            )
        )
    return replace(strategy, stages=tuple(stages))


def every_plan(
    rule: RecomputeRule, schedule: Schedule, limit_bytes: float, zeros: tuple[int, ...]
) -> list[StepPrice]:
    """Prices all numbers of blocks and ZeRO stages of two stages whose recompute obeys a rule."""
    layout = replace(FRAME, mesh=Mesh(pp=2, dp=2, tp=1), num_micro_batches=4, schedule=schedule)
    prices, found = book(), []
    for first in range(1, MODEL.num_layers):
        blocks = first, MODEL.num_layers - first
        for each in product(zeros, repeat=4):
            fitting = {}
            for counts in product(
                *(rule.counts(count, stage, layout) for stage, count in enumerate(blocks))
            ):
                price = price_step(
                    with_zeros(stage_aware(layout, blocks, counts, each[0]), each), prices
                )
                if all(memory.total <= limit_bytes for memory in price.memory):
                    fitting[counts] = price
            least = tuple(min(column) for column in zip(*fitting, strict=True)) if fitting else ()
            if fitting:
                found.append(fitting[least])
    return found


@pytest.mark.parametrize(
    ("rule", "schedule", "limit_gib", "zeros"),
    [
        pytest.param(
            RecomputeRule((HALF,)), Schedule.ONE_F_ONE_B, 20, (0, 1, 2), marks=pytest.mark.slow
        ),
        (RecomputeRule((HALF, QUARTER)), Schedule.ONE_F_ONE_B, 20, (1, 3)),
        (RecomputeRule((Fraction(1),)), Schedule.EARLY_RECOMPUTE, 20, (1,)),
        (RecomputeRule((HALF,)), Schedule.SCP, 20, (1,)),
        (MEMORY, Schedule.ONE_F_ONE_B, 4.75, (1,)),
        (MEMORY, Schedule.EARLY_RECOMPUTE, 5.1, (1,)),
    ],
)
def test_the_search_under_a_rule_finds_the_fastest_plan_that_obeys_it(
    rule, schedule, limit_gib, zeros
):
    pins = replace(PINS, schedule=(schedule,), zero=zeros, recompute_first_stage=rule)
    every = every_plan(rule, schedule, limit_gib * GIB, zeros)
    fastest_s = min(price.step_s for price in every)

    plan = find_plan(
        MODEL,
        CLUSTER,
        TRAINING,
        constraints=pins,
        options=SearchOptions(memory_limit_bytes=round(limit_gib * GIB)),
    )

    assert plan.predicted.step_time_s.value == pytest.approx(fastest_s, rel=2e-3)
    assert plan.search.bound <= fastest_s * (1 + 1e-6)
    layout = replace(FRAME, mesh=Mesh(pp=2, dp=2, tp=1), num_micro_batches=4, schedule=schedule)
    for stage, (blocks, again) in enumerate(counts_of(plan)):
        assert again in rule.counts(blocks, stage, layout)
    assert any(again for _, again in counts_of(plan))


@pytest.mark.slow
def test_more_memory_leaves_less_recompute_and_none_fits_without_memory():
    def planned(limit_gib: float) -> Plan:
        options = SearchOptions(memory_limit_bytes=round(limit_gib * GIB))
        pins = replace(PINS, zero=(1,), recompute_first_stage=MEMORY)
        return find_plan(MODEL, CLUSTER, TRAINING, constraints=pins, options=options)

    tight, wide = (sum(again for _, again in counts_of(planned(each))) for each in (4.75, 5))
    assert tight > wide
    with pytest.raises(InfeasibleError, match="does not fit on 4 x a10g"):
        planned(2)


@pytest.mark.slow
@pytest.mark.parametrize("objective", [Objective.MEMORY, Objective.PEAK])
def test_other_objectives_obey_a_rule(objective):
    pins = replace(PINS, recompute_first_stage=RecomputeRule((HALF, Fraction(1))))

    plan = find_plan(MODEL, CLUSTER, TRAINING, objective, constraints=pins)

    (first, first_again), (second, second_again) = counts_of(plan)
    assert (first_again, second_again) == (first // 2, second)


@pytest.mark.parametrize("rule", [RecomputeRule((HALF,)), MEMORY])
def test_an_estimate_is_the_plan_of_a_search_with_all_else_pinned(rule):
    options = SearchOptions(memory_limit_bytes=7 * GIB)
    pins = replace(PINS, zero=(1,), schedule=(Schedule.ONE_F_ONE_B,), recompute_first_stage=rule)
    found = find_plan(MODEL, CLUSTER, TRAINING, constraints=pins, options=options)
    layout = replace(FRAME, mesh=Mesh(pp=2, dp=2, tp=1), num_micro_batches=4)
    choices = {"zero": 1, "blocks": [count for count, _ in counts_of(found)]}

    priced = estimate_plan(
        MODEL, CLUSTER, TRAINING, layout, recompute_first_stage=rule, options=options, **choices
    )

    assert counts_of(priced) == counts_of(found)
    assert priced.predicted.step_time_s == found.predicted.step_time_s
    assert priced.predicted.memory_gib == found.predicted.memory_gib


def test_an_estimate_refuses_a_level_beside_a_rule_and_a_stage_that_never_fits():
    layout = replace(FRAME, mesh=Mesh(pp=2, dp=2, tp=1), num_micro_batches=4)
    with pytest.raises(ConfigError, match="exclude each other"):
        estimate_plan(
            MODEL,
            CLUSTER,
            TRAINING,
            layout,
            recompute=Recompute.FULL,
            recompute_first_stage=MEMORY,
        )
    with pytest.raises(InfeasibleError, match=r"stage 0 does not fit 2\.0 GiB"):
        estimate_plan(
            MODEL,
            CLUSTER,
            TRAINING,
            layout,
            recompute_first_stage=MEMORY,
            options=SearchOptions(memory_limit_bytes=2 * GIB),
        )
