"""Plans of models whose blocks are of several classes, laid out one by one or drawn."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import combinations, pairwise, product

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy
from parplan.planner.request import Constraints
from parplan.planner.search.block_class_prices import BlockClassPrices, given_cuts
from parplan.profiles.models.operator_graph import LayerKind


def every_cut(layout: ParallelLayout, num_layers: int) -> Iterator[tuple[tuple[int, int], ...]]:
    given = given_cuts(layout, num_layers - 2)
    if given is not None:
        yield given
        return
    for inner in combinations(range(1, num_layers), layout.num_virtual_stages - 1):
        yield tuple(pairwise((0, *inner, num_layers)))


def every_strategy(
    layouts: Iterable[ParallelLayout], pins: Constraints, prices: BlockClassPrices
) -> Iterator[Strategy]:
    """Yields all cuts, ZeRO stages of the ranks and recompute levels of the blocks."""
    cache, num_layers = prices.price_cache, prices.price_cache.num_layers
    for layout in layouts:
        book = cache.with_tower(layout.tower)
        for cuts, zeros, levels in product(
            every_cut(layout, num_layers),
            product(prices._table(layout).zero_stages(layout), repeat=layout.mesh.pp),
            product(pins.recompute, repeat=num_layers - 2),
        ):
            yield Strategy(
                layout=layout,
                stages=tuple(
                    tuple(
                        LayerChoice(
                            key := cache.key(layer, first),
                            levels[layer - 1] if key.role is LayerKind.BLOCK else Recompute.NONE,
                            zeros[layout.rank_of(stage)],
                            book.own_sharding(key, layout.sharding),
                        )
                        for layer in range(first, end)
                    )
                    for stage, (first, end) in enumerate(cuts)
                ),
            )


def tied_alike(strategy: Strategy, *, tied: bool) -> bool:
    """Returns whether both copies of a tied table are sharded, or neither is."""
    return not tied or (strategy.stages[0][0].zero > 0) == (strategy.stages[-1][-1].zero > 0)


def random_strategy(
    prices: BlockClassPrices, layout: ParallelLayout, rng: random.Random
) -> Strategy:
    """Returns random cuts, ZeRO stages of the ranks, and options of the blocks."""
    cache, zeros = prices.price_cache, prices._table(layout).zero_stages(layout)
    of_rank = [rng.choice(zeros) for _ in range(layout.mesh.pp)]
    stages = []
    for stage, (first, end) in enumerate(rng.choice([*every_cut(layout, cache.num_layers)])):
        rank = layout.rank_of(stage)
        table = prices._table(layout, rank)
        levels = table.allowed(layout, rank)
        keys = [cache.key(layer, first) for layer in range(first, end)]
        options = [
            rng.choice(table.options(key, layout.micro_batch_size, layout.sharding, levels))
            for key in keys
        ]
        stages.append(
            tuple(
                LayerChoice(key, option.recompute, of_rank[rank], option.sharding)
                for key, option in zip(keys, options, strict=True)
            )
        )
    return Strategy(layout=layout, stages=tuple(stages))
