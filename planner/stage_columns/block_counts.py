"""How the blocks of a model are shared out: how many a pipeline rank may hold, and the strategy
whose ranks run theirs on columns.
"""

from __future__ import annotations

from collections.abc import Iterator

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy
from parplan.planner.host_options.state_locations import at_locations
from parplan.planner.stage_columns.dealing import dealt
from parplan.planner.stage_columns.stage_column import StageColumn
from parplan.profiles.models.operator_graph import LayerKind


def shorter_ends(layout: ParallelLayout, num_layers: int) -> bool | None:
    """How virtual stages share the blocks: False equally, True with one block less on the first and
    on the last.

    The embedding and the head then take the place of a block, as in Llama 3 (arXiv 2407.21783,
    section 3.3.2). None when neither divides the blocks into whole stages.
    """
    if num_layers % layout.num_virtual_stages == 0:
        return False
    interleaved = layout.schedule is Schedule.INTERLEAVED
    return (
        True
        if interleaved and (num_layers + 2) % layout.num_virtual_stages == 0 and layout.mesh.pp > 1
        else None
    )


def block_counts(
    rank: int, layout: ParallelLayout, num_layers: int, longest: int | None = None
) -> Iterator[int]:
    """How many blocks one rank may hold: given by `shorter_ends` where ranks are equal, else from
    one a chunk to `longest`.

    None holds so few that the others would have to hold more than `longest`.
    """
    pp, v = layout.mesh.pp, layout.virtual_stages
    if pp == 1:
        yield num_layers
    elif layout.equal_ranks:
        missing = 2 if shorter_ends(layout, num_layers) else 0
        yield (num_layers + missing) // pp - (missing > 0 and rank in (0, pp - 1))
    else:
        most = min(num_layers - v * (pp - 1), longest or num_layers)
        yield from range(
            max(v, num_layers - (pp - 1) * most), most + 1
        )  # fewer would leave the others too many


def to_strategy(layout: ParallelLayout, columns: tuple[StageColumn, ...]) -> Strategy:
    """The strategy that runs rank s on `columns[s]`: embedding first, blocks by option, head
    last.
    """
    stages: dict[int, tuple[LayerChoice, ...]] = {}
    for rank, column in enumerate(columns):
        for stage, blocks in zip(
            layout.stages_of(rank), _chunks_of(rank, column, layout), strict=True
        ):
            first = [LayerChoice(LayerKind.EMBEDDING, Recompute.NONE, column.zero)] * (stage == 0)
            last = [LayerChoice(LayerKind.HEAD, Recompute.NONE, column.zero)] * (
                stage == layout.num_virtual_stages - 1
            )
            stages[stage] = (*first, *blocks, *last)
    placed = [stages[stage] for stage in range(layout.num_virtual_stages)]
    homes = (
        at_locations(placed, layout, [column.homes for column in columns])
        if layout.chunked
        else tuple(placed)
    )
    return Strategy(layout=layout, stages=homes)


def _chunks_of(rank: int, column: StageColumn, layout: ParallelLayout) -> list[list[LayerChoice]]:
    """The blocks of a rank by chunk."""
    blocks = [
        LayerChoice(
            LayerKind.BLOCK,
            option.recompute,
            option.zero,
            option.sharding if option.sharding != layout.sharding else None,
            on_host=option.on_host,
        )
        for option, count in column.mix
        for _ in range(count)
    ]
    return [
        [blocks[number] for number in chunk] for chunk in dealt(rank, column.num_blocks, layout)
    ]
