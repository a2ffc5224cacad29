"""Evictions of a device with too little room, by OPT (Belady), LRU or FIFO (EQUATIONS O7).

All chunks are equally large, and the room changes from slot to slot. A slot needs some chunks and
has room for a number of them. A needed chunk that is absent is fetched; a chunk on the device that
is not needed may stay if there is room. If the room shrinks, chunks are evicted without a fetch.
Everything is known before the step, so that a chunk that a policy evicts before its next use is
evicted after its last one: the number of fetches is the same, with more room in between.

OPT evicts the chunk whose next use is farthest. A chunk that stays between two uses is an interval
that takes one place of every slot between them and saves one fetch; no slot may have more intervals
than places. Fill the slots from the left until one has too many intervals. All of them began in
earlier slots, which have room for all, so that only their right ends matter: evicting the interval
that ends last leaves at least as much room in every slot as evicting another one. So no choice
fetches less, whatever the room is. For constant room this is Belady's algorithm (1966, IBM Systems
Journal 5(2), doi:10.1147/sj.52.0078).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from parplan.costmodels.host.state_location import Eviction


@dataclass(frozen=True, slots=True)
class Residency:
    """A chunk that comes for slot `first` and stays until its last use, in slot `last`."""

    chunk: int
    first: int
    last: int


def residencies(
    needs: Sequence[Sequence[int]], room: Sequence[int], policy: Eviction, *, forgets: bool = False
) -> tuple[Residency, ...]:
    """Returns the residencies of chunks, in the order in which the chunks come.

    needs      by slot, the needed chunks
    room       by slot, the number of chunks that fit, at least as many as are needed
    forgets    a chunk takes no room after its last use in the step, as always with OPT
    """
    assert all(len(set(chunks)) <= free for chunks, free in zip(needs, room, strict=True)), (
        "a slot has no room for what it needs"
    )
    if not any(needs):
        return ()
    after = _next_uses(needs)
    pool = _POOLS[policy]()
    first = dict[int, int]()
    last_use = dict[int, int]()
    left = list[Residency]()

    def leave(chunk: int) -> None:
        left.append(Residency(chunk, first.pop(chunk), last_use[chunk]))

    for slot, chunks in enumerate(needs):
        needed = dict.fromkeys(chunks)
        for _ in range(len(first) + sum(chunk not in first for chunk in needed) - room[slot]):
            leave(pool.victim(needed))
        for chunk in needed:
            pool.use(chunk, after[slot][chunk], new=chunk not in first)
            first.setdefault(chunk, slot)
            last_use[chunk] = slot
            if forgets and after[slot][chunk] == math.inf:
                pool.discard(chunk)
                leave(chunk)
    for chunk in tuple(first):
        leave(chunk)
    return tuple(sorted(left, key=lambda stay: (stay.first, stay.chunk)))


def _next_uses(needs: Sequence[Sequence[int]]) -> list[dict[int, float]]:
    """Returns for each chunk of a slot the next slot that needs it, infinity for none."""
    coming: dict[int, float] = {}
    uses = []
    for slot in reversed(range(len(needs))):
        uses.append({chunk: coming.get(chunk, math.inf) for chunk in needs[slot]})
        coming.update(dict.fromkeys(needs[slot], slot))
    return uses[::-1]


class _Farthest:
    """OPT: a heap of next uses; only the latest entry of a chunk counts."""

    def __init__(self) -> None:
        self._next: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []

    def use(self, chunk: int, next_use: float, *, new: bool) -> None:
        self._next[chunk] = next_use
        heappush(self._heap, (-next_use, -chunk))

    def discard(self, chunk: int) -> None:
        del self._next[chunk]

    def victim(self, needed: dict[int, None]) -> int:
        """Evicts the chunk with the farthest next use; needed chunks have the nearest."""
        while True:
            next_use, chunk = heappop(self._heap)
            if self._next.get(-chunk) == -next_use:
                del self._next[-chunk]
                return -chunk


class _Oldest:
    """FIFO: the order in which chunks came."""

    def __init__(self) -> None:
        self._order: dict[int, None] = {}

    def use(self, chunk: int, next_use: float, *, new: bool) -> None:
        self._order.setdefault(chunk)

    def discard(self, chunk: int) -> None:
        del self._order[chunk]

    def victim(self, needed: dict[int, None]) -> int:
        chunk = next(chunk for chunk in self._order if chunk not in needed)
        del self._order[chunk]
        return chunk


class _Unused(_Oldest):
    """LRU: the order in which chunks were last used."""

    def use(self, chunk: int, next_use: float, *, new: bool) -> None:
        self._order.pop(chunk, None)
        self._order[chunk] = None


_POOLS: dict[Eviction, type[_Farthest] | type[_Oldest]] = {
    Eviction.OPT: _Farthest,
    Eviction.LRU: _Unused,
    Eviction.FIFO: _Oldest,
}
