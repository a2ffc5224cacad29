"""The ways to run a block of a layout that an attack chooses from, within the request's pins."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.search.attacks.allowed import zero_stages
from parplan.costmodels.layers.recompute import Recompute, RecomputedOperators
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.strategy import LayerChoice, ParallelLayout
from parplan.executor.rules.layer_rules import DRAWS_MASK
from parplan.planner.layer_options.overlap_levels import illegal_full_recompute
from parplan.planner.request import Constraints
from parplan.planner.stage_columns.mix_table import MixTable
from parplan.profiles.models.operator_graph import LayerKind

RANDOM_LISTS = 6  # recompute lists beside those of the catalogue


@dataclass(frozen=True, slots=True)
class Way:
    """A recompute list with a division of the operators; None is the layout's division."""

    recompute: RecomputedOperators
    sharding: Sharding | None

    def at(self, zero: int) -> LayerChoice:
        return LayerChoice(LayerKind.BLOCK, self.recompute, zero, self.sharding)


class Palette:
    """The ways of each layout, each computed once.

    They are those of the catalogue, the levels of recompute and some random recompute lists.
    """

    def __init__(self, table: MixTable, pins: Constraints, seed: int) -> None:
        self.table = table
        self.pins = pins
        self.seed = seed
        self._ways: dict[tuple[ParallelLayout, int], tuple[Way, ...]] = {}
        self._choices: dict[tuple[ParallelLayout, int], tuple[LayerChoice, ...]] = {}

    def ways(self, layout: ParallelLayout, rank: int) -> tuple[Way, ...]:
        """Return the ways of one pipeline rank."""
        key = layout, rank if layout.keeps_all(rank) else -1
        if key not in self._ways:
            self._ways[key] = tuple(dict.fromkeys(self._listed(layout, rank)))
        return self._ways[key]

    def choices(self, layout: ParallelLayout, rank: int) -> tuple[LayerChoice, ...]:
        """Return the ways of one pipeline rank at every ZeRO stage."""
        key = layout, rank if layout.keeps_all(rank) else -1
        if key not in self._choices:
            self._choices[key] = tuple(
                way.at(zero)
                for zero in zero_stages(layout, self.pins)
                for way in self.ways(layout, rank)
            )
        return self._choices[key]

    def _listed(self, layout: ParallelLayout, rank: int) -> Iterator[Way]:
        names = self.table.price_cache.recompute_operators
        for option in self.table.options(layout, rank):
            differs = layout.mesh.tp > 1 and option.sharding != layout.sharding
            sharding = option.sharding if differs else None
            yield Way(names(LayerKind.BLOCK, option.recompute), sharding)
        if layout.keeps_all(rank):
            return
        for level in self.pins.resolved(self.table.price_cache.training.stack).recompute or tuple(
            Recompute
        ):
            if level is not Recompute.FULL or not illegal_full_recompute(
                layout.tp_overlap, self.table.price_cache.model
            ):
                yield Way(names(LayerKind.BLOCK, level), None)
        if self.table.catalogue.by_operator:
            yield from self._lists(random.Random(self.seed))

    def _lists(self, chance: random.Random) -> Iterator[Way]:
        """Yield random recompute lists without operators that draw a mask."""
        model, block = self.table.price_cache.model, self.table.price_cache.graph(1).block
        names = [
            operator.name
            for operator in block.operators
            if not (model.dropout and operator.name in DRAWS_MASK)
        ]
        for _ in range(RANDOM_LISTS):
            chosen = frozenset(chance.sample(names, chance.randint(1, len(names) - 1)))
            yield Way(tuple(name for name in names if name in chosen), None)
