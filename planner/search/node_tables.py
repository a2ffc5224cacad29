"""The options of the layers of a model of several layer classes, and its ranges of layers.

They are those of equal nodes, or of one pool of an unequal cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.candidates.range_bounds import RangeBounds
from parplan.planner.candidates.range_tables import ChunkedRangeTables, RangeTables
from parplan.planner.deadline import Deadline
from parplan.planner.host_options.state_locations import locations_allowed
from parplan.planner.request import Constraints
from parplan.planner.stage_columns.sequence_table import SequenceTable
from parplan.planner.stage_columns.stage_contents import Range
from parplan.profiles.stack import TowerDivision

Bounds = TypeVar("Bounds", bound=RangeBounds)
# prices by whether the hosts hold the states, and by the division of a tower
Books = Mapping[tuple[bool, TowerDivision], LayerPriceCache]


def books_of(price_cache: LayerPriceCache, layouts: Iterable[ParallelLayout]) -> Books:
    """Returns the prices that some layouts need."""
    ways = {layout.tower for layout in layouts} | {TowerDivision.TENSOR}
    return {
        (on_host, way): price_cache.with_states(on_host=on_host).with_tower(way)
        for on_host in (False, True)
        for way in sorted(ways)
    }


class NodeTables:
    """The tables of a model on equal nodes, each made once.

    table    makes the options of layers: a subclass of SequenceTable
    """

    def __init__(
        self, books: Books, allowed: Constraints, deadline: Deadline, table: type[Any]
    ) -> None:
        self._tables: Mapping[tuple[bool, TowerDivision], SequenceTable] = {
            there: table(book, allowed, deadline) for there, book in books.items()
        }
        self._ranges = {
            there: RangeTables(
                each.price_cache, partial(each.options, levels=each.levels), deadline.check
            )
            for there, each in self._tables.items()
        }
        plain = self._tables[False, TowerDivision.TENSOR]
        self._in_chunks = ChunkedRangeTables(
            plain.price_cache,
            partial(plain.options, levels=plain.levels),
            deadline.check,
            locations_allowed(allowed.offload or ()),
        )

    def table(self, layout: ParallelLayout) -> SequenceTable:
        """Returns the options of the layers in a layout."""
        return self._tables[layout.states_on_host, layout.tower]

    def bounds(
        self,
        kind: type[Bounds],
        layout: ParallelLayout,
        limit_bytes: float,
        given: tuple[Range, ...] | None,
    ) -> Bounds:
        """Returns bounds of a layout within a memory limit.

        given    the layers of the virtual stages, None where the search cuts
        """
        table, ranges = self.table(layout), self._ranges[layout.states_on_host, layout.tower]
        if layout.chunked:
            ranges = self._in_chunks
        zeros = table.zero_stages(layout)
        return kind(layout, ranges, table.levels, zeros, limit_bytes, given)
