"""The settings that a launcher can run of one request, by layout.

The space is what the launcher's target declares (planner/export/fields/launcher.py): its ZeRO
stages, its kinds of recompute, its stages, and the table of its arguments. A layout belongs to the
space where its settings, written as arguments and read back, are the same settings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.strategy import ParallelLayout, Strategy
from parplan.planner.baselines.optimum import pass_s
from parplan.planner.baselines.uniform_strategies import counted_ends, equal_blocks
from parplan.planner.export.fields.balanced_stages import balanced_cuts, balanced_stages
from parplan.planner.export.fields.configured import strategy_of_settings
from parplan.planner.export.fields.launcher import RecomputeChoice, Target, read_back
from parplan.planner.export.fields.settings import (
    Settings,
    layout_facts,
    model_facts,
    training_facts,
)
from parplan.planner.infeasible.shortfall import price_cache_of
from parplan.planner.layer_options.overlap_levels import illegal_zero
from parplan.planner.request import Request
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.transformer import has_unlike_blocks

Blocks = tuple[int, ...]  # of each virtual stage, in the order of the model


@dataclass
class LauncherSpace:
    """The settings of a launcher for a request, whose pins and bans hold.

    limit_bytes    what a plan may fill on a device
    unsaid         choices that were met and that the launcher cannot say
    """

    target: Target
    request: Request
    limit_bytes: float
    unsaid: dict[str, None] = field(default_factory=dict)

    @cached_property
    def price_cache(self) -> PriceCache:
        return price_cache_of(self.request)

    def settings(self, layout: ParallelLayout) -> Iterator[Settings]:
        """Yields the settings of a layout without stages, those without recompute first."""
        for recompute in self.recomputes(layout):
            for zero in self.zeros(layout):
                yield replace(self._settings(layout, zero), **recompute)

    def strategies(
        self, settings: Settings, layout: ParallelLayout, below_s: float
    ) -> Iterator[Strategy]:
        """Yields the strategies of settings whose work alone may take less than `below_s`."""
        if self._least_s(settings, layout) < below_s and self._says(settings, layout):
            for blocks in self._partitions(settings, layout, below_s):
                yield self._strategy(replace(settings, blocks=blocks), layout)

    def _says(self, settings: Settings, layout: ParallelLayout) -> bool:
        """Returns whether the launcher's arguments say settings; if not, what is unsaid is kept."""
        blocks = next(iter(self._listed(layout)), None)
        if blocks is None:
            self.unsaid["equal stages"] = None
            return False
        settings = replace(settings, blocks=blocks)
        try:
            back = read_back(self.target, settings, self.request.model, self.request.cluster)
        except ConfigError as error:
            self.unsaid[error.message] = None
            return False
        if settings.tp == 1:  # there is nothing to overlap
            back = replace(back, tp_overlap=settings.tp_overlap)
        names = (each.name for each in fields(Settings))
        unsaid = [name for name in names if getattr(back, name) != getattr(settings, name)]
        self.unsaid |= dict.fromkeys(unsaid)
        return not unsaid

    def _least_s(self, settings: Settings, layout: ParallelLayout) -> float:
        """Returns seconds that settings take at least: all passes, shared by all ranks."""
        model, stages = self.request.model, layout.num_virtual_stages
        if has_unlike_blocks(model, self.request.training):
            return 0.0
        probe = self._strategy(replace(settings, blocks=(_distinct(settings),) * stages), layout)
        embedding, *blocks = (
            choice for choice in probe.stages[0] if choice.kind is not LayerKind.HEAD
        )
        again = min(stages - 1 + (settings.recompute_blocks or 0), model.num_layers)
        numbers = (
            (embedding, 1),
            (blocks[0], again),
            (blocks[-1], model.num_layers - again),
            (probe.stages[-1][-1], 1),
        )
        passes_s = sum(
            number * pass_s(choice, layout, self.price_cache) for choice, number in numbers
        )
        return layout.num_micro_batches * passes_s / layout.mesh.pp

    def zeros(self, layout: ParallelLayout) -> tuple[int, ...]:
        """Returns the ZeRO stages of the launcher that a layout can run."""
        pinned = self.request.constraints.resolved().zero or self.target.zeros
        if layout.mesh.replicas == 1:
            return self.target.zeros[:1]
        return tuple(
            zero for zero in self.target.zeros if zero in pinned and not illegal_zero(layout, zero)
        )

    def recomputes(self, layout: ParallelLayout) -> Iterator[RecomputeChoice]:
        """Yields the kinds of recompute that a layout can run and that pins allow."""
        levels = self.request.constraints.resolved().recompute or tuple(Recompute)
        most = self._most_blocks(layout)
        for choice in self.target.recomputes(self.request.model, most):
            level = choice["recompute"]
            if level in levels and (level is Recompute.NONE or not layout.splits_backward):
                yield choice

    def _settings(self, layout: ParallelLayout, zero: int) -> Settings:
        model, cluster = self.request.model, self.request.cluster
        return Settings(
            zero=zero,
            zero_ranks=self.request.constraints.zero_ranks,
            **layout_facts(layout, model, cluster),
            **model_facts(model),
            **training_facts(self.request.training),
        )

    def _strategy(self, settings: Settings, layout: ParallelLayout) -> Strategy:
        zero = settings.zero if layout.mesh.replicas > 1 else 0
        return strategy_of_settings(settings, layout, zero, self.price_cache)

    def _most_blocks(self, layout: ParallelLayout) -> int:
        return max((max(blocks) for blocks in self._listed(layout)), default=1)

    def _listed(self, layout: ParallelLayout) -> tuple[Blocks, ...]:
        """Returns the stages that are tried whatever blocks cost."""
        layers, stages = self.request.model.num_layers, layout.num_virtual_stages
        if stages == 1:
            return ((layers,),)
        alike = (equal_blocks(layout, layers, ends) for ends in counted_ends(layers, stages))
        equal = tuple(blocks for blocks in alike if min(blocks) > 0)
        if self.target.partitions is None:
            return equal if layout.equal_ranks or equal else (_near(layers, stages),)
        said = tuple(self.target.partitions(stages, layers))
        return tuple(blocks for blocks in equal if blocks in said) if layout.equal_ranks else said

    def _partitions(
        self, settings: Settings, layout: ParallelLayout, below_s: float
    ) -> Iterator[Blocks]:
        """Yields the stages that are tried of settings."""
        yield from self._listed(layout)
        model, training = self.request.model, self.request.training
        if self.target.partitions is not None or layout.equal_ranks or layout.mesh.pp == 1:
            return

        def made(blocks: Blocks) -> Strategy:
            return self._strategy(replace(settings, blocks=blocks), layout)

        within = self.price_cache, self.limit_bytes, below_s
        if not has_unlike_blocks(model, training):
            distinct = _distinct(settings)
            yield from balanced_stages(layout, made, distinct, model.num_layers, *within)
        elif settings.recompute_blocks is None:
            start = _near(model.num_layers, layout.mesh.pp)
            yield from balanced_cuts(layout, made, start, *within)


def _distinct(settings: Settings) -> int:
    """Returns the blocks of a stage from which on all others run as the one before."""
    return 1 + (settings.recompute_blocks or 0)


def _near(layers: int, stages: int) -> Blocks:
    """Returns stages of which none has two blocks more than another, the longer ones first."""
    each, more = divmod(layers, stages)
    return tuple(each + (stage < more) for stage in range(stages))
