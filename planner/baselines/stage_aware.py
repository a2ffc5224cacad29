"""Stage-aware recompute, as Merak has it: one knob for all stages of a pipeline, or a share for
each (EQUATIONS P7).

The knob is r0, the recomputed share of the first stage's layers. A later stage holds fewer
micro-batches and recomputes less:

    r_s = max(0, 1 - (1 - r0) (P - 1) / (P - 1 - s))   for s < P - 1,     r_{P-1} = 0,     under SCP
    r_{P-2} = r_{P-3}

floor(n_s r_s) of the n_s layers of stage s are recomputed whole, the last ones. Read in
HPDL-Group/Merak at 1593043, Merak/core/pipeline/module.py (activation_checkpoint_ratio) and
Merak/core/merak_engine.py (scheduler_method); its layers are halves of blocks, ours are blocks.
Merak's user finds r0 by trying; here the least one that fits is computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from math import floor

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.memory.rank_memory import rank_memory
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schedules.actions import ActionKind
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import ParallelLayout, Strategy
from parplan.planner.baselines.uniform_strategies import staged

Counts = tuple[int, ...]


def one_knob(r0: Fraction, layout: ParallelLayout) -> tuple[Fraction, ...]:
    """The recomputed share of every stage. `layout` has a pipeline of one chunk a rank."""
    last = layout.mesh.pp - 1
    shares = [
        max(Fraction(0), 1 - (1 - r0) * Fraction(last, last - stage)) for stage in range(last)
    ]
    if layout.schedule is Schedule.SCP and last > 1:
        shares[-1] = shares[-2]
    return (*shares, Fraction(0))


def listed(shares: Sequence[Fraction], layout: ParallelLayout) -> tuple[Fraction, ...]:
    """A share for every stage from a list that may be shorter: its last one holds for the stages
    that it does not name.
    """
    return (*shares, *[shares[-1]] * (layout.mesh.pp - len(shares)))


def recomputed(blocks: Sequence[int], shares: Iterable[Fraction]) -> Counts:
    """How many blocks of every stage are recomputed: floor(n_s r_s)."""
    return tuple(floor(count * share) for count, share in zip(blocks, shares, strict=True))


def stage_aware(
    layout: ParallelLayout, blocks: Sequence[int], counts: Sequence[int], zero: int
) -> Strategy:
    """`blocks[s]` blocks on stage s, the last `counts[s]` of them recomputed whole."""
    levels = [
        (Recompute.NONE,) * (count - again) + (Recompute.FULL,) * again
        for count, again in zip(blocks, counts, strict=True)
    ]
    return staged(layout, levels, zero)


def every_knob(blocks: Sequence[int], layout: ParallelLayout) -> tuple[Counts, ...]:
    """All that r0 from 0 to 1 can ask for, each once, from the least to the most recompute.

    floor(n_s r_s) changes where n_s r_s reaches a whole number j: at r0 = 1 - (1 - j / n_s) (P - 1
    - s) / (P - 1).
    """
    last = layout.mesh.pp - 1
    like = [
        min(stage, last - 2) if layout.schedule is Schedule.SCP and last > 1 else stage
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
    return tuple(dict.fromkeys(recomputed(blocks, one_knob(r0, layout)) for r0 in sorted(at)))


class StageAwareRoom:
    """How much every stage must recompute to stay within `limit_bytes`, with `blocks[s]` blocks at
    ZeRO stage `zero`.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        blocks: Sequence[int],
        zero: int,
        price_cache: PriceCache,
        limit_bytes: float,
    ) -> None:
        self.layout, self.blocks, self.zero, self.price_cache, self.limit_bytes = (
            layout,
            blocks,
            zero,
            price_cache,
            limit_bytes,
        )
        self.fits = lru_cache(maxsize=None)(self._fits)
        self.least = lru_cache(maxsize=None)(self._least)

    def _fits(self, stage: int, again: int) -> bool:
        counts = [again if other == stage else 0 for other in range(len(self.blocks))]
        return (
            rank_memory(
                stage_aware(self.layout, self.blocks, counts, self.zero), stage, self.price_cache
            ).total
            <= self.limit_bytes
        )

    def _least(self, stage: int) -> int | None:
        """The least number above none of recomputed blocks with which `stage` fits; None where
        there is none.

        The first recomputed block brings its workspace, every further one only frees: from one on,
        more never needs more.
        """
        low, high = 1, self.blocks[stage]
        if not self.fits(stage, high):
            return None
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.fits(stage, middle) else (middle + 1, high)
        return low

    def holds(self, counts: Sequence[int]) -> bool:
        """Whether every stage fits with `counts[s]` recomputed blocks."""
        return all(self._enough(stage, again) for stage, again in enumerate(counts))

    def _enough(self, stage: int, again: int) -> bool:
        if again == 0:
            return self.fits(stage, 0)
        least = self.least(stage)
        return least is not None and again >= least

    def least_knob(self) -> Counts | None:
        """What the least r0 that fits recomputes: the fastest of the rule's, since less recompute
        never takes longer.
        """
        return next(
            (counts for counts in every_knob(self.blocks, self.layout) if self.holds(counts)), None
        )

    def least_list(self) -> Counts | None:
        """The same of the list form, a share for every stage: each recomputes as little as fits,
        the last stage nothing.
        """
        counts = [
            0 if self.fits(stage, 0) else self.least(stage) for stage in range(len(self.blocks) - 1)
        ]
        found = tuple(count for count in (*counts, 0) if count is not None)
        return found if len(found) == len(self.blocks) and self.holds(found) else None


def kept_share(
    room_bytes: float,
    *,
    in_flight: int,
    num_layers: int,
    kept_bytes: float,
    checkpoint_bytes: float,
) -> float:
    """The share of a stage's layers that need not be recomputed, by memory (EQUATIONS P7)
    [derived]:

        k_s = min(1, (room - I_s n_s A_ck) / (I_s n_s (A_full - A_ck)))     room = cap - static_s -
        work_s

    room_bytes        what activations may fill of the device
    kept_bytes        what a layer keeps of a micro-batch, checkpoint_bytes what it does when it is
                      recomputed
    """
    held = in_flight * num_layers
    return min(
        1.0, (room_bytes - held * checkpoint_bytes) / (held * (kept_bytes - checkpoint_bytes))
    )


def most_in_flight(layout: ParallelLayout) -> Counts:
    """By rank the most micro-batches between their forward and the end of their backward pass,
    counted in the action lists.
    """
    return tuple(
        max(accumulate(_CHANGE[action.work] for action in order)) for order in layout.orders()
    )


_CHANGE = Counter({ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1, ActionKind.WEIGHT_GRADIENT: -1})
