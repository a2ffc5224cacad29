"""The block counts that a pipeline rank may hold, and the strategy of one column per rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy
from parplan.planner.host_options.state_locations import with_locations
from parplan.planner.stage_columns.dealing import dealt_blocks
from parplan.planner.stage_columns.stage_column import StageColumn
from parplan.profiles.models.operator_graph import LayerKey, LayerKind


def shorter_ends(layout: ParallelLayout, num_layers: int) -> bool | None:
    """True if the first and the last virtual stage have one block less, False for equal stages.

    The embedding and the head then take the place of a block, as in Llama 3 (arXiv 2407.21783,
    section 3.3.2). None if neither divides the blocks into whole stages.
    """
    if num_layers % layout.num_virtual_stages == 0:
        return False
    if layout.schedule is not Schedule.INTERLEAVED or layout.mesh.pp == 1:
        return None
    return True if (num_layers + 2) % layout.num_virtual_stages == 0 else None


def block_counts(
    rank: int, layout: ParallelLayout, num_layers: int, longest: int | None = None
) -> Iterator[int]:
    """Yields the block counts that one rank may hold.

    Equal ranks have the count of `shorter_ends`. Other ranks have at least one block per chunk and
    at most `longest`, and no count would make the rest of the ranks hold more than `longest`.
    """
    pp = layout.mesh.pp
    v = layout.virtual_stages
    if pp == 1:
        yield num_layers
    elif layout.equal_ranks:
        missing = 2 if shorter_ends(layout, num_layers) else 0
        yield (num_layers + missing) // pp - (missing > 0 and rank in (0, pp - 1))
    else:
        most = min(num_layers - v * (pp - 1), longest or num_layers)
        least = max(v, num_layers - (pp - 1) * most)  # fewer would leave too many for the rest
        yield from range(least, most + 1)


def to_strategy(layout: ParallelLayout, columns: tuple[StageColumn, ...]) -> Strategy:
    """Returns the strategy that runs rank s on `columns[s]`: embedding, blocks by option, head."""
    stages: dict[int, tuple[LayerChoice, ...]] = {}
    for rank, column in enumerate(columns):
        for stage, blocks in zip(
            layout.stages_of(rank), _chunks_of(rank, column, layout), strict=True
        ):
            if stage == 0:
                blocks = [_end(LayerKind.EMBEDDING, column, layout), *blocks]
            if stage == layout.num_virtual_stages - 1:
                blocks = [*blocks, _end(LayerKind.HEAD, column, layout)]
            stages[stage] = tuple(blocks)
    in_order = tuple(stages[stage] for stage in range(layout.num_virtual_stages))
    if layout.chunked:
        in_order = with_locations(in_order, layout, [column.homes for column in columns])
    return Strategy(layout=layout, stages=in_order)


def with_classes(strategy: Strategy, price_cache: LayerPriceCache) -> Strategy:
    """Returns a strategy of blocks with the classes that they have in a described model."""
    if price_cache.key(1, 1) is LayerKind.BLOCK:
        return strategy
    stages = []
    made: dict[tuple[int, LayerKey], LayerChoice] = {}  # layers alike share one record
    for index, stage in enumerate(strategy.stages):
        own = tuple(zip(stage, price_cache.keys(*strategy.layers_of(index)), strict=True))
        for choice, key in own:
            if (id(choice), key) not in made:
                made[id(choice), key] = replace(choice, kind=key)
        stages.append(tuple(made[id(choice), key] for choice, key in own))
    return replace(strategy, stages=tuple(stages))


def _end(kind: LayerKind, column: StageColumn, layout: ParallelLayout) -> LayerChoice:
    """Returns the embedding or the head of a rank."""
    sharding = dict(column.ends).get(kind, layout.sharding)
    own = sharding if sharding != layout.sharding else None
    return LayerChoice(kind, Recompute.NONE, column.zero, own)


def _chunks_of(rank: int, column: StageColumn, layout: ParallelLayout) -> list[list[LayerChoice]]:
    """Returns the blocks of a rank by chunk."""
    blocks = [
        LayerChoice(
            LayerKind.BLOCK,
            option.recompute,
            option.zero,
            option.sharding if option.sharding != layout.sharding else None,
            on_host=option.on_host,
            own_zero=option.own_zero,
        )
        for option, count in column.mix
        for _ in range(count)
    ]
    return [
        [blocks[number] for number in chunk]
        for chunk in dealt_blocks(rank, column.num_blocks, layout)
    ]
