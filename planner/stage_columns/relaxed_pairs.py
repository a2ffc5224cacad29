"""Mixes of real numbers of blocks on two options: costs, fitting shares, corners of their bound."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from parplan.planner.dominance import Array, Ints
from parplan.planner.layer_options.mixes import OptionPairs, column_of
from parplan.planner.stage_columns.stage_prices import BlockCosts

TOLD_APART = 1e-9  # relative: closer values are sums of the same terms in another order


class RelaxedPairs:
    """Costs of a block on the two options of every pair.

    Arrays are `[side, pair]`, or the larger or smaller of both by pair.
    """

    def __init__(self, block: BlockCosts, pairs: OptionPairs) -> None:
        index = pairs.index
        self.alone = index[0] == index[1]
        self._tail_s = _first_and_difference(block.tail_s, index)
        self._time_s = _first_and_difference(block.time_s, index)
        self._plain_s = _first_and_difference(block.time_s - block.recompute_s, index)
        self.states = block.states[index]
        self.step_copies = block.step_copies[index]
        self.whole_saved = block.whole_saved[index]
        self.saved_bytes = pairs.saved_bytes
        self.workspace_bytes = pairs.workspace_bytes
        self.zero_buffer = block.zero_buffer[index].max(axis=0)
        self.whole_workspace = block.whole_workspace[index].max(axis=0)
        self.waiting = block.waiting[index].min(axis=0)
        self.gradients = block.gradients[index]
        gathered, reduced = block.gathered_bytes, block.reduced_bytes
        workspaces = column_of(block.options, "workspace_bytes"), block.whole_workspace
        self._inside: list[Array] = [
            (gathered + np.maximum(workspace, reduced))[index].min(axis=0)
            for workspace in workspaces
        ]

    @property
    def arrays(self) -> list[Array]:
        """All arrays of these costs."""
        pairs = (self._tail_s, self._time_s, self._plain_s)
        own = (each for each in vars(self).values() if isinstance(each, np.ndarray))
        return [*own, *self._inside, *(each for pair in pairs for each in pair)]

    def at(self, chosen: Ints, share: Array, *, plain: bool) -> tuple[Array, Array]:
        """Returns seconds of a micro-batch and of the tail of a block.

        share    the share of the second option of each chosen pair
        plain    the seconds of a micro-batch are those without recompute
        """
        first_s, longer_s = self._plain_s if plain else self._time_s
        first_tail_s, longer_tail_s = self._tail_s
        time_s = first_s[chosen] + share * longer_s[chosen]
        tail_s = first_tail_s[chosen] + share * longer_tail_s[chosen]
        return time_s, tail_s

    def inside(self, alone: bool) -> Array:
        """Least bytes of a block in its backward pass by pair, if gradients come and go.

        alone    the backward pass has no recompute in it
        """
        return self._inside[alone]


def _first_and_difference(values: Array, index: Ints) -> tuple[Array, Array]:
    return values[index[0]], values[index[1]] - values[index[0]]


def corners_of_lines(weights: Array, least_s: Array, tail_s: float) -> list[tuple[float, float]]:
    """Returns (time, tail) of the corners of the region above all lines and above `tail_s`.

    weights    ascending, the first zero
    least_s    each line is time + weight tail = least

    Of two neighbouring lines the one with the lower weight is higher where the tail is longer.
    """
    corners: list[tuple[float, float]] = []
    for weight, least, next_weight, next_least in zip(
        weights[:-1], least_s[:-1], weights[1:], least_s[1:], strict=True
    ):
        meets_s = float((next_least - least) / (next_weight - weight))
        if meets_s <= tail_s:
            return [*corners, (float(least - weight * tail_s), tail_s)]
        # else three lines meet in one corner
        if not corners or corners[-1][1] - meets_s > TOLD_APART * corners[-1][1]:
            corners.append((float(least - weight * meets_s), meets_s))
    return [*corners, (float(least_s[-1] - weights[-1] * tail_s), tail_s)]


def least_shares(
    pair_bytes: Array, room: Array, alone: npt.NDArray[np.bool_]
) -> tuple[Ints, Array]:
    """Returns the pairs whose average block may fit, and the least share of their second option.

    pair_bytes    bytes of a block by side and pair
    room          bytes for an average block, by pair
    alone         pairs of an option with itself

    If both options of a pair fit, their pairs with themselves replace it.
    """
    first, second = pair_bytes
    over = first - room
    chosen = np.flatnonzero(np.where(over > 0, second <= room, alone))
    over = np.maximum(over[chosen], 0.0)
    return chosen, over / np.maximum(first[chosen] - second[chosen], over + (over == 0))
