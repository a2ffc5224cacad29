"""The best mix for every way to place the blocks of a rank (EQUATIONS O3, O6).

In the best mix compute takes as long as copies.

    t = max(C + A, I, O) + H                             of one micro-batch
    I = [h + (2 M - 1) max(0, h - c)] / (h M) i

C, A, H are compute, collectives and the host's sums; I, O are copies to the device and to the host.
h HOST blocks have room for c of them on the device, and fetching all takes i
(costmodels/layers/chunked_layer.py).

Copies run beside compute if there is room for the parameters of the next block and the gradients of
the last; else they add up. Offloaded activations share the directions with chunks: I and O include
them beside compute.

On the front of seconds and bytes, a slower mix leaves more room c for parameters that need no
refetch: C grows along the front and I falls, so that the best mix is one of the two where they
meet, or the fastest if nothing runs beside compute. This does not hold for mixes that offload
activations: all of those are tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.dominance import Array, Ints
from parplan.planner.host_options.location_costs import LocationCosts
from parplan.planner.layer_options.mixes import Mixes, column_of


def widest_first(mixes: Mixes) -> Mixes:
    """Returns the mixes of a rank whose blocks with the largest workspace come first.

    A backward pass begins with the last block. When it reaches a block, those behind it have freed
    what they saved of the micro-batch: `workspace_bytes` is the most that a pass takes beyond all
    saved bytes, and no other order of the blocks needs less. Mixes that offload activations keep
    their order and workspace.
    """
    workspace = column_of(mixes.options, "workspace_bytes")
    saved = column_of(mixes.options, "saved_bytes")
    freed = np.zeros(len(mixes.chunk_counts))
    most = np.full(len(mixes.chunk_counts), -np.inf)
    for option in np.argsort(workspace, kind="stable"):  # from the last blocks to the first
        count = mixes.chunk_counts[:, option]
        most = np.where(count > 0, np.maximum(most, workspace[option] - freed), most)
        freed += count * saved[option]
    return replace(
        mixes, workspace_bytes=np.where(mixes.host_bytes > 0, mixes.workspace_bytes, most)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadedActivations:
    """Host bytes at the peak, and copies of a micro-batch, of mixes that offload activations."""

    host_bytes: Array
    out_s: Array
    back_s: Array


@dataclass(frozen=True, slots=True)
class ChunkMixes:
    """Mixes, fastest first, each with less memory than those before it.

    Rows and locations are indices.

    compute_s    seconds of a micro-batch by row; with `share` also by share of the host
    share        by location, the index of its share in `compute_s`
    allocated    bytes without chunks in the fullest pass of a block
    at_ends      bytes without chunks in the fullest pass of embedding or head
    in_update    bytes without chunks in the update
    """

    layout: ParallelLayout
    costs: LocationCosts
    compute_s: Array
    allocated: Array
    at_ends: Array
    in_update: float
    sent: OffloadedActivations | None = None
    share: Ints | None = None

    def compute(self, row: Ints, location: Ints) -> Array:
        """Seconds of compute of a micro-batch."""
        seconds: Array = (
            self.compute_s[row] if self.share is None else self.compute_s[row, self.share[location]]
        )
        return seconds

    def needed(self, row: Ints, location: Ints) -> Array:
        """Peak bytes of the device."""
        working = self.costs.working_bytes[location]
        in_passes = np.maximum(self.allocated[row] + working, self.at_ends[row])
        in_update = self.in_update + self.costs.update_bytes[location]
        peak: Array = self.costs.always_bytes[location] + np.maximum(in_passes, in_update)
        return peak

    def best(self, usable: float, host_share_bytes: float) -> tuple[Ints, Ints, Array]:
        """Returns rows, locations and seconds of the best mix for all locations that a mix fits.

        The seconds are those of a micro-batch.
        """
        count = len(self.compute_s)
        if not count:
            return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0)
        location = np.flatnonzero(self.costs.host_bytes <= host_share_bytes)
        if self.sent is not None:
            host_bytes = self.sent.host_bytes[:, None] + self.costs.host_bytes[location]
            return self._best_of_all(location, usable, host_bytes <= host_share_bytes)
        location = location[self.needed(np.full(len(location), count - 1), location) <= usable]
        fits = _first(count, len(location), lambda row: self.needed(row, location) <= usable)
        meet = np.maximum(
            fits, _first(count, len(location), lambda row: self._waits(row, location, usable) <= 0)
        )
        rows = np.stack([fits, np.maximum(fits, meet - 1), meet])
        seconds = np.stack([self.seconds(row, location, usable) for row in rows])
        least = seconds.argmin(axis=0), np.arange(len(location))
        return rows[least], location, seconds[least]

    def budgets(self, usable: float, host_share_bytes: float) -> tuple[Ints, Ints, Array, Array]:
        """Returns rows, locations, device bytes and seconds of all mixes and locations that fit.

        Each has a budget of the bytes that it needs, and a second one with room for copies beside
        compute, if that room makes copies overlap.
        """
        count, num_locations = len(self.compute_s), len(self.costs.host)
        row, location = np.indices((count, num_locations)).reshape(2, -1)
        sent = self.sent.host_bytes[row] if self.sent else 0.0
        within = self.costs.host_bytes[location] + sent <= host_share_bytes
        needed = np.where(within, self.needed(row, location), np.inf)
        ahead = self.costs.ahead_bytes[location]
        fits = np.flatnonzero(needed <= usable)
        roomy = np.flatnonzero((needed + ahead <= usable) & (ahead > 0))
        chosen = np.concatenate([fits, roomy])
        budget = np.concatenate([needed[fits], (needed + ahead)[roomy]])
        row, location = row[chosen], location[chosen]
        return row, location, budget, self.seconds(row, location, budget)

    def _best_of_all(
        self, location: Ints, usable: float, within: npt.NDArray[np.bool_]
    ) -> tuple[Ints, Ints, Array]:
        rows = np.repeat(np.arange(len(self.compute_s)), len(location))
        locations = np.tile(location, len(self.compute_s))
        fits = within.ravel() & (self.needed(rows, locations) <= usable)
        seconds = np.where(fits, self.seconds(rows, locations, usable), np.inf).reshape(
            -1, len(location)
        )
        some = np.isfinite(seconds).any(axis=0)
        return seconds.argmin(axis=0)[some], location[some], seconds.min(axis=0)[some]

    def seconds(self, row: Ints, location: Ints, usable: float | Array) -> Array:
        """Seconds of a micro-batch: t of the formula at the top."""
        added_s = (1 - 1 / self.layout.num_micro_batches) * self.costs.added_s[location]
        seconds: Array = (
            self.compute(row, location)
            + self.costs.gathered_s[location]
            + np.maximum(0.0, self._waits(row, location, usable))
            + added_s
        )
        return seconds

    def _waits(self, row: Ints, location: Ints, usable: float | Array) -> Array:
        """Seconds by which the copies of a micro-batch exceed its compute.

        They decrease from row to row.
        """
        spare = usable - self.needed(row, location) - self.costs.ahead_bytes[location]
        in_s = self._fetched_s(location, np.maximum(0.0, spare) / self.costs.block_bytes)
        out_s = self.costs.send_s[location]
        back_s, away_s = (self.sent.back_s[row], self.sent.out_s[row]) if self.sent else (0.0, 0.0)
        beside_s = (
            np.maximum(in_s + back_s, out_s + away_s)
            - self.compute(row, location)
            - self.costs.gathered_s[location]
        )
        waits_s: Array = np.where(spare >= 0, beside_s, in_s + out_s)
        return waits_s

    def _fetched_s(self, location: Ints, held: Array) -> Array:
        """Seconds of copies to the device in a micro-batch.

        held    parts of HOST blocks that the device has room for beside the block that runs
        """
        passes = self.layout.num_micro_batches
        on_host = self.costs.parts[location]
        missed = np.maximum(0.0, on_host - self.costs.running - held)
        swept = on_host + (2 * passes - 1) * missed
        fetched_s: Array = swept / (np.maximum(on_host, 1) * passes) * self.costs.fetch_s[location]
        return fetched_s


def _first(count: int, size: int, holds: Callable[[Ints], npt.NDArray[np.bool_]]) -> Ints:
    """Searches 0 .. `count` - 1 for the first index at which `holds`, `size` times at once.

    `holds` is true at all later indices. The result is the last index if it never holds.
    """
    low = np.zeros(size, np.int64)
    high = np.full(size, count - 1)
    while (low < high).any():
        middle = (low + high) // 2
        there = holds(middle)
        low = np.where(there, low, np.minimum(middle + 1, high))
        high = np.where(there, middle, high)
    return low
