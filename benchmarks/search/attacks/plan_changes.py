"""A climb from the plan of any request by random changes of layers, priced as the plan is."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

from benchmarks.search.attacks.allowed import left_out
from benchmarks.search.attacks.change import runs, way_text
from benchmarks.search.attacks.families import Asked
from benchmarks.search.attacks.whole_plans import ROUNDING, Attack, limits_gib, slowest_s
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.step import StepPrice, price_step
from parplan.costmodels.strategy import LayerChoice, Strategy
from parplan.executor.rules.all_rules import refusals
from parplan.planner.layer_options.overlap_levels import illegal_full_recompute
from parplan.planner.plan.assemble import assemble
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.prediction import SearchRecord
from parplan.planner.plan.reprice import Repriced, reprice
from parplan.planner.request import Constraints, Request
from parplan.planner.stage_columns.mix_table import MixTable
from parplan.profiles.errors import ConfigError, InfeasibleError
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.transformer import has_unlike_blocks
from parplan.profiles.units import GIB

UNSEARCHED = SearchRecord.of_estimate(0.0, 0.0)
Layers = tuple[LayerChoice, ...]


class Changes:
    """Climbs from a plan by random changes of single blocks, priced as the plan is.

    given    the plan with its strategy and prices
    """

    def __init__(self, plan: Plan, asked: Asked, request: Request, chance: random.Random) -> None:
        self.asked, self.request, self.chance = asked, request, chance
        self.given: Repriced[Plan, PriceCache] = reprice(plan)
        self.pins: Constraints = request.constraints.resolved(request.training.stack)
        self.limits = [gib * GIB * (1 + ROUNDING) for gib in limits_gib(plan, request)]
        self.slowest_s = slowest_s(plan, asked, request) * (1 + ROUNDING)
        self.excused = frozenset(rule.name for rule, _ in refusals(plan))
        self.priced = 0
        self.unlike = has_unlike_blocks(request.model, request.training)
        self.weight_layouts: dict[object, object] = {}
        self.ways = self._ways()

    def _ways(self) -> dict[object, list[LayerChoice]]:
        """Return other choices of the recompute and division of blocks, by class."""
        strategy, prices = self.given.strategy, self.given.price_cache
        layout = strategy.layout
        ways: dict[object, list[LayerChoice]] = {}
        for choice in (choice for stage in strategy.stages for choice in stage):
            if choice.kind.role is LayerKind.BLOCK:
                ways.setdefault(choice.kind, []).append(choice)
        levels = self.pins.recompute or tuple(Recompute)
        pooled = bool(layout.pools)
        table = MixTable(prices, self.pins) if not self.unlike and not pooled else None
        for kind, choices in ways.items():
            for level in levels:
                if layout.tp_overlap and illegal_full_recompute(
                    layout.tp_overlap, self.request.model
                ):
                    continue
                if not layout.splits_backward:
                    choices.append(
                        replace(
                            choices[0],
                            recompute=prices.recompute_operators(kind, level),  # type: ignore[arg-type]
                            sharding=None,
                            on_host=(),
                        )
                    )
            for option in table.options(layout, 0) if table and not layout.chunked else ():
                sharding = option.sharding if option.sharding != layout.sharding else None
                names = prices.recompute_operators(kind, option.recompute)  # type: ignore[arg-type]
                self.weight_layouts[sharding] = option.weight_layout
                choices.append(replace(choices[0], recompute=names, sharding=sharding, on_host=()))
            ways[kind] = list(dict.fromkeys(choices))
        return ways

    def _searched(self, strategy: Strategy) -> bool:
        """Return False for a strategy of a part that `--explain` lists as not searched."""
        layout = strategy.layout
        if left_out(strategy, self.pins) or (self.unlike and layout.virtual_stages > 1):
            return False
        for stage in strategy.stages:
            blocks = [choice for choice in stage if choice.kind.role is LayerKind.BLOCK]
            divided = {self.weight_layouts.get(each.sharding, each.sharding) for each in blocks}
            if len(divided) > 1 and not self.unlike:
                return False
        for rank in range(layout.mesh.pp):
            layers = [each for stage in layout.stages_of(rank) for each in strategy.stages[stage]]
            alike = layers if self.unlike else list(filter(_is_end, layers))
            if len({choice.zero for choice in alike}) > 1:
                return False
        return True

    def value(self, price: StepPrice, strategy: Strategy) -> float:
        if self.asked.objective == "memory":
            redundant = sum(rank.total for rank in price.redundant)
            return strategy.layout.mesh.ranks_per_stage * redundant / GIB
        if self.asked.objective == "peak":
            return price.peak_bytes / GIB
        return price.step_s

    def climb(self, tries: int) -> Attack | None:
        """Return the best strategy of so many changes that the request allows, None without one."""
        here = self.given.strategy
        best = start = self.value(self.given.price, here)
        best_s = self.given.price.step_s
        for _ in range(tries):
            changed: Strategy | None = here
            for _ in range(self.chance.choice((1, 1, 2, 3))):
                changed = self._changed(changed) if changed else None
            if changed is None or changed == here or not self._searched(changed):
                continue
            price = self._price(changed)
            if price is None:
                continue
            value = self.value(price, changed)
            if (value, price.step_s) < (best, best_s) and self._runs(changed, price):
                here, best, best_s = changed, value, price.step_s
        if best >= start:
            return None
        text = f"{describe(here)}; the plan: {describe(self.given.strategy)}"
        return Attack("changes", best, best_s, text)

    def _price(self, strategy: Strategy) -> StepPrice | None:
        self.priced += 1
        try:
            price = price_step(strategy, self.given.price_cache)
        except (ConfigError, InfeasibleError):
            return None
        fits = all(
            memory.total <= limit for memory, limit in zip(price.memory, self.limits, strict=True)
        )
        return price if fits and price.step_s <= self.slowest_s else None

    def _runs(self, strategy: Strategy, price: StepPrice) -> bool:
        plan = assemble(strategy, price, UNSEARCHED, self.given.price_cache)
        return all(rule.name in self.excused for rule, _ in refusals(plan))

    def _changed(self, strategy: Strategy) -> Strategy | None:
        moves: list[Callable[[Strategy], Strategy | None]] = [self._retuned, self._retuned]
        if strategy.layout.mesh.replicas > 1 and not strategy.layout.chunked:
            moves.append(self._resharded)
        if strategy.layout.num_virtual_stages > 1 and not strategy.layout.equal_ranks:
            moves.append(self._carried)
        return self.chance.choice(moves)(strategy)

    def _run(self, strategy: Strategy) -> tuple[int, int, int]:
        """Return a stage, and a run of its layers."""
        stage = self.chance.randrange(len(strategy.stages))
        length = len(strategy.stages[stage])
        first = self.chance.randrange(length)
        return stage, first, min(length, first + self.chance.choice((1, 1, 2, length)))

    def _mapped(
        self, strategy: Strategy, new: Callable[[LayerChoice, int], LayerChoice]
    ) -> Strategy:
        stage, first, last = self._run(strategy)
        rank = strategy.layout.rank_of(stage)
        layers = strategy.stages[stage]
        inside = tuple(new(choice, rank) for choice in layers[first:last])
        stages = list(strategy.stages)
        stages[stage] = (*layers[:first], *inside, *layers[last:])
        return replace(strategy, stages=tuple(stages))

    def _retuned(self, strategy: Strategy) -> Strategy:
        draw = self.chance.random()

        def new(choice: LayerChoice, rank: int) -> LayerChoice:
            ways = self.ways.get(choice.kind)
            if ways is None or strategy.layout.keeps_all(rank):
                return choice
            way = ways[int(draw * len(ways))]
            return replace(way, zero=choice.zero, home=choice.home, own_zero=choice.own_zero)

        return self._mapped(strategy, new)

    def _at_rank(self, strategy: Strategy, zero: int) -> Strategy:
        """Return the strategy with all layers of a pipeline rank at one ZeRO stage."""
        rank = self.chance.randrange(strategy.layout.mesh.pp)
        stages = list(strategy.stages)
        for stage in strategy.layout.stages_of(rank):
            stages[stage] = tuple(replace(choice, zero=zero) for choice in stages[stage])
        return replace(strategy, stages=tuple(stages))

    def _resharded(self, strategy: Strategy) -> Strategy:
        layout = strategy.layout
        zero = self.chance.choice(self.pins.zero or (0, 1, 2, 3))
        if zero == 3 and (layout.splits_backward or layout.recomputes_ahead):
            return strategy
        if self.unlike:
            changed = self._at_rank(strategy, zero)
        else:
            changed = self._mapped(strategy, lambda each, _: replace(each, zero=zero, own_zero=()))
        if not self.given.price_cache.tied:
            return changed
        ends = {choice.zero for stage in changed.stages for choice in stage if _is_end(choice)}
        return changed if len(ends) == 1 else strategy

    def _carried(self, strategy: Strategy) -> Strategy | None:
        """Return the strategy with a block moved over a border between two stages."""
        sizes = [len(stage) for stage in strategy.stages]
        layers = [choice for stage in strategy.stages for choice in stage]
        border = self.chance.randrange(len(sizes) - 1)
        step = self.chance.choice((-1, 1))
        sizes[border], sizes[border + 1] = sizes[border] + step, sizes[border + 1] - step
        if min(sizes) < 1:
            return None
        ends = list(accumulate(sizes))
        stages = tuple(
            tuple(layers[end - size : end]) for end, size in zip(ends, sizes, strict=True)
        )
        whole = all(any(c.kind.role is LayerKind.BLOCK for c in stage) for stage in stages)
        heads = _is_end(stages[0][0]) and _is_end(stages[-1][-1])
        return replace(strategy, stages=stages) if whole and heads else None


def _is_end(choice: LayerChoice) -> bool:
    return choice.kind.role in (LayerKind.EMBEDDING, LayerKind.HEAD)


def describe(strategy: Strategy) -> str:
    """Return the runs of equal layers of each stage as text."""
    return " | ".join(_stage_text(stage) for stage in strategy.stages)


def _stage_text(stage: Layers) -> str:
    return ", ".join(
        f"{count} x {choice.kind} ZeRO {choice.zero} {way_text(choice)}"
        for choice, count in runs(stage)
    )
