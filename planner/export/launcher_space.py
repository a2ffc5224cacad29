"""The settings that a launcher can run of one request, by layout.

The space is what the launcher's target declares (planner/export/fields/launcher.py): its ZeRO
stages, its kinds of recompute, its switches, its stages, and the table of its arguments. A layout
belongs to the space where its settings, written as arguments and read back, are the same settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

from parplan.costmodels.keyed_cache import KeyedCache
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.strategy import ParallelLayout, Strategy
from parplan.planner.baselines.uniform_strategies import counted_ends, equal_blocks
from parplan.planner.export.fields.arguments import Facts
from parplan.planner.export.fields.balanced_stages import balanced_cuts, balanced_stages
from parplan.planner.export.fields.configured import strategy_of_settings
from parplan.planner.export.fields.launcher import RecomputeChoice, Target, read_back
from parplan.planner.export.fields.settings import (
    Settings,
    layout_facts,
    model_facts,
    training_facts,
)
from parplan.planner.export.fields.switches import switched, with_switches
from parplan.planner.export.shared_search import SharedSearch
from parplan.planner.layer_options.overlap_levels import illegal_zero
from parplan.planner.request import Request
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.models.transformer import has_unlike_blocks

Blocks = tuple[int, ...]  # of each virtual stage, in the order of the model
Counts = tuple[int | None, ...]  # blocks of a stage that recompute, None for all of them


@dataclass
class LauncherSpace:
    """The settings of a launcher for a request, whose pins and bans hold.

    limit_bytes    what a plan may fill on a device
    shared         the prices of other searches
    unsaid         choices that were met and that the launcher cannot say
    """

    target: Target
    request: Request
    limit_bytes: float
    shared: SharedSearch = field(default_factory=SharedSearch)
    unsaid: dict[str, None] = field(default_factory=dict)
    _of_layout: KeyedCache = field(default_factory=KeyedCache)
    _prices: dict[tuple[bool, ...], PriceCache] = field(default_factory=dict)

    def kinds(self, layout: ParallelLayout) -> Iterator[tuple[Settings, Counts]]:
        """Yields the settings of a layout for each recompute, at its first ZeRO stage.

        Each comes with the numbers of blocks of a stage that may recompute, None for all of them.
        """
        plain = self._settings(layout, self.zeros(layout)[0])
        key = "kinds", layout.splits_backward, self._most_blocks(layout)
        for facts, counts in self._of_layout(key, lambda: self._counted(layout)):
            chosen = replace(plain, **facts)
            yield switched(chosen, self.target.switches, self.request.cluster), counts

    def _counted(self, layout: ParallelLayout) -> list[tuple[RecomputeChoice, Counts]]:
        """Returns the kinds of recompute of a layout, each with its numbers of blocks."""
        kinds: dict[tuple[object, ...], list[int | None]] = {}
        facts: dict[tuple[object, ...], RecomputeChoice] = {}
        for choice in self.recomputes(layout):
            key = tuple(value for name, value in choice.items() if name != "recompute_blocks")
            facts.setdefault(key, choice)
            kinds.setdefault(key, []).append(choice.get("recompute_blocks"))
        return [(facts[key], tuple(counts)) for key, counts in kinds.items()]

    def training(self, settings: Settings) -> TrainingSpec:
        """Returns the training of the request with the switches of settings."""
        switches = self.target.switches
        on = (getattr(settings, each.fact) for each in switches)
        return with_switches(self.request.training, switches, on)

    def prices(self, settings: Settings) -> PriceCache:
        """Returns prices of settings: a switch that makes no difference to them counts as on."""
        switches = self.target.switches
        return self._switched(
            tuple(each.idle(settings) or getattr(settings, each.fact) for each in switches)
        )

    @cached_property
    def fastest_prices(self) -> PriceCache:
        """The prices with every switch on, of which none is above those of any settings."""
        return self._switched((True,) * len(self.target.switches))

    def _switched(self, on: tuple[bool, ...]) -> PriceCache:
        """Returns the prices with each switch on or off."""
        if on not in self._prices:
            training = with_switches(self.request.training, self.target.switches, on)
            self._prices[on] = self.shared.prices(self.request, training)
        return self._prices[on]

    def strategies(
        self, settings: Settings, layout: ParallelLayout, listed: Iterable[Blocks], below_s: float
    ) -> Iterator[Strategy]:
        """Yields the strategies of settings on listed stages, and on those that are balanced.

        The slowest rank of balanced stages alone takes less than `below_s`.
        """
        for blocks in (*listed, *self._balanced(settings, layout, below_s)):
            yield self._strategy(replace(settings, blocks=blocks), layout)

    def says(self, settings: Settings, layout: ParallelLayout) -> bool:
        """Returns whether the launcher's arguments say settings; if not, what is unsaid is kept.

        Some blocks of a stage are said for every number of them.
        """
        some = settings.recompute_blocks is not None and 1
        key = layout, settings.zero, settings.recompute, settings.recompute_modules, some
        return self._of_layout(key, lambda: self._says(settings, layout))

    def _says(self, settings: Settings, layout: ParallelLayout) -> bool:
        blocks = next(iter(self.listed(layout)), None)
        if blocks is None:
            self.unsaid["equal stages"] = None
            return False
        settings = replace(settings, blocks=blocks)
        try:
            back = read_back(self.target, settings, self.request.model, self.request.cluster)
        except ConfigError as error:
            self.unsaid[error.message] = None
            return False
        idle = {each.fact: getattr(settings, each.fact) for each in self.target.switches}
        idle = {each.fact: idle[each.fact] for each in self.target.switches if each.idle(settings)}
        back = replace(back, **idle)
        names = (each.name for each in fields(Settings))
        unsaid = [name for name in names if getattr(back, name) != getattr(settings, name)]
        self.unsaid |= dict.fromkeys(unsaid)
        return not unsaid

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
        for choice in self.target.recomputes(self.request.model, self._most_blocks(layout)):
            level = choice["recompute"]
            if level in levels and (level is Recompute.NONE or not layout.splits_backward):
                yield choice

    def _most_blocks(self, layout: ParallelLayout) -> int:
        return max((max(blocks) for blocks in self.listed(layout)), default=1)

    def _settings(self, layout: ParallelLayout, zero: int) -> Settings:
        return Settings(
            zero=zero,
            zero_ranks=self.request.constraints.zero_ranks,
            **layout_facts(layout, self.request.model, self.request.cluster),
            **self._facts,
        )

    @cached_property
    def _facts(self) -> Facts:
        return model_facts(self.request.model) | training_facts(self.request.training)

    def _strategy(self, settings: Settings, layout: ParallelLayout) -> Strategy:
        zero = settings.zero if layout.mesh.replicas > 1 else 0
        return strategy_of_settings(settings, layout, zero, self.prices(settings))

    def divides_freely(self, layout: ParallelLayout) -> bool:
        """True if the stages of a layout may have any numbers of blocks."""
        return self.target.partitions is None and not layout.equal_ranks and layout.mesh.pp > 1

    def listed(self, layout: ParallelLayout) -> tuple[Blocks, ...]:
        """Returns the stages that are tried whatever blocks cost."""
        key = layout.mesh.pp, layout.num_virtual_stages, layout.equal_ranks
        return self._of_layout(("listed", *key), lambda: self._listed(layout))

    def _listed(self, layout: ParallelLayout) -> tuple[Blocks, ...]:
        layers, stages = self.request.model.num_layers, layout.num_virtual_stages
        if stages == 1:
            return ((layers,),)
        alike = (equal_blocks(layout, layers, ends) for ends in counted_ends(layers, stages))
        equal = tuple(blocks for blocks in alike if min(blocks) > 0)
        if self.target.partitions is None:
            return equal if layout.equal_ranks or equal else (_near(layers, stages),)
        said = tuple(self.target.partitions(stages, layers))
        return tuple(blocks for blocks in equal if blocks in said) if layout.equal_ranks else said

    def _balanced(
        self, settings: Settings, layout: ParallelLayout, below_s: float
    ) -> Iterator[Blocks]:
        """Yields the stages that depend on what blocks cost, where they are free."""
        if not self.divides_freely(layout):
            return
        model, training = self.request.model, self.request.training

        def made(blocks: Blocks) -> Strategy:
            return self._strategy(replace(settings, blocks=blocks), layout)

        within = self.prices(settings), self.limit_bytes, below_s
        if not has_unlike_blocks(model, training):
            distinct = 1 + (settings.recompute_blocks or 0)  # blocks beyond run as the last
            yield from balanced_stages(layout, made, distinct, model.num_layers, *within)
        elif settings.recompute_blocks is None:
            start = _near(model.num_layers, layout.mesh.pp)
            yield from balanced_cuts(layout, made, start, *within)


def _near(layers: int, stages: int) -> Blocks:
    """Returns stages of which none has two blocks more than another, the longer ones first."""
    each, more = divmod(layers, stages)
    return tuple(each + (stage < more) for stage in range(stages))
