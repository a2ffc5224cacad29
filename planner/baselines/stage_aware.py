"""Merak's stage-aware recompute as strategies: every value of its knob, and the least that fits.

The rule is in planner/stage_recompute.py (EQUATIONS P7). The last floor(n_s r_s) of the n_s blocks
of stage s are recomputed in full. A user of Merak finds the knob r0 by trial; here the least one
that fits is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import ParallelLayout, Strategy
from parplan.planner.baselines.optimum import rank_bytes
from parplan.planner.baselines.uniform_strategies import of_model, staged
from parplan.planner.stage_recompute import (
    Counts,
    recomputed,
    shares_of,
    stage_too_large_error,
)


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
        dict.fromkeys(recomputed(blocks, shares_of(r0, len(blocks), schedule)) for r0 in sorted(at))
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
        strategy = of_model(strategy, self.price_cache)
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

    def least_counts(self) -> Counts:
        """Returns the fewest recomputed blocks with which each stage fits.

        Raises InfeasibleError for the first stage that fits with none.
        """
        return tuple(map(self._fewest, range(len(self.blocks))))

    def _fewest(self, stage: int) -> int:
        if self.fits(stage, 0):
            return 0
        least = None if self.layout.keeps_all(stage) else self.least(stage)
        if least is None:
            raise stage_too_large_error(stage, self.limit_bytes)
        return least

    def least_knob(self) -> Counts | None:
        """Returns the counts of the least r0 that fits, which is the fastest, or None."""
        return next(
            (counts for counts in every_knob(self.blocks, self.layout) if self.holds(counts)), None
        )
