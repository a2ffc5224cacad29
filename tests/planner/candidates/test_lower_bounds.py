"""Lower bounds of a layout never exceed a strategy's price, and are tight where they can be."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from functools import cache

import pytest

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.model_states import ideal_states
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.step import price_step
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy
from parplan.planner.candidates.lower_bounds import (
    in_reach,
    redundancy_bound_bytes,
    time_bound,
)
from parplan.planner.candidates.memory_bounds import corner_bound_s, memory_bound_s
from parplan.planner.request import Constraints, SearchOptions
from parplan.planner.search.one_candidate import relaxed_bound_s
from parplan.planner.search.search_session import DescribedPrices, SearchSession
from parplan.planner.stage_columns.mix_table import MixTable
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack, with_gpus
from parplan.profiles.models.operator_graph import LayerKind
from tests.helpers.cases import mostly_slow
from tests.helpers.instances import every_price, every_strategy, random_instance, redundant_bytes
from tests.helpers.planning import enumerate_candidates, request

SEEDS = mostly_slow((0, 1, 2, 9), {9})
PINNED = [
    pytest.param(Constraints(), id="free"),
    pytest.param(Constraints(recompute=(Recompute.FULL,)), id="full-recompute"),
    pytest.param(
        Constraints(recompute=(Recompute.SELECTIVE, Recompute.NONE), zero=(2, 3)), id="zero-2-or-3"
    ),
]


@cache
def prices(seed):
    return every_price(random_instance(seed))


def allowed(strategy, pins):
    choices = [choice for stage in strategy.stages for choice in stage]
    levels = {choice.recompute for choice in choices if choice.kind is LayerKind.BLOCK}
    zeros = {choice.zero for choice in choices}
    return levels <= set(pins.recompute or Recompute) and (
        strategy.layout.mesh.dp == 1 or zeros <= set(pins.zero or range(4))
    )


def memory_bound_within_its_own_memory_s(strategy, price, table):
    own_bytes = max(memory.total for memory in price.memory)
    bound = strategy.layout, table, own_bytes, time_bound(strategy.layout, table)
    within_s = memory_bound_s(*bound)
    assert corner_bound_s(*bound) <= within_s * (1 + 1e-9)
    return within_s


@pytest.mark.parametrize("stack", mostly_slow(["megatron-core", "parplan"], {"megatron-core"}))
@pytest.mark.parametrize("seed", SEEDS)
def test_no_strategy_is_below_the_bound_within_its_own_memory(seed, stack):
    """Gradients of the second stack come and go."""
    instance = random_instance(seed)
    instance = replace(instance, training=replace(instance.training, stack=load_stack(stack)))
    table = MixTable(instance.price_cache(), Constraints())
    raised = 0
    for strategy, price in every_price(instance):
        bound_s = memory_bound_within_its_own_memory_s(strategy, price, table)
        assert bound_s <= price.closed_form_s * (1 + 1e-12)
        raised += bound_s > time_bound(strategy.layout, table).step_s * (1 + 1e-9)
    assert raised


@pytest.mark.parametrize("seed", mostly_slow(range(2), {1}))
def test_no_strategy_with_virtual_stages_is_below_the_bounds_of_its_frame(seed):
    instance = random_instance(seed)
    instance = replace(instance, model=replace(instance.model, num_layers=4))
    price_cache, table = instance.price_cache(), MixTable(instance.price_cache(), Constraints())
    layouts = [
        layout
        for layout in enumerate_candidates(
            instance.model, instance.cluster, instance.training, Constraints()
        ).layouts
        if layout.virtual_stages > 1
    ]
    assert layouts
    for layout in layouts[:3]:
        step_s, redundant = time_bound(layout, table).step_s, redundancy_bound_bytes(layout, table)
        for strategy in itertools.islice(every_strategy(layout, 4), 0, None, 5):
            price = price_step(strategy, price_cache)
            assert step_s <= price.closed_form_s * (1 + 1e-12)
            within_s = memory_bound_within_its_own_memory_s(strategy, price, table)
            assert step_s <= within_s <= price.closed_form_s * (1 + 1e-12)
            assert redundant <= redundant_bytes(strategy, price) * (1 + 1e-12) + 1


def drawn(layout, num_layers, draw, count):
    """Strategies with chunks of one block, each with a recompute and a ZeRO stage of its own."""
    last = layout.num_virtual_stages - 1
    for _ in range(count):
        ends, stages = draw.choice((0, 1)), []
        for stage in range(num_layers):
            level, zero = draw.choice(list(Recompute)), draw.choice((0, 1))
            chunk = [LayerChoice(LayerKind.BLOCK, level, zero)]
            if stage == 0:
                chunk.insert(0, LayerChoice(LayerKind.EMBEDDING, Recompute.NONE, ends))
            if stage == last:
                chunk.append(LayerChoice(LayerKind.HEAD, Recompute.NONE, ends))
            stages.append(tuple(chunk))
        yield Strategy(layout=layout, stages=tuple(stages))


@pytest.mark.slow
@pytest.mark.parametrize("seed", mostly_slow(range(3), {1}))
def test_no_choice_for_each_block_is_below_the_bounds_of_chunks_with_one_block(seed):
    instance = random_instance(seed)
    instance = replace(instance, model=replace(instance.model, num_layers=8))
    pins = Constraints(zero=(0, 1), megatron_sharding=True)
    cluster = with_gpus(instance.cluster, 4, 4)
    prices = DescribedPrices(request(instance.model, cluster, instance.training, constraints=pins))
    layouts = [each for each in prices.space.layouts if each.num_virtual_stages == 8]
    interleaved = [each for each in layouts if each.schedule is Schedule.INTERLEAVED]
    draw, raised = random.Random(seed), 0
    assert interleaved
    for layout in interleaved[:4]:
        for strategy in drawn(layout, 8, draw, 25):
            price = price_step(strategy, prices.price_cache)
            own_bytes = max(memory.total for memory in price.memory)
            session = SearchSession(prices, SearchOptions(), None).within(own_bytes * (1 + 1e-9))
            relaxed = session.relaxed(layout, math.inf)
            bounds_s = (
                memory_bound_s(layout, prices.table, own_bytes, prices.time_bound(layout)),
                relaxed_bound_s(layout, relaxed, math.inf, session),
            )
            assert max(bounds_s) <= price.closed_form_s * (1 + 1e-9)
            raised += max(bounds_s) > prices.time_bound(layout).step_s * (1 + 1e-9)
    assert raised


def test_the_tail_of_the_bound_is_that_of_one_rank():
    """One micro-batch on a slow network: the reductions of the fuller rank are most of the step."""
    instance = random_instance(1)
    cluster = with_gpus(load_cluster("a100-80gb"), 4, 2)
    instance = replace(
        instance,
        model=replace(instance.model, num_layers=4, vocab_size=128, tied_embeddings=False),
        cluster=replace(
            cluster,
            intra_node=replace(cluster.intra_node, bytes_per_s=1e6),
            nic=replace(cluster.nic, bytes_per_s=1e6),
        ),
    )
    layout = ParallelLayout(
        mesh=Mesh(pp=2, dp=2, tp=1),
        schedule=Schedule.GPIPE,
        virtual_stages=1,
        micro_batch_size=2,
        num_micro_batches=1,
        sequence_parallel=False,
    )
    price_cache = instance.price_cache()

    bound_s = time_bound(layout, MixTable(price_cache, Constraints(zero=(0,)))).step_s
    best_s = min(
        price_step(strategy, price_cache).closed_form_s
        for strategy in itertools.islice(every_strategy(layout, 4), 3000)
        if {choice.zero for stage in strategy.stages for choice in stage} == {0}
    )

    assert 0.8 * best_s < bound_s <= best_s


@pytest.mark.parametrize("pins", PINNED)
@pytest.mark.parametrize("seed", SEEDS)
def test_no_strategy_is_below_the_bounds_of_its_frame(seed, pins):
    table = MixTable(random_instance(seed).price_cache(), pins)
    seen = 0
    for strategy, price in prices(seed):
        if allowed(strategy, pins):
            seen += 1
            assert time_bound(strategy.layout, table).step_s <= price.closed_form_s * (1 + 1e-12)
            assert (
                redundancy_bound_bytes(strategy.layout, table)
                <= redundant_bytes(strategy, price) * (1 + 1e-12) + 1
            )
    assert seen > 3


@pytest.mark.parametrize("seed", SEEDS)
def test_what_some_strategy_fits_in_is_in_reach(seed):
    table = MixTable(random_instance(seed).price_cache(), Constraints())
    least = min(max(memory.total for memory in price.memory) for _, price in prices(seed))
    states = sum(
        ideal_states(table.price_cache.graph(1).num_parameters, 1, table.price_cache.training)
    )

    assert in_reach(table, least)
    assert not in_reach(table, 0.5 * states / table.price_cache.machine.cluster.num_gpus)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_longest_rank_leaves_no_faster_strategy_out(seed):
    """For a cut at each strategy's time, no strategy below the cut has a rank with more blocks."""
    table = MixTable(random_instance(seed).price_cache(), Constraints())
    by_frame = {}
    for strategy, price in prices(seed):
        fullest = max(
            sum(
                choice.kind is LayerKind.BLOCK
                for chunk in strategy.chunks(rank)
                for choice in chunk
            )
            for rank in range(strategy.layout.mesh.pp)
        )
        by_frame.setdefault(strategy.layout, []).append((price.closed_form_s, fullest))
    for layout, priced in by_frame.items():
        if layout.virtual_stages == 1 and layout.mesh.pp > 1:
            bound = time_bound(layout, table)
            for cut_s in {step_s for step_s, _ in priced}:
                longest = bound.longest_rank(layout, cut_s * (1 + 1e-9))
                assert longest is None or all(
                    fullest <= longest for step_s, fullest in priced if step_s <= cut_s
                )


