"""Real numbers of blocks on two options: what a pair costs, which share of the second fits, and the
corners of what all pairs leave.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from parplan.planner.dominance import Array, Ints
from parplan.planner.layer_options.mixes import OptionPairs, column_of
from parplan.planner.stage_columns.stage_prices import BlockCosts

TOLD_APART = 1e-9  # relative: sums of the same terms in another order


class RelaxedPairs:
    """What a block costs on the two options of every pair: `[side, pair]`, or the larger or smaller
    of both by pair.
    """

    def __init__(self, block: BlockCosts, pairs: OptionPairs) -> None:
        index = pairs.index
        self.alone = index[0] == index[1]
        self._tail_s, self._time_s, self._plain_s = (
            (values[index[0]], values[index[1]] - values[index[0]])
            for values in (block.tail_s, block.time_s, block.time_s - block.recompute_s)
        )
        self.states, self.step_copies, self.whole_saved = (
            block.states[index],
            block.step_copies[index],
            block.whole_saved[index],
        )
        self.saved_bytes, self.workspace_bytes = pairs.saved_bytes, pairs.workspace_bytes
        self.zero_buffer, self.whole_workspace = (
            values[index].max(axis=0) for values in (block.zero_buffer, block.whole_workspace)
        )
        self.waiting, self.gradients = block.waiting[index].min(axis=0), block.gradients[index]
        gathered, reduced = block.passes_bytes
        workspaces = column_of(block.options, "workspace_bytes"), block.whole_workspace
        self._inside: list[Array] = [
            (gathered + np.maximum(workspace, reduced))[index].min(axis=0)
            for workspace in workspaces
        ]

    def at(self, chosen: Ints, share: Array, *, plain: bool) -> tuple[Array, Array]:
        """Seconds of a micro-batch, or without recompute, and of the tail, of a block with `share`
        of the second option of each pair.
        """
        first_s, longer_s = self._plain_s if plain else self._time_s
        first_tail_s, longer_tail_s = self._tail_s
        return first_s[chosen] + share * longer_s[chosen], first_tail_s[
            chosen
        ] + share * longer_tail_s[chosen]

    def inside(self, alone: bool) -> Array:
        """By pair what any block holds at least in its backward pass, where gradients come and go;
        alone: without recompute.
        """
        return self._inside[alone]


def corners_of_lines(weights: Array, least_s: Array, tail_s: float) -> list[tuple[float, float]]:
    """(time, tail) at the corners of the region above the lines time + weight tail = least, and
    above `tail_s`.

    weights: ascending, the first zero. Of two neighbours the one with the lower weight is the upper
    one where the tail is longer.
    """
    found: list[tuple[float, float]] = []
    for weight, least, next_weight, next_least in zip(
        weights[:-1], least_s[:-1], weights[1:], least_s[1:], strict=True
    ):
        meets_s = float((next_least - least) / (next_weight - weight))
        if meets_s <= tail_s:
            return [*found, (float(least - weight * tail_s), tail_s)]
        if (
            not found or found[-1][1] - meets_s > TOLD_APART * found[-1][1]
        ):  # else three lines meet in one corner
            found.append((float(least - weight * meets_s), meets_s))
    return [*found, (float(least_s[-1] - weights[-1] * tail_s), tail_s)]


def least_shares(own: Array, room: Array, alone: npt.NDArray[np.bool_]) -> tuple[Ints, Array]:
    """The pairs that matter where an average block may have `room` bytes, and the least share of
    the second option of each.

    own: bytes of a block by side and pair; alone: pairs of an option with itself. Of two options
    that both have room, each alone says as much as the two together.
    """
    first, second = own
    over = first - room
    chosen = np.flatnonzero(np.where(over > 0, second <= room, alone))
    over = np.maximum(over[chosen], 0.0)
    return chosen, over / np.maximum(first[chosen] - second[chosen], over + (over == 0))
