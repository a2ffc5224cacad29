"""A rule for the recompute of the stages of a traced module: the search obeys it."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import combinations, pairwise, product

import pytest

from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
from parplan.costmodels.layers.recompute import Recompute, RecomputedOperators
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.step import StepPrice, price_step
from parplan.planner.request import Constraints, SearchOptions
from parplan.planner.stage_recompute import RecomputeRule
from parplan.planner.traced.estimate_traced import estimate_traced_plan
from parplan.planner.traced.stage_rules import parse_stages
from parplan.planner.traced.traced_strategy import every_block
from parplan.profiles.errors import ConfigError, InfeasibleError
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.stack import NEUTRAL
from parplan.profiles.units import MIB
from tests.helpers.planning import find_traced_plan, request
from tests.planner.traced.test_traced_search import (
    CLUSTER,
    FRAME_OF_TWO,
    fastest_of,
    searched,
    strategy,
    uneven,
)

TRAINING = TrainingSpec(global_batch_size=65536, seq_length=1, stack=NEUTRAL)
NODE = replace(CLUSTER, nodes=1, gpus_per_node=4)
HALF = Fraction(1, 2)
MEMORY = RecomputeRule()
PINS = Constraints(pp=(2,), dp=(2,), tp=(1,), micro_batch_size=(8192,), zero=(0, 2))


def frees_memory(prices: LayerPriceCache, shard: int) -> bool:
    """Returns whether a shard saves less when it runs again; else a rule leaves it."""
    key = prices.key(shard, shard)
    again, whole = (
        prices.activations(key, 8192, FRAME_OF_TWO.sharding, level).saved
        for level in (Recompute.FULL, Recompute.NONE)
    )
    return again < whole


def every_plan(
    rule: RecomputeRule, schedule: Schedule, limit_bytes: float
) -> list[tuple[tuple[int, ...], StepPrice]]:
    """Prices all cuts and ZeRO stages of two stages under a rule, with the recomputed shards."""
    search = searched(uneven(), PINS, training=TRAINING, cluster=NODE)
    layout = replace(FRAME_OF_TWO, schedule=schedule)
    size, found = search.price_cache.num_layers, []
    body = every_block(search.price_cache)
    for (cut,) in combinations(range(1, size), 1):
        cuts = (0, cut, size)
        for zeros in product((0, 2), repeat=2):
            fits: dict[tuple[int, ...], StepPrice] = {}
            stages = [[k for k in range(*ends) if k in body] for ends in pairwise(cuts)]
            by_stage = [rule.counts(len(each), k, layout) for k, each in enumerate(stages)]
            for counts in product(*by_stage):
                levels: dict[int, RecomputedOperators] = {
                    shard: Recompute.FULL
                    for each, count in zip(stages, counts, strict=True)
                    for shard in each[len(each) - count :]
                    if frees_memory(search.price_cache, shard)
                }
                made = strategy(search.price_cache, layout, cuts, zeros, levels)
                price = price_step(made, search.price_cache)
                if all(memory.total <= limit_bytes for memory in price.memory):
                    fits[counts] = price
            if fits:
                least = tuple(min(column) for column in zip(*fits, strict=True))
                found.append((least, fits[least]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [Schedule.ONE_F_ONE_B, Schedule.EARLY_RECOMPUTE])
@pytest.mark.parametrize(
    "rule", [RecomputeRule((HALF,)), RecomputeRule((Fraction(1), HALF)), MEMORY]
)
def test_the_search_under_a_rule_finds_the_fastest_cuts_that_obey_it(rule, schedule):
    pins = replace(PINS, schedule=(schedule,), recompute_first_stage=rule)
    peaks = sorted(
        max(memory.total for memory in price.memory)
        for _, price in every_plan(RecomputeRule((Fraction(0),)), schedule, float("inf"))
    )
    limit = float("inf") if rule.shares else peaks[0] - MIB
    every = every_plan(rule, schedule, limit)
    counts, fastest = min(every, key=lambda plan: plan[1].closed_form_s)
    options = SearchOptions(memory_limit_bytes=None if rule.shares else int(limit))

    result = fastest_of(searched(uneven(), pins, options, training=TRAINING, cluster=NODE))

    assert any(counts)
    assert result.finished
    assert [solved.value for solved in result.solved] == [
        pytest.approx(fastest.closed_form_s, rel=1e-9)
    ]
    assert result.bound <= fastest.closed_form_s * (1 + 1e-9)


def test_an_estimate_has_the_shares_of_its_rule_and_shards_run_again_that_free_memory():
    pins = replace(PINS, zero=(0,), schedule=(Schedule.ONE_F_ONE_B,))
    made = request(uneven().model, NODE, TRAINING, constraints=pins)
    ruled = replace(
        made, constraints=replace(pins, recompute_first_stage=RecomputeRule((HALF, Fraction(1))))
    )

    plan = estimate_traced_plan(ruled, parse_stages("4,3"))

    assert [stage.recompute for stage in plan.stages] == [(2,), (5, 6)]
    found = find_traced_plan(
        made.model, NODE, TRAINING, constraints=ruled.constraints, how=parse_stages("4,3")
    )
    assert found.plan.predicted.step_time_s == plan.predicted.step_time_s


def test_a_stage_that_no_recompute_makes_fit_is_an_error():
    pins = replace(PINS, zero=(0,), schedule=(Schedule.ONE_F_ONE_B,))
    options = SearchOptions(memory_limit_bytes=MIB)
    made = request(
        uneven().model,
        NODE,
        TRAINING,
        constraints=replace(pins, recompute_first_stage=MEMORY),
        options=options,
    )

    with pytest.raises(InfeasibleError, match="stage 0 does not fit"):
        estimate_traced_plan(made, parse_stages("4,3"))


def test_interleaved_parts_have_no_rule():
    with pytest.raises(ConfigError, match="one model chunk a rank"):
        replace(PINS, schedule=(Schedule.INTERLEAVED,), recompute_first_stage=MEMORY)
