"""The options of the layer classes of a model, and fronts of rows of its layers, each made once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
from parplan.costmodels.layers.recompute import Recompute, RecomputedOperators
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.deadline import NEVER, Deadline
from parplan.planner.dominance import Array, lower_hull
from parplan.planner.layer_options.catalogue import Catalogue, catalogue_of
from parplan.planner.layer_options.chunk_labels import ChunkLabels, of_chunk, of_chunks
from parplan.planner.layer_options.layer_option import LayerOption, unbeaten
from parplan.planner.layer_options.mixes import column_of
from parplan.planner.layer_options.recompute_labels import LabelTable
from parplan.planner.layer_options.recompute_lists import MOST_LISTS, recompute_lists
from parplan.planner.request import Constraints
from parplan.planner.stage_columns.mix_table import StageTable
from parplan.profiles.models.operator_graph import LayerKey, LayerKind

LEVELS = (Recompute.NONE, Recompute.FULL)


@dataclass(frozen=True, slots=True)
class Passes:
    """A layer and micro-batch on any option.

    time_s, saved_bytes    by option
    ways                   the shardings of the options
    """

    time_s: Array
    saved_bytes: Array
    ways: tuple[Sharding, ...]


class SequenceTable(StageTable):
    """Options of layer classes, and fronts of rows of layers, each made once.

    levels        the allowed levels of recompute
    by_operator   layers may recompute lists of operators besides
    """

    def __init__(
        self, price_cache: LayerPriceCache, pins: Constraints, deadline: Deadline = NEVER
    ) -> None:
        super().__init__(price_cache, pins, deadline)
        self.levels = tuple(level for level in LEVELS if level in (pins.recompute or LEVELS))
        self.by_operator = pins.recompute is None
        self._labels = LabelTable()

    def allowed(self, layout: ParallelLayout, rank: int) -> tuple[Recompute, ...]:
        """Returns the levels of recompute on a rank."""
        return (Recompute.NONE,) if layout.keeps_all(rank) else self.levels

    def options(
        self, key: LayerKey, b: int, sharding: Sharding, levels: Sequence[Recompute]
    ) -> tuple[LayerOption, ...]:
        """Returns the ways to run a layer of a class that no other beats, fastest first.

        Lists of operators are among them where both levels are, and none is pinned. Embedding and
        head are not recomputed.
        """
        own = self.price_cache.own_sharding(key, sharding)
        if key.role is not LayerKind.BLOCK:
            levels = (Recompute.NONE,)
        apart = self.price_cache.apart(key, own)
        options = self.once(
            ("options", key, b, apart, levels), lambda: self._options(key, b, apart, levels)
        )
        if apart is own:
            return options
        return self.once(
            ("options", key, b, own, levels),
            lambda: tuple(
                replace(each, sharding=replace(each.sharding, ep=own.ep, etp=own.etp))
                for each in options
            ),
        )

    def _options(
        self, key: LayerKey, b: int, sharding: Sharding, levels: Sequence[Recompute]
    ) -> tuple[LayerOption, ...]:
        ways: dict[RecomputedOperators, None] = dict.fromkeys(levels)
        if self.by_operator and len(levels) == len(LEVELS):
            ways |= dict.fromkeys(filter(None, recompute_lists(key, b, sharding, self.price_cache)))
        return unbeaten(self._option(key, b, sharding, way) for way in ways)

    def _option(
        self, key: LayerKey, b: int, sharding: Sharding, level: RecomputedOperators
    ) -> LayerOption:
        size = self.price_cache.activations(key, b, sharding, level)
        return LayerOption(
            kind=key,
            recompute=level,
            sharding=sharding,
            weight_layout=frozenset(),
            time_s=self.price_cache.layer_time(key, b, sharding, level).total_s,
            saved_bytes=float(size.saved),
            ideal_saved_bytes=size.ideal_saved,
            workspace_bytes=float(size.workspace),
        )

    def front(self, chunks: Sequence[Sequence[Sequence[LayerOption]]]) -> ChunkLabels:
        """Returns the front of the layers of chunks."""
        rows = tuple(tuple(map(self._number, layers)) for layers in chunks)
        return self.once(("front", rows), lambda: of_chunks([self._front(row) for row in rows]))

    def _number(self, options: Sequence[LayerOption]) -> int:
        return self._labels.number(
            tuple((o.time_s, o.saved_bytes, o.workspace_bytes) for o in options)
        )

    def _front(self, row: tuple[int, ...]) -> ChunkLabels:
        return of_chunk(self._labels.of(row), self._labels.options(row))


class BlockClassTable(SequenceTable):
    """The same of a described model, whose blocks have the options of their class's catalogue.

    All options of a class divide the weights that Megatron divides. In a model with experts all
    operators are divided as Megatron divides them: there are many more candidates.
    """

    price_cache: PriceCache

    def __init__(
        self, price_cache: PriceCache, pins: Constraints, deadline: Deadline = NEVER
    ) -> None:
        super().__init__(price_cache, pins, deadline)
        self.levels = tuple(level for level in Recompute if level in (pins.recompute or Recompute))
        experts = price_cache.model.num_experts > 0
        self._pins = replace(pins, megatron_sharding=pins.megatron_sharding or experts)

    def least_s(self, key: LayerKey, b: int, sharding: Sharding) -> float:
        """Returns the least seconds of the passes of a layer, without recompute."""
        if key.role is not LayerKind.BLOCK:
            return self.price_cache.layer_time(key, b, sharding).total_s
        catalogue = self._catalogue(key)
        plain_s = self.price_cache.layer_time(key, b, sharding).total_s
        if not catalogue.divides(sharding):
            return plain_s
        return min(plain_s, *catalogue.fastest_s(b, sharding).values())

    def passes_of(self, key: LayerKey, b: int, sharding: Sharding) -> Passes:
        """Returns seconds and saved bytes of a layer on any of its options.

        Options that others beat are among them where that saves finding out. They change no least
        value of seconds and bytes.
        """
        own = self.price_cache.own_sharding(key, sharding)
        apart = self.price_cache.apart(key, own)
        return self.once(
            ("passes of", key, b, own, apart), lambda: self._passes_of(key, b, own, apart)
        )

    def _passes_of(self, key: LayerKey, b: int, own: Sharding, apart: Sharding) -> Passes:
        block = key.role is LayerKind.BLOCK
        catalogue = self._catalogue(key) if block else None
        if catalogue and (catalogue.by_operator or catalogue.divides(apart) or apart.overlap):
            options = self.options(key, b, own, self.levels)
            return Passes(
                column_of(options, "time_s"),
                column_of(options, "saved_bytes"),
                tuple(dict.fromkeys(option.sharding for option in options)),
            )
        prices = self.price_cache
        levels = self.levels if block else (Recompute.NONE,)
        return Passes(
            np.array([prices.layer_time(key, b, apart, level).total_s for level in levels]),
            np.array([float(prices.saved_bytes(key, b, apart, level)) for level in levels]),
            (own,),
        )

    def _catalogue(self, key: LayerKey) -> Catalogue:
        return self.once(
            ("catalogue", key), lambda: catalogue_of(self.price_cache, self._pins, key)
        )

    def _options(
        self, key: LayerKey, b: int, sharding: Sharding, levels: Sequence[Recompute]
    ) -> tuple[LayerOption, ...]:
        if key.role is not LayerKind.BLOCK:
            return super()._options(key, b, sharding, levels)
        catalogue = self._catalogue(key)
        megatron = catalogue.weight_layouts(sharding)[0]
        options = tuple(
            option
            for option in catalogue.options(b, sharding)
            if option.weight_layout == megatron
            and not (levels == (Recompute.NONE,) and option.recompute)
        )
        return _few(options or (catalogue.preset(Recompute.NONE, b, sharding),))


def _few(options: tuple[LayerOption, ...]) -> tuple[LayerOption, ...]:
    """Returns the options, or if they are many those on the hull of time and saved bytes."""
    if len(options) <= MOST_LISTS:
        return options
    points = ((each.time_s, each.saved_bytes, index) for index, each in enumerate(options))
    return tuple(options[index] for index in lower_hull(points))
