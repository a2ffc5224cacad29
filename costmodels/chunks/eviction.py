"""What a device with too little room gives up: OPT (Belady), LRU or FIFO, with room that changes
from slot to slot (EQUATIONS O7).

All chunks are equally large. A slot needs some of them, and has room for so many; what is needed
and not there is fetched, what is there and not needed may stay, as far as there is room. Where room
shrinks, chunks are given up without a fetch. All is known before the step, so that what a policy
gives up before its next use is given up behind its last one: the same fetches, and room in between.

OPT gives up the chunk whose next use is farthest. A chunk that stays between two uses is an
interval that takes one place of every slot between them and saves one fetch; in no slot may there
be more intervals than places. Let slots be filled from the left, and one have too many. All of them
began before it, where there is room for all, so that it only matters how far to the right they
reach: giving up the one that ends last leaves at least as much room in every slot as giving up
another. So no choice fetches less, whatever the room is. For room that does not change this is
Belady's (1966, IBM Systems Journal 5(2), doi:10.1147/sj.52.0078).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from parplan.costmodels.host.state_location import Eviction


@dataclass(frozen=True, slots=True)
class Residency:
    """A chunk comes for slot `first` and is there through its last use, in slot `last`."""

    chunk: int
    first: int
    last: int


def stays(
    needs: Sequence[Sequence[int]], room: Sequence[int], policy: Eviction, *, forgets: bool = False
) -> tuple[Residency, ...]:
    """What comes and how long it is there, in the order in which it comes.

    needs: by slot the chunks that are needed; room: how many can be there, at least as many as are
    needed
    forgets: a chunk takes no room behind its last use in the step, as OPT has it anyway
    """
    assert all(len(set(own)) <= free for own, free in zip(needs, room, strict=True)), (
        "a slot has no room for what it needs"
    )
    if not any(needs):
        return ()
    after = _next_uses(needs)
    pool = _POOLS[policy]()
    first, last_use, found = dict[int, int](), dict[int, int](), list[Residency]()

    def leave(chunk: int) -> None:
        found.append(Residency(chunk, first.pop(chunk), last_use[chunk]))

    for slot, own in enumerate(needs):
        wanted = dict.fromkeys(own)
        for _ in range(len(first) + sum(chunk not in first for chunk in wanted) - room[slot]):
            leave(pool.victim(wanted))
        for chunk in wanted:
            pool.use(chunk, after[slot][chunk], new=chunk not in first)
            first.setdefault(chunk, slot)
            last_use[chunk] = slot
            if forgets and after[slot][chunk] == math.inf:
                pool.discard(chunk)
                leave(chunk)
    for chunk in tuple(first):
        leave(chunk)
    return tuple(sorted(found, key=lambda stay: (stay.first, stay.chunk)))


def _next_uses(needs: Sequence[Sequence[int]]) -> list[dict[int, float]]:
    """By slot, for each chunk that it needs, the next slot that does; infinite for none."""
    coming: dict[int, float] = {}
    found = []
    for slot in reversed(range(len(needs))):
        found.append({chunk: coming.get(chunk, math.inf) for chunk in needs[slot]})
        coming.update(dict.fromkeys(needs[slot], slot))
    return found[::-1]


class _Farthest:
    """OPT: a heap of next uses, of which only the latest of a chunk counts."""

    def __init__(self) -> None:
        self._next: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []

    def use(self, chunk: int, next_use: float, *, new: bool) -> None:
        self._next[chunk] = next_use
        heappush(self._heap, (-next_use, -chunk))

    def discard(self, chunk: int) -> None:
        del self._next[chunk]

    def victim(self, wanted: dict[int, None]) -> int:
        """Chunks that the slot wants have it as their next use, so that they come last."""
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

    def victim(self, wanted: dict[int, None]) -> int:
        chunk = next(chunk for chunk in self._order if chunk not in wanted)
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
