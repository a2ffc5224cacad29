"""Lower bounds of the step of a launcher's settings, from the prices of one block of each class.

All blocks of a launcher's plan have one ZeRO stage and one recompute, so that the seconds and the
bytes of a layout's settings follow from those of a block, an embedding and a head. The bounds of a
layout come in three steps: passes alone; with data parallelism and transfers; and the least of all
settings that memory may hold.

    step >= (M - share) max(T / pp, n t) + share T + tail        M micro-batches, T all layers,
                                                                 t the fastest of n blocks a rank

is the closed form of equal ranks (EQUATIONS P1). Ranks that divide the blocks as they like may be
faster than it: a rank r that has t_r of T works M t_r after the ranks before it, so that no step is
shorter than the least of the largest M t_r + sum of t_i before r, which is the same for all ranks
at t_r ~ (1 - 1/M)^r:

    step >= T / (1 - (1 - 1/M)^pp)                                                        [derived]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from parplan.costmodels.keyed_cache import KeyedCache
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.memory.rank_memory import gradients_come_and_go, stashes, usable_bytes
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.stage_costs import all_receives_s
from parplan.costmodels.step import bubble_share
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.export.block_figures import (
    Classes,
    RankRoom,
    blocks_at,
    held_bytes_of,
)
from parplan.planner.export.fields.settings import Settings
from parplan.planner.export.launcher_space import Blocks, LauncherSpace
from parplan.profiles.models.operator_graph import LayerKey, LayerKind

_ROUNDING = 1 - 1e-9  # relative, against another order of summation
_ENDS = (LayerKind.EMBEDDING, LayerKind.HEAD)


class BoundedSettings(NamedTuple):
    """Settings without stages, with a lower bound of their step.

    kind      the settings but for the fields below
    """

    bound_s: float
    kind: Settings
    zero: int
    recompute_blocks: int | None

    @property
    def settings(self) -> Settings:
        return replace(self.kind, zero=self.zero, recompute_blocks=self.recompute_blocks)


class _Layers(NamedTuple):
    """Seconds of all layers at once and of the fastest block, for a micro-batch and a step."""

    total_s: float
    block_s: float
    step_s: float = 0.0
    block_step_s: float = 0.0


@dataclass
class SettingsBounds:
    """The bounds of the settings of a launcher's space."""

    space: LauncherSpace

    def __post_init__(self) -> None:
        self._once = KeyedCache()

    @cached_property
    def _classes(self) -> Mapping[LayerKey, int]:
        """The number of blocks of each class."""
        prices, layers = self.space.fastest_prices, self.space.request.model.num_layers
        return Counter(prices.keys(1, layers + 1))

    def passes_s(self, layout: ParallelLayout) -> float:
        """Least seconds of a step: passes without recompute, transfers and data parallelism.

        A split backward pass may leave no bubble; its share takes a replay.
        """
        prices, (size, sharding) = self.space.fastest_prices, _of_passes(layout)
        layers = self._once(
            ("passes", size, sharding), lambda: self._passes(size, sharding, prices)
        )
        if layout.splits_backward:
            return layout.num_micro_batches * layers.total_s / layout.mesh.pp * _ROUNDING
        return self._closed_form_s(layout, layers, prices)

    def closer_s(self, layout: ParallelLayout) -> Iterator[float]:
        """Yields closer bounds of a layout: with all communication, and within memory."""
        prices = self.space.fastest_prices
        yield min(
            (
                self._closed_form_s(layout, self._layers(layout, zero, prices), prices)
                for zero in self.space.zeros(layout)
            ),
            default=float("inf"),
        )
        fitting = self.fitting(layout)
        yield fitting[0].bound_s if fitting else float("inf")

    def fitting(self, layout: ParallelLayout) -> tuple[BoundedSettings, ...]:
        """Returns the settings that memory may hold, those with the least bound first."""
        return self._once(("fitting", layout), lambda: self._fitting(layout))

    def _fitting(self, layout: ParallelLayout) -> tuple[BoundedSettings, ...]:
        if not self.space.zeros(layout):
            return ()
        zeros, rank = self.space.zeros(layout), self._rank(layout)
        found: list[BoundedSettings] = []
        for kind, counts in self.space.kinds(layout):
            prices = self.space.prices(kind)
            plain, again = self._blocks(kind, layout, prices)
            for zero in zeros:
                layers = self._layers(layout, zero, prices)
                room = rank.usable_bytes - rank.blocks * self._states_bytes(
                    layout, zero, prices, in_turn=rank.in_turn
                )
                found += (
                    BoundedSettings(
                        self._bound_s(layout, layers, plain, again, count, prices),
                        kind,
                        zero,
                        count,
                    )
                    for count in counts
                    if held_bytes_of(layout.virtual_stages, rank, plain, again, count) <= room
                )
        return tuple(sorted(found, key=lambda each: each.bound_s))

    def least_bytes(self, each: BoundedSettings, layout: ParallelLayout) -> float:
        """Least bytes of tensors on the rank that bounds a layout's memory."""
        prices, rank = self.space.prices(each.kind), self._rank(layout)
        states = self._states_bytes(layout, each.zero, prices, in_turn=rank.in_turn)
        blocks = self._blocks(each.kind, layout, prices)
        held = held_bytes_of(layout.virtual_stages, rank, *blocks, each.recompute_blocks)
        return rank.blocks * states + held

    def _rank(self, layout: ParallelLayout) -> RankRoom:
        """Returns the rank with most blocks, or where the stages are free any that has the mean.

        A rank with more than the mean may be any of them, so that the fewest held micro-batches
        count. Gradients are there beside the held micro-batches once a backward pass is over.
        """
        prices, pp = self.space.fastest_prices, layout.mesh.pp
        layers, ranks = self.space.request.model.num_layers, range(1)
        listed = self.space.listed(layout)
        blocks = min(
            (sum(counts[stage] for stage in layout.stages_of(0)) for counts in listed),
            default=layers,
        )
        if self.space.divides_freely(layout):
            blocks, ranks = -(-layers // pp), range(pp)
        every = self._held(layout)
        held = [every[rank] for rank in ranks]
        freed = gradients_come_and_go(layout, prices)
        more = layout.virtual_stages == 1 and max(held) < layout.num_micro_batches
        usable = usable_bytes(self.space.limit_bytes, layout.mesh, prices)
        return RankRoom(blocks, min(held), usable, freed and not more, freed)

    def possible_stages(
        self, each: BoundedSettings, layout: ParallelLayout, below_s: float
    ) -> Iterator[Blocks]:
        """Yields the listed stages whose blocks alone may fit and take less than `below_s`."""
        prices, virtual = self.space.prices(each.kind), layout.virtual_stages
        plain, again = self._blocks(each.kind, layout, prices)
        first = self._rank(layout)
        layers = self._layers(layout, each.zero, prices)
        block_s = layers.block_s
        if each.recompute_blocks is None:
            block_s += min(again[kind].passes_s - plain[kind].passes_s for kind in again)
        states = self._states_bytes(layout, each.zero, prices, in_turn=first.in_turn)
        held = self._held(layout)
        stages = [layout.stages_of(rank) for rank in range(layout.mesh.pp)]
        for listed in self.space.listed(layout):
            counts = [sum(listed[stage] for stage in of_rank) for of_rank in stages]
            if layout.num_micro_batches * max(counts) * block_s * _ROUNDING >= below_s:
                continue
            ranks = (
                first._replace(blocks=count, held=each_held)
                for count, each_held in zip(counts, held, strict=True)
            )
            if all(
                rank.blocks * states
                + held_bytes_of(virtual, rank, plain, again, each.recompute_blocks)
                <= first.usable_bytes
                for rank in ranks
            ):
                yield listed

    def _held(self, layout: ParallelLayout) -> list[int]:
        """Returns the micro-batches of one of its chunks that each rank holds."""
        pp = layout.mesh.pp
        key = "held", pp, layout.schedule, layout.num_micro_batches, layout.virtual_stages
        return self._once(
            key, lambda: [stashes(LayerKind.BLOCK, rank, layout) for rank in range(pp)]
        )

    def _passes(self, size: int, sharding: Sharding, prices: PriceCache) -> _Layers:
        seconds = {
            kind: prices.layer_time(kind, size, sharding).total_s
            for kind in (*_ENDS, *self._classes)
        }
        total_s = sum(seconds[kind] * self._classes.get(kind, 1) for kind in seconds)
        return _Layers(total_s, min(seconds[kind] for kind in self._classes))

    def _layers(self, layout: ParallelLayout, zero: int, prices: PriceCache) -> _Layers:
        """Returns the seconds of layers without recompute, with transfers and data parallelism."""
        key = "layers", layout.mesh, layout.virtual_stages, layout.schedule, _of_passes(layout)
        return self._once(
            (*key, zero, prices.training), lambda: self._with_data(layout, zero, prices)
        )

    def _with_data(self, layout: ParallelLayout, zero: int, prices: PriceCache) -> _Layers:
        size, sharding = _of_passes(layout)
        zero = zero if layout.mesh.replicas > 1 else 0
        total_s, step_s = all_receives_s(layout, prices), 0.0
        block_s = block_step_s = float("inf")
        for kind in (*_ENDS, *self._classes):
            data = prices.data_parallel(kind, size, layout.mesh, sharding, zero)
            each_s = prices.layer_time(kind, size, sharding).total_s + data.per_micro_batch_s
            number = self._classes.get(kind, 1)
            total_s += number * each_s
            step_s += number * data.per_step_s
            if kind in self._classes:
                block_s = min(block_s, each_s)
                block_step_s = min(block_step_s, data.per_step_s)
        return _Layers(total_s, block_s, step_s, block_step_s)

    def _closed_form_s(self, layout: ParallelLayout, layers: _Layers, prices: PriceCache) -> float:
        pp, share = layout.mesh.pp, bubble_share(layout, prices)
        fullest = -(-self.space.request.model.num_layers // pp)
        pace_s = max(layers.total_s / pp, fullest * layers.block_s)
        tail_s = layers.step_s if pp == 1 else fullest * layers.block_step_s
        ramps_s = share * layers.total_s
        return ((layout.num_micro_batches - share) * pace_s + ramps_s + tail_s) * _ROUNDING

    def _bound_s(
        self,
        layout: ParallelLayout,
        layers: _Layers,
        plain: Classes,
        again: Classes,
        count: int | None,
        prices: PriceCache,
    ) -> float:
        """Returns a lower bound of the simulated step of settings in any of their stages.

        layers    all layers without recompute
        count     blocks of a stage that recompute as `again`, None for all
        """
        more_s = {kind: again[kind].passes_s - plain[kind].passes_s for kind in again}
        least_s = min(more_s.values())
        if count is None:
            added_s = sum(self._classes[kind] * seconds for kind, seconds in more_s.items())
        else:
            added_s = self._recomputed(layout, count) * least_s
            least_s = 0.0
        layers = layers._replace(total_s=layers.total_s + added_s, block_s=layers.block_s + least_s)
        many, pp = layout.num_micro_batches, layout.mesh.pp
        if pp == 1 or layout.equal_ranks:
            return self._closed_form_s(layout, layers, prices)
        if layout.splits_backward:
            return many * layers.total_s / pp * _ROUNDING
        return layers.total_s / (1 - (1 - 1 / many) ** pp) * _ROUNDING

    def _recomputed(self, layout: ParallelLayout, first: int) -> int:
        """Returns the fewest blocks that recompute, where the first ones of each stage do."""
        layers = self.space.request.model.num_layers
        if self.space.divides_freely(layout):
            return min(layout.num_virtual_stages - 1 + first, layers)
        listed = self.space.listed(layout)
        return min(sum(min(first, count) for count in blocks) for blocks in listed)

    def _blocks(
        self, settings: Settings, layout: ParallelLayout, prices: PriceCache
    ) -> tuple[Classes, Classes]:
        """Returns a block of each class without recompute, and at the recompute of settings."""
        size, sharding = _of_passes(layout)

        def at(chosen: Settings) -> Classes:
            recompute = chosen.recompute, chosen.recompute_modules, chosen.full_in_turn
            return self._once(
                ("blocks", size, sharding, recompute, prices.training),
                lambda: blocks_at(self._classes, size, sharding, chosen, prices),
            )

        if settings.recompute is Recompute.NONE:
            return (at(settings),) * 2
        return at(replace(settings, recompute=Recompute.NONE)), at(settings)

    def _states_bytes(
        self, layout: ParallelLayout, zero: int, prices: PriceCache, *, in_turn: bool
    ) -> float:
        """Least bytes of the states of a block; without gradients where these come and go."""
        zero = zero if layout.mesh.replicas > 1 else 0

        def of(kind: LayerKey) -> float:
            states = prices.states(kind, layout.mesh, layout.sharding, zero).states
            return states.total - (states.gradients if in_turn else 0.0)

        key = "states", layout.mesh, layout.sharding, zero, in_turn
        return self._once(key, lambda: min(map(of, self._classes)))


def _of_passes(layout: ParallelLayout) -> tuple[int, Sharding]:
    """Returns what the passes of a layer depend on."""
    return layout.micro_batch_size, layout.sharding
