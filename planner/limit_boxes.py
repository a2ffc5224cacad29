"""The fastest choice of ranks that only a longest time, tail and time without recompute join.

The rows (C3), (C4) and (C8) of the master (planner/master.py) join the ranks. With these limits
given, dynamic programming over what else joins them finds the least sum of ramps. A box of limits
has a lower bound: the limits at its lower corner, and the ramps at its upper corner, because looser
limits never lengthen them. So boxes are divided, the one with the least bound first, until no bound
is below the best choice.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from parplan.costmodels.schedules.hidden_recompute import hidden_passes
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.dominance import Array, distinct
from parplan.planner.master import MasterChoice, evaluate
from parplan.planner.stage_columns.stage_column import StageColumn

ROUNDING = 1e-12  # share of the step, of sums in another order
Box = tuple[tuple[int, int], ...]  # by kind of limit, the first and the last of its values


class LimitedRank(Protocol):
    """A rank with the seconds of its columns by kind of limit: time, tail, time without recompute.

    limited_s    [kind, column]
    """

    limited_s: Array


# the columns of all ranks within limits that have the least sum of ramps, None where none fit
LeastRamps = Callable[[Array], Sequence[StageColumn] | None]


def repeats_of(layout: ParallelLayout, share: float) -> Array:
    """Returns how often the longest of each kind of limit counts in a step."""
    hidden = hidden_passes(layout.schedule)
    return np.array([layout.num_micro_batches - share - hidden, 1.0, float(hidden)])


def longer_never_pays(layout: ParallelLayout, share: float) -> bool:
    """Returns whether no step gets shorter where a rank takes longer."""
    return bool((repeats_of(layout, share) >= 0).all())


def faster_and_faster(
    layout: ParallelLayout,
    ranks: Sequence[LimitedRank],
    least_ramps: LeastRamps,
    share: float,
    cut_s: float,
    check: Callable[[], None],
) -> Iterator[MasterChoice]:
    """Yields choices below `cut_s`, each faster than the one before, the optimum last.

    The layout must be one where `longer_never_pays`.

    check    called before each box; may raise if no time is left
    """
    repeats = repeats_of(layout, share)
    values_s = [distinct(np.concatenate([rank.limited_s[k] for rank in ranks])) for k in range(3)]
    order = itertools.count()
    boxes: list[tuple[float, int, Box]] = []
    divided: list[Box] = [tuple((0, len(values) - 1) for values in values_s)]
    while divided or boxes:
        for box in divided:
            check()
            upper_s = np.array([v[last] for v, (_, last) in zip(values_s, box, strict=True)])
            lower_s = np.array([v[first] for v, (first, _) in zip(values_s, box, strict=True)])
            picked = least_ramps(upper_s)
            if picked is None:
                continue
            choice = evaluate(layout, picked, proven=True, share=share)
            if choice.step_s < cut_s:
                cut_s = choice.step_s
                yield choice
            ramps_s = sum(column.ramp_s for column in picked)
            bound_s = float(repeats @ lower_s) + share * ramps_s
            heapq.heappush(boxes, (bound_s, next(order), box))
        bound_s, _, box = heapq.heappop(boxes) if boxes else (math.inf, 0, ())
        if bound_s >= cut_s * (1 - ROUNDING):
            return
        divided = _halves(box, repeats, values_s)


def _halves(box: Box, repeats: Array, values_s: Sequence[Array]) -> list[Box]:
    """Returns the box divided along the limit that matters most for its bound, none of a point."""
    longest = max(
        range(len(box)),
        key=lambda k: (
            repeats[k] * (values_s[k][box[k][1]] - values_s[k][box[k][0]]),
            box[k][1] - box[k][0],
        ),
    )
    first, last = box[longest]
    if first == last:
        return []
    middle = (first + last) // 2
    return [
        (*box[:longest], part, *box[longest + 1 :])
        for part in ((first, middle), (middle + 1, last))
    ]