def one_device(m):
    return ParallelLayout(
        mesh=Mesh(pp=1, dp=1, tp=1),
        schedule=Schedule.ONE_F_ONE_B,
        virtual_stages=1,
        micro_batch_size=1,
        num_micro_batches=m,
        sequence_parallel=False,
    )


def test_on_one_device_only_the_optimizer_of_the_ends_is_missing_from_the_bound():
    instance = random_instance(0)
    price_cache, layout = instance.price_cache(), one_device(4)
    table = MixTable(price_cache, Constraints(recompute=(Recompute.FULL,)))
    ends = [LayerChoice(kind, Recompute.NONE, 0) for kind in (LayerKind.EMBEDDING, LayerKind.HEAD)]
    blocks = [LayerChoice(LayerKind.BLOCK, Recompute.FULL, 0)] * instance.model.num_layers
    price = price_step(Strategy(layout=layout, stages=((ends[0], *blocks, ends[1]),)), price_cache)

    missing_s = sum(
        price_cache.data_parallel(end.kind, 1, layout.mesh, layout.sharding, 0).optimizer.value_s
        for end in ends
    )
    assert time_bound(layout, table).step_s == pytest.approx(
        price.closed_form_s - missing_s, rel=1e-12
    )
    assert missing_s > 0


def test_no_cut_or_one_micro_batch_leaves_the_longest_rank_open():
    bound = time_bound(one_device(4), MixTable(random_instance(0).price_cache(), Constraints()))

    assert bound.longest_rank(one_device(4), math.inf) is None
    assert bound.longest_rank(replace(one_device(4), num_micro_batches=1), 1.0) is None
    assert bound.longest_rank(one_device(4), 0.0) == 1


def test_more_freedom_never_raises_a_bound():
    instance = random_instance(3)
    layout = next(
        strategy.layout for strategy, _ in every_price(instance) if strategy.layout.mesh.dp > 1
    )
    pinned = MixTable(instance.price_cache(), Constraints(recompute=(Recompute.FULL,), zero=(3,)))
    free = MixTable(instance.price_cache(), Constraints())

    assert time_bound(layout, free).step_s <= time_bound(layout, pinned).step_s
    assert redundancy_bound_bytes(layout, free) <= redundancy_bound_bytes(layout, pinned)
