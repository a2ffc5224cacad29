"""The division of embedding and head in a plan equals the best of all their divisions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from parplan.costmodels.operators.legal_splits import operator_splits
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.price_cache import PriceCache, table_division
from parplan.costmodels.step import price_step
from parplan.costmodels.strategy import LayerChoice, Strategy
from parplan.planner.objective import Objective
from parplan.planner.plan.plan_strategy import strategy_of
from parplan.planner.request import Constraints, SearchOptions
from parplan.profiles.models.operator_graph import LayerKind
from tests.helpers.cases import mostly_slow
from tests.helpers.instances import Instance, random_instance
from tests.helpers.planning import find_plan

PINS = Constraints(tp=(2,), offload=(), tp_overlap=(0,), zero=(0, 1))
SLOWDOWN = 0.1
NEAR = 1e-6
ROUNDED = 1e-5  # a plan states six digits
MICROSECOND = 1e-6  # of its bound


def instance_of(seed: int, *, tied: bool) -> Instance:
    instance = random_instance(seed)
    stack = replace(instance.training.stack, divided_ends=True)
    return replace(
        instance,
        model=replace(instance.model, tied_embeddings=tied),
        training=replace(instance.training, stack=stack),
    )


def shardings(kind: LayerKind, layout_sharding: Sharding, b: int, price_cache: PriceCache):
    """Every legal division of embedding or head."""
    operators = price_cache.graph(b).layer_class(kind).operators
    legal = [operator_splits(operator, layout_sharding.degrees)[0] for operator in operators]
    for splits in itertools.product(*legal):
        own = tuple(
            (operator.name, each)
            for operator, each in zip(operators, splits, strict=True)
            if each != layout_sharding.splits(operator)
        )
        yield replace(layout_sharding, own=own)


def with_other_ends(strategy: Strategy, price_cache: PriceCache) -> Iterator[Strategy]:
    """The strategy with every legal division of embedding and head."""
    layout, stages = strategy.layout, list(strategy.stages)
    first, last = stages[0][0], stages[-1][-1]
    b = layout.micro_batch_size
    for embedding in shardings(LayerKind.EMBEDDING, layout.sharding, b, price_cache):
        for head in shardings(LayerKind.HEAD, layout.sharding, b, price_cache):
            alike = table_division(price_cache.graph(1).embedding, embedding) == table_division(
                price_cache.graph(1).head, head
            )
            if price_cache.tied and not alike:
                continue
            changed = list(stages)
            changed[0] = (replace(first, sharding=embedding), *changed[0][1:])
            changed[-1] = (*changed[-1][:-1], replace(last, sharding=head))
            yield replace(strategy, stages=tuple(changed))


def ends_of(strategy: Strategy) -> tuple[LayerChoice, LayerChoice]:
    return strategy.stages[0][0], strategy.stages[-1][-1]


@pytest.mark.parametrize(
    ("seed", "tied", "pp"),
    mostly_slow(itertools.product(range(3), (False, True), (1, 2)), {(0, True, 1)}),
)
def test_no_division_of_embedding_and_head_is_faster_than_the_plans(seed, tied, pp):
    instance = instance_of(seed, tied=tied)
    if instance.cluster.num_gpus < 2 * pp:
        instance = replace(instance, cluster=replace(instance.cluster, nodes=2))
    price_cache = instance.price_cache()
    plan = find_plan(
        instance.model,
        instance.cluster,
        instance.training,
        constraints=replace(PINS, pp=(pp,)),
    )
    strategy = strategy_of(plan, price_cache)

    steps_s = [
        price_step(other, price_cache).step_s for other in with_other_ends(strategy, price_cache)
    ]

    step_s = price_step(strategy, price_cache).step_s
    assert len(steps_s) > 10
    assert step_s == pytest.approx(plan.predicted.step_time_s.value, rel=ROUNDED)
    assert min(steps_s) >= plan.search.bound - MICROSECOND
    # a pipeline's gap is that of its closed form
    assert min(steps_s) >= step_s * (1 - NEAR - (plan.search.gap if pp > 1 else 0.0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "tied"),
    mostly_slow(itertools.product(range(2), (False, True)), {(0, True)}),
)
def test_no_division_of_embedding_and_head_in_time_holds_less_twice(seed, tied):
    instance = instance_of(seed, tied=tied)
    price_cache = instance.price_cache()
    pins = replace(PINS, pp=(1,))
    request = instance.model, instance.cluster, instance.training
    fastest = find_plan(*request, constraints=pins)
    options = SearchOptions(max_slowdown=SLOWDOWN)
    lean = find_plan(*request, Objective.MEMORY, constraints=pins, options=options)
    strategy = strategy_of(lean, price_cache)
    limit_s = fastest.predicted.step_time_s.value * (1 + SLOWDOWN)

    priced = [price_step(other, price_cache) for other in with_other_ends(strategy, price_cache)]
    held = [
        sum(rank.total for rank in price.redundant) for price in priced if price.step_s <= limit_s
    ]

    actual = sum(rank.total for rank in price_step(strategy, price_cache).redundant)
    assert held
    assert min(held) >= actual * (1 - NEAR)
