"""Schedules that recompute ahead: columns, bounds and plans against prices and brute force."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import AHEAD, LAST_KEEPS_ALL, Schedule
from parplan.costmodels.step import price_step
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.candidates.lower_bounds import ahead_bounds_s, time_bound
from parplan.planner.master import evaluate, lower_bound_s
from parplan.planner.plan.derived import blocks_of
from parplan.planner.request import Constraints, SearchOptions
from parplan.planner.stage_columns.block_counts import to_strategy
from parplan.planner.stage_columns.columns import RankColumns
from parplan.planner.stage_columns.mix_table import MixTable
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.stack import NEUTRAL
from parplan.profiles.units import GIB
from tests.helpers.cases import mostly_slow
from tests.helpers.instances import every_strategy, peak_bytes, random_instance
from tests.helpers.planning import enumerate_candidates, estimate_plan, find_plan

SEEDS = mostly_slow((1, 3, 4, 8), {4})
SCHEDULES = sorted(AHEAD)
LEVELS = tuple(Recompute)


def instance_of(seed):
    """Returns two GPUs and four blocks, so that four micro-batches go through two stages."""
    instance = random_instance(seed)
    return replace(
        instance,
        cluster=with_gpus(instance.cluster, 2, 2),
        model=replace(instance.model, num_layers=4),
    )


def frame_of(schedule, pp=2, dp=1, m=4):
    return ParallelLayout(
        mesh=Mesh(pp=pp, dp=dp, tp=1),
        schedule=schedule,
        virtual_stages=1,
        micro_batch_size=1,
        num_micro_batches=m,
        sequence_parallel=False,
    )


@cache
def every_price(seed, schedule):
    """Prices every split and mix of levels in which the schedule lets the last stage recompute."""
    instance, layout = instance_of(seed), frame_of(schedule)
    price_cache = instance.price_cache()
    strategies = every_strategy(layout, instance.model.num_layers)
    kept = (
        strategy
        for strategy in strategies
        if schedule not in LAST_KEEPS_ALL
        or all(choice.recompute is Recompute.NONE for choice in strategy.stages[-1])
    )
    return [(strategy, price_step(strategy, price_cache)) for strategy in kept]


@pytest.mark.parametrize("stack", ["megatron-core", "megatron-deepspeed"])
@pytest.mark.parametrize(
    ("schedule", "pp", "dp"),
    [
        (Schedule.SCP, 4, 2),
        (Schedule.SCP, 2, 4),
        (Schedule.EARLY_RECOMPUTE, 4, 2),
        (Schedule.LAST_NO_RECOMPUTE, 8, 1),
    ],
)
def test_columns_have_the_price_and_the_memory_of_the_strategy_that_they_become(
    schedule, pp, dp, stack
):
    from parplan.costmodels.price_cache import PriceCache
    from parplan.profiles.machines.machine_catalog import load_stack
    from parplan.profiles.machines.shipped_profiles import machine_for

    training = TrainingSpec(global_batch_size=32, seq_length=1024, stack=load_stack(stack))
    price_cache = PriceCache(
        load_model("gpt-1.5b").spec, training, machine_for(with_gpus(load_cluster("a100-80gb"), 8))
    )
    layout, table = frame_of(schedule, pp, dp, 32 // dp), MixTable(price_cache, Constraints())
    ranks = [RankColumns(rank, layout, table) for rank in range(pp)]
    for limit_gib in (9.0, 12.0, 30.0):
        columns = tuple(
            next(iter(rank.fastest(48 // pp, limit_gib * GIB)[-1:]), None) for rank in ranks
        )
        if None in columns:
            continue
        price = price_step(to_strategy(layout, columns), price_cache)
        relaxed = [rank.relaxed(48 // pp, limit_gib * GIB) for rank in ranks]

        assert evaluate(layout, columns, proven=True).step_s == pytest.approx(
            price.closed_form_s, rel=1e-12
        )
        for column, memory, redundant in zip(columns, price.memory, price.redundant, strict=True):
            assert column.memory_bytes == pytest.approx(memory.total, rel=1e-9)
            assert column.memory_bytes <= limit_gib * GIB
            assert column.redundant_bytes == pytest.approx(redundant.total, rel=1e-9)
        assert lower_bound_s(layout, relaxed, 48) <= price.closed_form_s * (1 + 1e-12)
    assert None not in columns


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", SEEDS)
def test_no_strategy_is_below_the_bounds_of_its_frame(seed, schedule):
    price_cache = instance_of(seed).price_cache()
    usual_s = min(price.closed_form_s for _, price in every_price(seed, Schedule.ONE_F_ONE_B))
    for pins in (
        Constraints(),
        Constraints(recompute=(Recompute.FULL,)),
        Constraints(recompute=(Recompute.SELECTIVE,)),
    ):
        table = MixTable(price_cache, pins)
        allowed = set(pins.recompute or LEVELS)
        steps_s = [
            price.closed_form_s
            for strategy, price in every_price(seed, schedule)
            if {
                c.recompute
                for stage in strategy.stages[:-1]
                for c in stage
                if c.kind is LayerKind.BLOCK
            }
            <= allowed
        ]
        layout = frame_of(schedule)
        assert time_bound(layout, table).step_s <= min(steps_s) * (1 + 1e-12)
        if pins.recompute is None:
            bounds_s = list(ahead_bounds_s(layout, usual_s, table))
            assert bounds_s == sorted(bounds_s)
            assert bounds_s[-1] <= min(steps_s) * (1 + 1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_search_finds_the_best_of_all_strategies(seed, schedule):
    instance = instance_of(seed)
    prices = [
        (strategy, price)
        for strategy, price in every_price(seed, schedule)
        if not instance.model.tied_embeddings
        or (strategy.stages[0][0].zero == 0) == (strategy.stages[-1][-1].zero == 0)
    ]
    peaks = sorted({round(peak_bytes(price)) for _, price in prices})
    pins = Constraints(
        pp=(2,),
        tp=(1,),
        micro_batch_size=(1,),
        schedule=(schedule,),
        recompute=LEVELS,
        megatron_sharding=True,
    )
    for limit in (peaks[len(peaks) // 4] + 1, peaks[-1] + 1):
        best_s = min(price.closed_form_s for _, price in prices if peak_bytes(price) <= limit)
        plan = find_plan(
            instance.model,
            instance.cluster,
            instance.training,
            constraints=pins,
            options=SearchOptions(memory_limit_bytes=limit),
        )
        assert plan.pipeline.schedule == schedule
        assert (
            plan.search.fastest_step_time_s <= best_s * (1 + 1e-9) + 1e-6
        )  # strategies have one ZeRO stage a rank
        assert plan.search.bound <= best_s + 1e-6


@pytest.mark.slow
def test_where_memory_binds_the_shifted_critical_path_is_faster_than_1f1b_and_the_search_takes_it():
    entry, cluster = load_model("gpt-1.5b"), with_gpus(load_cluster("a10g-24gb"), 8)
    training, limit = (
        TrainingSpec(global_batch_size=16, seq_length=1024, stack=NEUTRAL),
        round(7.2 * GIB),
    )

    def fastest(*schedules):
        pins = Constraints(pp=(4,), dp=(2,), micro_batch_size=(1,), zero=(0, 1), schedule=schedules)
        return find_plan(
            entry.spec,
            cluster,
            training,
            constraints=pins,
            options=SearchOptions(memory_limit_bytes=limit),
        )

    usual, free = (
        fastest(Schedule.ONE_F_ONE_B),
        fastest(Schedule.ONE_F_ONE_B, Schedule.EARLY_RECOMPUTE, Schedule.SCP),
    )

    assert any(layer.recompute for layer in usual.layer_plans.values())
    assert free.pipeline.schedule in AHEAD
    assert free.predicted.step_time_s.value < usual.predicted.step_time_s.value
    assert max(stage.total for stage in free.predicted.memory_gib) * GIB <= limit


@pytest.mark.slow
def test_where_nothing_is_recomputed_no_schedule_that_moves_recompute_is_replayed():
    entry, cluster = load_model("gpt-1.5b"), with_gpus(load_cluster("a100-80gb"), 8)
    pins = Constraints(
        pp=(4,), schedule=(Schedule.ONE_F_ONE_B, Schedule.EARLY_RECOMPUTE, Schedule.SCP)
    )
    plan = find_plan(
        entry.spec,
        cluster,
        TrainingSpec(global_batch_size=32, seq_length=1024, stack=NEUTRAL),
        constraints=pins,
    )

    assert {
        plan.pipeline.schedule,
        *(runner_up.pipeline.schedule for runner_up in plan.search.runners_up),
    } == {Schedule.ONE_F_ONE_B}
    assert plan.search.gap < 0.001


def test_last_no_recompute_is_tried_only_when_pinned_and_where_something_can_be_recomputed():
    instance = instance_of(1)

    def schedules(**pins):
        candidates = enumerate_candidates(
            instance.model, instance.cluster, instance.training, Constraints(**pins)
        )
        return {layout.schedule for layout in candidates.layouts}

    assert schedules() >= {Schedule.EARLY_RECOMPUTE, Schedule.SCP}
    assert Schedule.LAST_NO_RECOMPUTE not in schedules()
    assert schedules(schedule=(Schedule.LAST_NO_RECOMPUTE,)) == {
        Schedule.ONE_F_ONE_B,
        Schedule.LAST_NO_RECOMPUTE,
    }
    assert not AHEAD & schedules(recompute=(Recompute.NONE,))


def test_by_hand_full_recompute_leaves_the_last_stage_out():
    instance = instance_of(3)
    plan = estimate_plan(
        instance.model,
        instance.cluster,
        instance.training,
        frame_of(Schedule.SCP),
        recompute=Recompute.FULL,
    )

    recomputing = [
        {bool(plan.layer_plans[run.plan].recompute) for run in stage.layers if blocks_of(plan, run)}
        for stage in plan.stages
    ]
    assert recomputing == [{True}, {False}]
    with pytest.raises(ConfigError, match="micro-batches"):
        estimate_plan(
            instance.model,
            instance.cluster,
            replace(instance.training, global_batch_size=3),
            frame_of(Schedule.SCP, m=3),
        )
