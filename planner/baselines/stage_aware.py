"""Merak's stage-aware recompute: one knob for all stages of a pipeline, or a share for each.

The knob is r0, the recomputed share of the first stage's layers (EQUATIONS P7). A later stage holds
fewer micro-batches and recomputes less:

    r_s = max(0, 1 - (1 - r0) (P - 1) / (P - 1 - s))    for s < P - 1
    r_{P-1} = 0,    under SCP r_{P-2} = r_{P-3}

The last floor(n_s r_s) of the n_s layers of stage s are recomputed in full. The rules were read in
HPDL-Group/Merak at 1593043, Merak/core/pipeline/module.py (activation_checkpoint_ratio) and
Merak/core/merak_engine.py (scheduler_method). The layers of Merak are halves of blocks, here they
are blocks. A user of Merak finds r0 by trial; here the least one that fits is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from math import floor

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import ParallelLayout, Strategy
from parplan.planner.baselines.optimum import rank_bytes
from parplan.planner.baselines.uniform_strategies import staged

Counts = tuple[int, ...]


def one_knob(r0: Fraction, layout: ParallelLayout) -> tuple[Fraction, ...]:
    """Returns the recomputed share of every stage of a pipeline with one chunk a rank."""
    return _shares(r0, layout.mesh.pp, layout.schedule)


def _shares(r0: Fraction, num_stages: int, schedule: Schedule) -> tuple[Fraction, ...]:
    last = num_stages - 1
    shares = [
        max(Fraction(0), 1 - (1 - r0) * Fraction(last, last - stage)) for stage in range(last)
    ]
    if schedule is Schedule.SCP and last > 1:
        shares[-1] = shares[-2]
    return (*shares, Fraction(0))


def listed(shares: Sequence[Fraction], layout: ParallelLayout) -> tuple[Fraction, ...]:
    """Returns a share for every stage: the last of `shares` holds for the stages after it."""
    return (*shares, *[shares[-1]] * (layout.mesh.pp - len(shares)))


def recomputed(blocks: Sequence[int], shares: Iterable[Fraction]) -> Counts:
    """Returns the number of recomputed blocks of every stage, floor(n_s r_s)."""
    return tuple(floor(count * share) for count, share in zip(blocks, shares, strict=True))


def stage_aware(
    layout: ParallelLayout, blocks: Sequence[int], counts: Sequence[int], zero: int
) -> Strategy:
    """Returns the strategy with `blocks[s]` blocks on stage s, the last `counts[s]` recomputed."""
    levels = [
        (Recompute.NONE,) * (num_blocks - count) + (Recompute.FULL,) * count
        for num_blocks, count in zip(blocks, counts, strict=True)
    ]
    return staged(layout, levels, zero)


def every_knob(blocks: Sequence[int], layout: ParallelLayout) -> tuple[Counts, ...]:
    """Returns all counts that r0 from 0 to 1 gives, from the least to the most recompute.

    floor(n_s r_s) changes where n_s r_s reaches a whole number j, at

        r0 = 1 - (1 - j / n_s) (P - 1 - s) / (P - 1)
    """
    return _every_knob(tuple(blocks), layout.schedule)


@lru_cache(maxsize=256)
def _every_knob(blocks: Counts, schedule: Schedule) -> tuple[Counts, ...]:
    last = len(blocks) - 1
    like = [
        min(stage, last - 2) if schedule is Schedule.SCP and last > 1 else stage
        for stage in range(last)
    ]
    at = {
        Fraction(0),
        *(
            1 - (1 - Fraction(j, blocks[stage])) * Fraction(last - like[stage], last)
            for stage in range(last)
            for j in range(1, blocks[stage] + 1)
        ),
    }
    return tuple(
        dict.fromkeys(recomputed(blocks, _shares(r0, len(blocks), schedule)) for r0 in sorted(at))
    )


class StageAwareRoom:
    """Finds the recompute with which every stage of `blocks[s]` blocks fits `limit_bytes`."""

    def __init__(
        self,
        layout: ParallelLayout,
        blocks: Sequence[int],
        zero: int,
        price_cache: PriceCache,
        limit_bytes: float,
    ) -> None:
        self.layout = layout
        self.blocks = blocks
        self.zero = zero
        self.price_cache = price_cache
        self.limit_bytes = limit_bytes
        self.fits = lru_cache(maxsize=None)(self._fits)
        self.least = lru_cache(maxsize=None)(self._least)

    def _fits(self, stage: int, count: int) -> bool:
        counts = [count if index == stage else 0 for index in range(len(self.blocks))]
        strategy = stage_aware(self.layout, self.blocks, counts, self.zero)
        return rank_bytes(strategy, stage, self.price_cache) <= self.limit_bytes

    def _least(self, stage: int) -> int | None:
        """Returns the least positive number of recomputed blocks with which `stage` fits, or None.

        The first recomputed block brings its workspace and every further one only frees bytes, so
        from one block on more recompute never needs more memory.
        """
        low, high = 1, self.blocks[stage]
        if not self.fits(stage, high):
            return None
        while low < high:
            middle = (low + high) // 2
            if self.fits(stage, middle):
                high = middle
            else:
                low = middle + 1
        return low

    def holds(self, counts: Sequence[int]) -> bool:
        """Returns whether every stage fits with `counts[s]` recomputed blocks."""
        return all(self._enough(stage, count) for stage, count in enumerate(counts))

    def _enough(self, stage: int, count: int) -> bool:
        if count == 0 or stage > 0:  # the first stage has the most of its knobs to try
            return self.fits(stage, count)
        least = self.least(stage)
        return least is not None and count >= least

    def least_knob(self) -> Counts | None:
        """Returns the counts of the least r0 that fits, which is the fastest, or None."""
        return next(
            (counts for counts in every_knob(self.blocks, self.layout) if self.holds(counts)), None
        )
