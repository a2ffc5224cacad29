"""Hill climbing from a strategy that fits: runs of blocks on other choices, as many as fit, and
random changes to start again from.
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
from parplan.planner.plan.prediction import Objective

BETTER = 1e-9  # relative: what is closer is equal
TRIED = 60  # runs of blocks of one strategy
MOST_CARRIED = 80  # blocks of one strategy that change stages
PATIENCE = 12  # changes that may each fail before the climb starts from the best again

Alike = Callable[
    [LayerChoice, LayerChoice], bool
]  # whether a climb may give a block of the first choice the second


def any_change(old: LayerChoice, new: LayerChoice) -> bool:
    return True


def no_change(old: LayerChoice, new: LayerChoice) -> bool:
    """Blocks keep their choice."""
    return False


def same_recompute(old: LayerChoice, new: LayerChoice) -> bool:
    """Only the ZeRO stage differs."""
    return replace(new, zero=old.zero) == old


def same_zero(old: LayerChoice, new: LayerChoice) -> bool:
    """Only what runs again, and how operators are divided, differs."""
    return old.zero == new.zero


class Climb:
    """Climbs from one strategy to another; `counts` says which strategies may be stepped on, `runs`
    which of them the executor runs.
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
        self.prices, self.palette, self.chance, self.counts, self.runs, self.alike = (
            prices,
            palette,
            chance,
            counts,
            runs,
            alike,
        )

    def from_(self, start: Candidate, evaluations: int, *, moves_blocks: bool = True) -> Candidate:
        """The best strategy that so many evaluations find."""
        stop = self.prices.evaluations + evaluations
        here, failed = self.uphill(start, stop, moves_blocks=moves_blocks), 0
        best = here if self.runs(here.strategy) else start
        while self.prices.evaluations < stop:
            before, changed = (
                self.prices.evaluations,
                self._changed(here.strategy, moves_blocks=moves_blocks),
            )
            found = self._step(changed, None) if changed else None
            if found is not None:
                found = self.uphill(found, stop, moves_blocks=moves_blocks)
            self.prices.evaluations += (
                self.prices.evaluations == before
            )  # a strategy seen before counts too, or the climb may not end
            if found is not None and _better(found, best) and self.runs(found.strategy):
                best, here, failed = found, found, 0
            else:
                failed += 1
                here = found if found is not None and failed % PATIENCE else best
        return best

    def uphill(self, here: Candidate, stop: int, *, moves_blocks: bool) -> Candidate:
        """Run after run of blocks on another choice, or block after block to another stage, while
        that is better.
        """
        moved = True
        while moved and self.prices.evaluations < stop:
            moved = False
            for changed in chain(
                self._runs(here.strategy), self._carries(here.strategy) if moves_blocks else ()
            ):
                found = self._step(changed, here)
                if found is not None and _better(found, here):
                    here, moved = found, True
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
        """As many blocks of a group of stages as fit on a choice that is faster, in random order,
        the largest gain first within three.
        """
        tried = [
            (gain * self.chance.uniform(0.3, 1.0), group, old, new)
            for group in groups_of(strategy)
            for old in choices_of(strategy, group)
            for new in self._offered(strategy, group)
            if (gain := self._gain(strategy, old, new)) > 0 and self.alike(old, new)
        ]
        for _, group, old, new in sorted(tried, key=lambda one: -one[0])[:TRIED]:
            changed = self._filled(strategy, group, old, new)
            if changed != strategy:
                yield changed

    def _carries(self, strategy: Strategy) -> Iterator[Strategy]:
        """One block from any stage to any other, in random order, neighbours first; where the
        device has no room, on leaner choices.
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
            tuple(
                choice for choice in offered[0] if all(choice in others for others in offered[1:])
            )
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
        """On every rank of a group as many blocks on the new choice as fit its device."""
        last = self.chance.random() < 0.5
        for rank in dict.fromkeys(strategy.layout.rank_of(stage) for stage in group):
            own = [stage for stage in group if strategy.layout.rank_of(stage) == rank]
            count = max(sum(choice == old for choice in strategy.stages[stage]) for stage in own)
            kept = strategy

            def with_new(count: int, own: list[int] = own, kept: Strategy = kept) -> Strategy:
                return retuned(kept, own, old, new, count, last=last)

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
        """A random change: blocks to a neighbouring stage, a run of blocks on any choice, or an
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
        """Blocks of one rank on another choice, as few as fit, at the least cost of some random
        choices; None where none fits.
        """
        own, found = strategy.layout.stages_of(rank), []
        olds = choices_of(strategy, own)
        for _ in range(tries):
            old, new = (
                self.chance.choice(olds),
                self.chance.choice(self.palette.choices(strategy.layout, rank)),
            )
            count = max(sum(choice == old for choice in strategy.stages[stage]) for stage in own)
            if old == new or not self.prices.fits(
                retuned(strategy, own, old, new, count, last=True), rank
            ):
                continue
            least = fewest(
                lambda n, o=old, w=new: self.prices.fits(
                    retuned(strategy, own, o, w, n, last=True), rank
                ),
                count,
            )  # type: ignore[misc]
            found.append(retuned(strategy, own, old, new, least, last=True))
        return min(found, key=self.prices.work_s, default=None)

    def _other_ends(self, strategy: Strategy) -> Strategy:
        stages = [choice.zero for choice in self.palette.choices(strategy.layout, 0)]
        embedding = self.chance.choice(stages)
        alike = (
            self.prices.price_cache.tied or self.chance.random() < 0.5
        )  # the executor adds a shared table's gradients as they are held
        return with_ends(strategy, embedding, embedding if alike else self.chance.choice(stages))


def _better(one: Candidate, other: Candidate) -> bool:
    """Whether one is below the other in value, or as good with less work."""
    if one.value < other.value - BETTER * abs(other.value):
        return True
    return one.value <= other.value + BETTER * abs(other.value) and one.work_s < other.work_s * (
        1 - BETTER
    )
