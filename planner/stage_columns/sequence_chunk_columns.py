"""Columns of a rank with chunks whose layers are of several classes, such as shards.

A column is a choice of recompute for every layer, from the front of the rank's layers
(planner/stage_columns/sequence_columns.py), with two counts: of its layers in chunks in the order
of the model, the last have all their states on the host, and the optimizer states of those before
them are there. All counts are tried (planner/host_options/sequence_locations.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from functools import cached_property

import numpy as np
import numpy.typing as npt

from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.host_options.location_costs import LocationCosts
from parplan.planner.host_options.sequence_locations import sequence_locations
from parplan.planner.layer_options.mixes import Mixes
from parplan.planner.stage_columns.chunk_columns import LocatedColumns
from parplan.planner.stage_columns.mix_prices import PricedMixes
from parplan.planner.stage_columns.sequence_columns import SequenceColumns
from parplan.planner.stage_columns.sequence_table import SequenceTable
from parplan.planner.stage_columns.stage_column import StageColumn
from parplan.planner.stage_columns.stage_contents import Range, StageContents
from parplan.profiles.models.operator_graph import LayerKey, LayerKind


class SequenceChunkColumns(LocatedColumns):
    """The columns of one pipeline rank with given layers, whose states lie in chunks."""

    compute: SequenceColumns

    def __init__(
        self, contents: StageContents, rank: int, layout: ParallelLayout, table: SequenceTable
    ) -> None:
        super().__init__(SequenceColumns(contents, rank, layout, table))
        self._keys = [key for keys in contents.keys(table.price_cache) for key in keys]

    @property
    def num_blocks(self) -> int:
        return self.compute.num_blocks

    def at(self, places: tuple[tuple[Range, ...], ...]) -> SequenceChunkColumns:
        """Returns the same columns for other places of equal layers, given by chunk."""
        other = copy(self)
        other.compute = self.compute.at(places)
        return other

    def _every(self, num_blocks: int) -> Mixes:
        return self.compute.front_mixes(self.zero)

    def _pure(self, num_blocks: int) -> Mixes:
        return self._every(num_blocks)

    def _located(
        self, priced: PricedMixes
    ) -> Iterator[tuple[LocationCosts, npt.NDArray[np.bool_]]]:
        if self._costs is not None:
            yield self._costs, np.ones(len(priced.time_s), np.bool_)

    @cached_property
    def _costs(self) -> LocationCosts | None:
        """The costs of locations, None where chunks can hold no layer of the rank."""
        keys = tuple(key for key in self._keys if key.in_chunks)
        if not keys:
            return None
        table, layout = self.compute.table, self.layout
        b = layout.micro_batch_size
        least = float(self.compute.front_mixes(self.zero).workspace_bytes.min())
        return table.once(
            ("locations", keys, layout.mesh, b, layout.num_micro_batches, least),
            lambda: sequence_locations(keys, layout, table.offload, self.price_cache, least),
        )

    def _outside(self, kinds: Sequence[LayerKind]) -> Sequence[LayerKey]:
        """Returns all layers outside of chunks, in the middle of the rank too."""
        return [key for key in self._keys if not key.in_chunks]

    @property
    def _outside_bytes(self) -> float:
        return super()._outside_bytes + self.compute.least_states(self.zero)

    def relaxed(
        self, num_blocks: int, limit_bytes: float, *, plain: bool = False
    ) -> list[StageColumn]:
        """Returns columns of a bound on any choice of options and locations.

        An exact front has every choice that is worth one. Else no copy of a chunk takes time, and
        no state in chunks takes memory.
        """
        if self._costs is None:
            return []
        if not plain and self.compute.front[0]:
            return self.fastest(num_blocks, limit_bytes)
        return self.compute.bounds(limit_bytes, plain=plain)

    def smallest(self, num_blocks: int) -> StageColumn:
        """Returns the choice and locations with the lowest peak, for any time.

        They fit the device's share of the host. Without chunks it is that of the layers alone.
        """
        return super().smallest(num_blocks) if self._costs else self.compute.smallest(num_blocks)
