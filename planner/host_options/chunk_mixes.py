"""For every way to give the blocks of a rank homes the best mix: the one whose compute takes as
long as its copies (EQUATIONS O6).

    t = max(C + A, I, O) + H       of one micro-batch: compute, collectives, copies to the device
    and from it, what the host adds up I = [h + (2 M - 1) max(0, h - c)] / (h M) i     h HOST blocks
    with room for c of them, i to fetch all (costmodels/layers/chunked_layer.py)

Copies run beside compute where there is room for the parameters of the next block and the gradients
of the last; else they add up. Activations that go to the host and come back share the directions
with chunks: I and O have those of such mixes too, beside compute.

Of mixes on the front of seconds and bytes, a slower one leaves more room c for parameters that need
not be fetched again: C grows along the front and I falls, so that the best is one of the two where
they meet, or the fastest where nothing runs beside compute. That is not so of mixes that send
activations: of those all are tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.dominance import Array, Ints
from parplan.planner.host_options.location_costs import LocationCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadedActivations:
    """Of mixes that send activations to the host: what it holds of them at most, and the copies of
    a micro-batch.
    """

    host_bytes: Array
    out_s: Array
    back_s: Array


@dataclass(frozen=True, slots=True)
class ChunkMixes:
    """Mixes, fastest first, each with less memory than those before it; rows and homes are indices.

    compute_s    of a micro-batch; with `share` also by its values, of which homes have one each
    allocated    without chunks, in the fullest pass of a block; at_ends: in one of embedding or
                 head; in_update: in the update
    """

    layout: ParallelLayout
    costs: LocationCosts
    compute_s: Array
    allocated: Array
    at_ends: Array
    in_update: float
    sent: OffloadedActivations | None = None
    share: Ints | None = None

    def compute(self, row: Ints, home: Ints) -> Array:
        """Seconds of a micro-batch."""
        found: Array = (
            self.compute_s[row] if self.share is None else self.compute_s[row, self.share[home]]
        )
        return found

    def needed(self, row: Ints, home: Ints) -> Array:
        """Bytes of the device at its fullest."""
        states, working = self.costs.always_bytes[home], self.costs.working_bytes[home]
        in_passes = np.maximum(self.allocated[row] + working, self.at_ends[row])
        found: Array = states + np.maximum(
            in_passes, self.in_update + self.costs.update_bytes[home]
        )
        return found

    def best(self, usable: float, host_share_bytes: float) -> tuple[Ints, Ints, Array]:
        """Of all homes with which a mix fits the fastest row, the homes, and the seconds of a
        micro-batch.
        """
        count, home = len(self.compute_s), np.flatnonzero(self.costs.host_bytes <= host_share_bytes)
        if not count:
            return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0)
        if self.sent is not None:
            return self._best_of_all(
                home,
                usable,
                self.sent.host_bytes[:, None] + self.costs.host_bytes[home] <= host_share_bytes,
            )
        home = home[self.needed(np.full(len(home), count - 1), home) <= usable]
        fits = _first(count, len(home), lambda row: self.needed(row, home) <= usable)
        meet = np.maximum(
            fits, _first(count, len(home), lambda row: self._waits(row, home, usable) <= 0)
        )
        rows = np.stack([fits, np.maximum(fits, meet - 1), meet])
        found_s = np.stack([self.seconds(row, home, usable) for row in rows])
        least = found_s.argmin(axis=0), np.arange(len(home))
        return rows[least], home, found_s[least]

    def budgets(self, usable: float, host_share_bytes: float) -> tuple[Ints, Ints, Array, Array]:
        """Every row with all homes, on what it needs and, where that makes copies run beside
        compute, on that and room for them.

        Of what fits the rows, the homes, bytes of the device, and the seconds of a micro-batch.
        """
        row, home = (
            index.ravel()
            for index in np.meshgrid(
                np.arange(len(self.compute_s)), np.arange(len(self.costs.host)), indexing="ij"
            )
        )
        sent = self.sent.host_bytes[row] if self.sent else 0.0
        needed = np.where(
            self.costs.host_bytes[home] + sent <= host_share_bytes, self.needed(row, home), np.inf
        )
        ahead = self.costs.ahead_bytes[home]
        fits, roomy = (
            np.flatnonzero(needed <= usable),
            np.flatnonzero((needed + ahead <= usable) & (ahead > 0)),
        )
        row, home = (np.concatenate([index[fits], index[roomy]]) for index in (row, home))
        budget = np.concatenate([needed[fits], (needed + ahead)[roomy]])
        return row, home, budget, self.seconds(row, home, budget)

    def _best_of_all(
        self, home: Ints, usable: float, within: npt.NDArray[np.bool_]
    ) -> tuple[Ints, Ints, Array]:
        rows, homes = (
            index.ravel()
            for index in np.meshgrid(np.arange(len(self.compute_s)), home, indexing="ij")
        )
        fits = within.ravel() & (self.needed(rows, homes) <= usable)
        found_s = np.where(fits, self.seconds(rows, homes, usable), np.inf).reshape(-1, len(home))
        row, some = found_s.argmin(axis=0), np.isfinite(found_s).any(axis=0)
        return row[some], home[some], found_s.min(axis=0)[some]

    def seconds(self, row: Ints, home: Ints, usable: float | Array) -> Array:
        """t of the module's head."""
        added_s = (1 - 1 / self.layout.num_micro_batches) * self.costs.added_s[home]
        found: Array = (
            self.compute(row, home)
            + self.costs.gathered_s[home]
            + np.maximum(0.0, self._waits(row, home, usable))
            + added_s
        )
        return found

    def _waits(self, row: Ints, home: Ints, usable: float | Array) -> Array:
        """By how much the copies of a micro-batch take longer than its compute: less from row to
        row.
        """
        spare = usable - self.needed(row, home) - self.costs.ahead_bytes[home]
        in_s, out_s = (
            self._fetched_s(home, np.maximum(0.0, spare) / self.costs.block_bytes),
            self.costs.send_s[home],
        )
        back_s, away_s = (self.sent.back_s[row], self.sent.out_s[row]) if self.sent else (0.0, 0.0)
        beside_s = (
            np.maximum(in_s + back_s, out_s + away_s)
            - self.compute(row, home)
            - self.costs.gathered_s[home]
        )
        found: Array = np.where(spare >= 0, beside_s, in_s + out_s)
        return found

    def _fetched_s(self, home: Ints, held: Array) -> Array:
        """What comes to the device in a micro-batch, with room for `held` HOST blocks beside the
        one that runs.
        """
        passes, on_host = self.layout.num_micro_batches, self.costs.host[home]
        swept = on_host + (2 * passes - 1) * np.maximum(0.0, on_host - 1 - held)
        found: Array = swept / (np.maximum(on_host, 1) * passes) * self.costs.fetch_s[home]
        return found


def _first(count: int, size: int, holds: Callable[[Ints], npt.NDArray[np.bool_]]) -> Ints:
    """Of `size` searches over 0 .. `count` - 1 the first at which `holds`, which then does at all
    that follow; the last where none does.
    """
    low, high = np.zeros(size, np.int64), np.full(size, count - 1)
    while (low < high).any():
        middle = (low + high) // 2
        there = holds(middle)
        low, high = (
            np.where(there, low, np.minimum(middle + 1, high)),
            np.where(there, middle, high),
        )
    return low
