"""Hill climbing from a strategy that fits.

A step puts a run of blocks on another choice, as many as fit. A climb starts again after a random
change.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain

from benchmarks.search.attacks.moves import (
    block_counts,
    carried,
    choices_of,
    fewest,
    groups_of,
    most,
    retuned,
    with_ends,
)
from benchmarks.search.attacks.palette import Palette
from benchmarks.search.attacks.prices import Candidate, Prices
from parplan.costmodels.strategy import LayerChoice, Strategy
from parplan.planner.objective import Objective

BETTER = 1e-9  # relative: what is closer is equal
TRIED = 60  # most runs of blocks tried from one strategy
MOST_CARRIED = 80  # most moves of a block tried from one strategy
PATIENCE = 12  # changes that fail in a row before the climb returns to the best

Alike = Callable[
    [LayerChoice, LayerChoice], bool
]  # whether a climb may give a block of the first choice the second


def any_change(old: LayerChoice, new: LayerChoice) -> bool:
    return True


def no_change(old: LayerChoice, new: LayerChoice) -> bool:
    """Return False: blocks keep their choice."""
    return False


def same_recompute(old: LayerChoice, new: LayerChoice) -> bool:
    """Return True if only the ZeRO stage differs."""
    return replace(new, zero=old.zero) == old


def same_zero(old: LayerChoice, new: LayerChoice) -> bool:
    """Return True if only recompute and the division of operators differ."""
    return old.zero == new.zero


class Climb:
    """Climbs from one strategy to another.

    counts  says which strategies the climb may visit
    runs    says which of them the executor runs
    """

    def __init__(
        self,
        prices: Prices,
        palette: Palette,
        chance: random.Random,
        counts: Callable[[Strategy], bool],
        runs: Callable[[Strategy], bool],
        alike: Alike = any_change,
    ) -> None:
        self.prices = prices
        self.palette = palette
        self.chance = chance
        self.counts = counts
        self.runs = runs
        self.alike = alike

    def from_(self, start: Candidate, evaluations: int, *, moves_blocks: bool = True) -> Candidate:
        """Return the best strategy within so many evaluations."""
        stop = self.prices.evaluations + evaluations
        here, failed = self.uphill(start, stop, moves_blocks=moves_blocks), 0
        best = here if self.runs(here.strategy) else start
        while self.prices.evaluations < stop:
            before = self.prices.evaluations
            changed = self._changed(here.strategy, moves_blocks=moves_blocks)
            stepped = self._step(changed, None) if changed else None
            if stepped is not None:
                stepped = self.uphill(stepped, stop, moves_blocks=moves_blocks)
            if self.prices.evaluations == before:
                self.prices.evaluations += 1  # else the climb may not end
            if stepped is not None and _better(stepped, best) and self.runs(stepped.strategy):
                best = here = stepped
                failed = 0
            else:
                failed += 1
                here = stepped if stepped is not None and failed % PATIENCE else best
        return best

    def uphill(self, here: Candidate, stop: int, *, moves_blocks: bool) -> Candidate:
        """Climb to a local optimum.

        Run after run of blocks goes to another choice, or block after block to another stage, while
        that improves the strategy.
        """
        moved = True
        while moved and self.prices.evaluations < stop:
            moved = False
            for changed in chain(
                self._runs(here.strategy), self._carries(here.strategy) if moves_blocks else ()
            ):
                stepped = self._step(changed, here)
                if stepped is not None and _better(stepped, here):
                    here, moved = stepped, True
                    break
                if self.prices.evaluations >= stop:
                    break
        return here

    def _step(self, strategy: Strategy, than: Candidate | None) -> Candidate | None:
        if not self.counts(strategy):
            return None
        return self.prices.price(
            strategy,
            than.value if than and self.prices.objective is Objective.THROUGHPUT else float("inf"),
        )

    def _runs(self, strategy: Strategy) -> Iterator[Strategy]:
        """Yield strategies with as many blocks of a group of stages as fit on a faster choice.

        The order is random, the largest gain first within three.
        """
        tried = [
            (gain * self.chance.uniform(0.3, 1.0), group, old, new)
            for group in groups_of(strategy)
            for old in choices_of(strategy, group)
            for new in self._offered(strategy, group)
            if (gain := self._gain(strategy, old, new)) > 0 and self.alike(old, new)
        ]
        for _, group, old, new in sorted(tried, key=lambda gain: -gain[0])[:TRIED]:
            changed = self._filled(strategy, group, old, new)
            if changed != strategy:
                yield changed

    def _carries(self, strategy: Strategy) -> Iterator[Strategy]:
        """Yield strategies with one block moved from any stage to any other.

        The order is random, neighbours first. If the device has no room, blocks move to leaner
        choices.
        """
        stages = range(len(strategy.stages))
        pairs = [(giver, taker) for giver in stages for taker in stages if giver != taker]
        for giver, taker in sorted(
            pairs, key=lambda pair: (abs(pair[0] - pair[1]) > 1, self.chance.random())
        )[:MOST_CARRIED]:
            moved = self._carried(strategy, giver, taker)
            if moved is not None:
                yield moved

    def _offered(self, strategy: Strategy, group: tuple[int, ...]) -> tuple[LayerChoice, ...]:
        ranks = {strategy.layout.rank_of(stage) for stage in group}
        offered = [self.palette.choices(strategy.layout, rank) for rank in ranks]
        return (
            tuple(choice for choice in offered[0] if all(choice in rest for rest in offered[1:]))
            if len(ranks) > 1
            else offered[0]
        )

    def _gain(self, strategy: Strategy, old: LayerChoice, new: LayerChoice) -> float:
        if old == new:
            return 0.0
        if self.prices.objective is Objective.MEMORY:
            return 1.0
        return self.prices.block_s(old, strategy.layout) - self.prices.block_s(new, strategy.layout)

    def _filled(
        self, strategy: Strategy, group: tuple[int, ...], old: LayerChoice, new: LayerChoice
    ) -> Strategy:
        """Return the strategy with as many blocks on `new` as fit, on every rank of a group."""
        last = self.chance.random() < 0.5
        for rank in dict.fromkeys(strategy.layout.rank_of(stage) for stage in group):
            stages = [stage for stage in group if strategy.layout.rank_of(stage) == rank]
            count = max(sum(choice == old for choice in strategy.stages[stage]) for stage in stages)
            kept = strategy

            def with_new(count: int, stages: list[int] = stages, kept: Strategy = kept) -> Strategy:
                return retuned(kept, stages, old, new, count, last=last)

            fitting = most(
                lambda n, rank=rank, made=with_new: self.prices.fits(made(n), rank), count
            )  # type: ignore[misc]
            if self.prices.objective is Objective.MEMORY:
                fitting = self.chance.choice(
                    (fitting, fitting, min(1, fitting), self.chance.randint(0, fitting))
                )
            strategy = with_new(fitting)
        return strategy

    def _changed(self, strategy: Strategy, *, moves_blocks: bool) -> Strategy | None:
        """Return a random change, or None.

        It moves blocks to a neighbouring stage, puts a run of blocks on any choice, or sets an
        end's ZeRO stage.
        """
        kind = self.chance.random()
        if moves_blocks and kind < 0.35 and len(strategy.stages) > 1:
            return self._carried(strategy, *self.chance.sample(range(len(strategy.stages)), 2))
        if kind < 0.42 and self.alike is any_change:
            return self._other_ends(strategy)
        group = self.chance.choice(groups_of(strategy))
        old, offered = (
            self.chance.choice(choices_of(strategy, group)),
            self._offered(strategy, group),
        )
        possible = [new for new in offered if new != old and self.alike(old, new)]
        if not possible:
            return None
        count = self.chance.randint(1, max(block_counts(strategy)))
        return retuned(
            strategy,
            group,
            old,
            self.chance.choice(possible),
            count,
            last=self.chance.random() < 0.5,
        )

    def _carried(self, strategy: Strategy, giver: int, taker: int) -> Strategy | None:
        moved = carried(strategy, giver, taker)
        if moved is None or not self.counts(moved):
            return None
        rank = strategy.layout.rank_of(taker)
        return moved if self.prices.fits(moved, rank) else self.relieved(moved, rank)

    def relieved(self, strategy: Strategy, rank: int, tries: int = 6) -> Strategy | None:
        """Return the strategy with blocks of one rank on another choice, as few as fit.

        The choice is the cheapest of some random ones; None if none fits.
        """
        stages = strategy.layout.stages_of(rank)
        relieved = []
        olds = choices_of(strategy, stages)
        for _ in range(tries):
            old, new = (
                self.chance.choice(olds),
                self.chance.choice(self.palette.choices(strategy.layout, rank)),
            )
            count = max(sum(choice == old for choice in strategy.stages[stage]) for stage in stages)
            if old == new or not self.prices.fits(
                retuned(strategy, stages, old, new, count, last=True), rank
            ):
                continue
            least = fewest(
                lambda n, o=old, w=new: self.prices.fits(
                    retuned(strategy, stages, o, w, n, last=True), rank
                ),
                count,
            )  # type: ignore[misc]
            relieved.append(retuned(strategy, stages, old, new, least, last=True))
        return min(relieved, key=self.prices.work_s, default=None)

    def _other_ends(self, strategy: Strategy) -> Strategy:
        stages = [choice.zero for choice in self.palette.choices(strategy.layout, 0)]
        embedding = self.chance.choice(stages)
        alike = (
            self.prices.price_cache.tied or self.chance.random() < 0.5
        )  # the executor adds a shared table's gradients as they are held
        return with_ends(strategy, embedding, embedding if alike else self.chance.choice(stages))


def _better(a: Candidate, b: Candidate) -> bool:
    """Return True if `a` is below `b` in value, or as good with less work."""
    if a.value < b.value - BETTER * abs(b.value):
        return True
    return a.value <= b.value + BETTER * abs(b.value) and a.work_s < b.work_s * (1 - BETTER)
