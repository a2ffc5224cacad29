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
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from parplan.costmodels.keyed_cache import KeyedCache
from parplan.costmodels.layers.recompute import Recompute, RecomputedOperators
from parplan.costmodels.memory.rank_memory import gradients_come_and_go, stashes, usable_bytes
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.stage_costs import all_receives_s
from parplan.costmodels.step import bubble_share
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.export.fields.settings import Settings
from parplan.planner.export.launcher_space import LauncherSpace
from parplan.planner.validation.block_modules import RECOMPUTED, module_operators
from parplan.profiles.models.operator_graph import LayerKey, LayerKind

_ROUNDING = 1 - 1e-9  # relative, against another order of summation
_ENDS = (LayerKind.EMBEDDING, LayerKind.HEAD)


class BoundedSettings(NamedTuple):
    """Settings without stages, with a lower bound of their step."""

    bound_s: float
    settings: Settings


class _Block(NamedTuple):
    """A block of one class at a recompute: seconds of its passes, saved and temporary bytes."""

    passes_s: float
    saved_bytes: float
    workspace_bytes: float


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
        """Least seconds of a step: passes without recompute, transfers and data parallelism."""
        prices, (size, sharding) = self.space.fastest_prices, _of_passes(layout)
        layers = self._once(
            ("passes", size, sharding), lambda: self._passes(size, sharding, prices)
        )
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
        found = [
            BoundedSettings(self._bound_s(settings, layout), settings)
            for settings in self.space.settings(layout)
            if self._may_fit(settings, layout)
        ]
        return tuple(sorted(found, key=lambda each: each.bound_s))

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

    def _bound_s(self, settings: Settings, layout: ParallelLayout) -> float:
        """Returns a lower bound of the simulated step of settings in any of their stages."""
        prices = self.space.prices(settings)
        plain = self._layers(layout, settings.zero, prices)
        whole, blocks = self._blocks(settings, layout, None), self._blocks(settings, layout)
        more_s = {kind: blocks[kind].passes_s - whole[kind].passes_s for kind in blocks}
        if settings.recompute_blocks is None:
            added_s = sum(self._classes[kind] * seconds for kind, seconds in more_s.items())
            least_s = min(more_s.values())
        else:
            added_s = self._recomputed(settings, layout) * min(more_s.values())
            least_s = 0.0
        layers = plain._replace(total_s=plain.total_s + added_s, block_s=plain.block_s + least_s)
        if not self.space.divides_freely(layout):
            return self._closed_form_s(layout, layers, prices)
        many, pp = layout.num_micro_batches, layout.mesh.pp
        if layout.splits_backward:
            return many * layers.total_s / pp * _ROUNDING
        return layers.total_s / (1 - (1 - 1 / many) ** pp) * _ROUNDING

    def _recomputed(self, settings: Settings, layout: ParallelLayout) -> int:
        """Returns the fewest blocks that recompute, where the first ones of each stage do."""
        first = settings.recompute_blocks
        assert first is not None, "a part of the blocks recomputes"
        layers = self.space.request.model.num_layers
        if self.space.divides_freely(layout):
            return min(layout.num_virtual_stages - 1 + first, layers)
        return min(
            sum(min(first, count) for count in blocks) for blocks in self.space.listed(layout)
        )

    def _blocks(
        self, settings: Settings, layout: ParallelLayout, level: str | None = ""
    ) -> Mapping[LayerKey, _Block]:
        """Returns a block of each class at the recompute of settings, or at none."""
        prices, (size, sharding) = self.space.prices(settings), _of_passes(layout)
        chosen = (settings.recompute, settings.recompute_modules, settings.full_in_turn)
        if level is None or settings.recompute is Recompute.NONE:
            chosen = (Recompute.NONE, None, False)
        key = "blocks", size, sharding, chosen, prices.training
        return self._once(
            key,
            lambda: {
                kind: _leanest(
                    [
                        _block(kind, size, sharding, operators, prices)
                        for operators in _recomputes(kind, prices, *chosen)
                    ]
                )
                for kind in self._classes
            },
        )

    def _may_fit(self, settings: Settings, layout: ParallelLayout) -> bool:
        """Returns False if a rank holds more than its device has, whatever stages it runs.

        They are the states of its blocks and what they save, at the fewest micro-batches in flight
        of any rank where the stages are free. Where gradients come and go, neither they nor
        temporaries count.
        """
        prices, pp = self.space.prices(settings), layout.mesh.pp
        free = self.space.divides_freely(layout)
        layers, virtual = self.space.request.model.num_layers, layout.virtual_stages
        number = min(
            (sum(blocks[stage] for stage in layout.stages_of(0)) for blocks in self.listed(layout)),
            default=layers,
        )
        if free:
            number = -(-layers // pp)
        held = min(stashes(LayerKind.BLOCK, rank, layout) for rank in (range(pp) if free else (0,)))
        blocks = self._blocks(settings, layout)
        saved = number * min(each.saved_bytes for each in blocks.values())
        workspace = min(each.workspace_bytes for each in blocks.values())
        if settings.recompute_blocks is not None:
            whole = self._blocks(settings, layout, None)
            again = min(virtual * settings.recompute_blocks, number)
            saved += (number - again) * min(
                whole[kind].saved_bytes - blocks[kind].saved_bytes for kind in blocks
            )
            workspace = min(workspace, *(each.workspace_bytes for each in whole.values()))
        comes = gradients_come_and_go(layout, prices)
        states = number * self._states_bytes(settings, layout, comes=comes)
        total = states + held / virtual * saved + (0.0 if comes else workspace)
        return total <= usable_bytes(self.space.limit_bytes, layout.mesh, prices)

    def listed(self, layout: ParallelLayout) -> tuple[tuple[int, ...], ...]:
        return self.space.listed(layout)

    def _states_bytes(self, settings: Settings, layout: ParallelLayout, *, comes: bool) -> float:
        """Least bytes of the states of a block; without gradients where these come and go."""
        prices, zero = self.space.prices(settings), settings.zero
        if layout.mesh.replicas == 1:
            zero = 0

        def of(kind: LayerKey) -> float:
            states = prices.states(kind, layout.mesh, layout.sharding, zero).states
            return states.total - (states.gradients if comes else 0.0)

        key = "states", layout.mesh, layout.sharding, zero, comes
        return self._once(key, lambda: min(map(of, self._classes)))


def _of_passes(layout: ParallelLayout) -> tuple[int, Sharding]:
    """Returns what the passes of a layer depend on."""
    return layout.micro_batch_size, layout.sharding


def _recomputes(
    kind: LayerKey,
    prices: PriceCache,
    level: Recompute,
    modules: tuple[str, ...] | None,
    full_in_turn: bool,
) -> tuple[RecomputedOperators, ...]:
    """Returns the recomputes that blocks of settings have, in turn."""
    if level is not Recompute.SELECTIVE:
        return (level,)
    if modules is not None:
        return (module_operators(prices.whole_layer(kind), modules, RECOMPUTED),)
    return (level, Recompute.FULL) if full_in_turn else (level,)


def _block(
    kind: LayerKey,
    size: int,
    sharding: Sharding,
    operators: RecomputedOperators,
    prices: PriceCache,
) -> _Block:
    held = prices.activations(kind, size, sharding, operators)
    passes_s = prices.layer_time(kind, size, sharding, operators).total_s
    return _Block(passes_s, held.saved, held.workspace)


def _leanest(blocks: list[_Block]) -> _Block:
    """Returns the least of each figure."""
    return _Block(*(min(figures) for figures in zip(*blocks, strict=True)))
