"""When transfers and collectives may begin before the moment that needs them, or end after the one
that made them.

So they run beside compute: the window of EQUATIONS O6, of as much memory as is free by the moment
(EQUATIONS O7).

What is moved, and what is given up when, stays as it is: an op gets a moment more only where the
device has room for its bytes during that moment and in the gap between. Every op gets one moment
before any gets two. Copies to the device keep their order.

    FETCH, GATHER    begin up to so many moments earlier, a GATHER not before the FETCH of its own
                     chunk
    REDUCE, SEND     are over up to so many moments later; what they read, and write, is counted
                     until then
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from parplan.costmodels.chunks.accesses import GroupUses
from parplan.costmodels.chunks.chunk_operations import ChunkAction
from parplan.costmodels.chunks.eviction import Residency
from parplan.costmodels.chunks.slots import OpKey, Slots
from parplan.costmodels.host.state_location import StateLocation

# moments: enough to move a chunk under the backward pass before it, where forward passes are too
# short
COPIES = 4
COLLECTIVES = 1  # whole groups are large


@dataclass(slots=True)
class _Movable:
    """An op. size: bytes of it on the device in each moment more; limit: the farthest moment; at:
    where it may be by now.
    """

    key: OpKey
    size: int
    limit: int
    at: int


def moved_apart(step: Slots, held: Sequence[Residency], free_bytes: list[int]) -> dict[OpKey, int]:
    """By op the moment at which it may begin, or be over. free_bytes: by slot what nothing holds,
    of which this takes.
    """
    fetches, gathers, reduces, sends = (
        _fetches(step, held),
        tuple(_gathers(step)),
        tuple(_reduces(step)),
        tuple(_sends(step)),
    )
    fetched = {fetch.key[1:]: fetch for fetch in fetches}
    reduced = {reduce.key[1:]: reduce for reduce in reduces}
    for depth in range(COPIES):
        _fetch_earlier(fetches, free_bytes)
        if depth < COLLECTIVES:
            for gather in gathers:
                own = fetched.get(gather.key[1:])
                _earlier(gather, own.at if own else 0, free_bytes)
            for reduce in reduces:
                _later(reduce, free_bytes)
        for send in sends:
            after = reduced.get(send.key[1:])
            send.at = max(send.at, after.at if after else 0)
            _later(send, free_bytes)
    return {one.key: one.at for one in (*fetches, *gathers, *reduces, *sends)}


def _earlier(one: _Movable, limit: int, free_bytes: list[int]) -> None:
    """A moment earlier, if that is allowed and there is room."""
    if one.at > max(limit, one.limit) and _taken(
        range(2 * one.at - 1, 2 * one.at + 1), one.size, free_bytes
    ):
        one.at -= 1


def _later(one: _Movable, free_bytes: list[int]) -> None:
    """A moment later, in the same way; behind the last moment there is only a gap."""
    slots = range(2 * one.at + 2, min(2 * one.at + 4, len(free_bytes)))
    if one.at < one.limit and _taken(slots, one.size, free_bytes):
        one.at += 1


def _taken(slots: range, size: int, free_bytes: list[int]) -> bool:
    if any(free_bytes[slot] < size for slot in slots):
        return False
    for slot in slots:
        free_bytes[slot] -= size
    return True


def _fetch_earlier(fetches: Sequence[_Movable], free_bytes: list[int]) -> None:
    """Each a moment earlier, but none before one that is needed before it."""
    before = 0
    for one in fetches:
        _earlier(one, before, free_bytes)
        before = one.at


def _fetches(step: Slots, held: Sequence[Residency]) -> tuple[_Movable, ...]:
    """Not while the same chunk is still there."""
    gone: dict[int, int] = {}
    found = []
    for stay in held:
        moment = stay.first // 2
        found.append(
            _Movable(
                (ChunkAction.FETCH, step.on_host, stay.chunk, moment),
                step.sizes.parameters,
                gone.get(stay.chunk, 0),
                moment,
            )
        )
        gone[stay.chunk] = -(-stay.last // 2)
    return tuple(found)


def _gathers(step: Slots) -> Iterator[_Movable]:
    """Not while the same group is still gathered."""
    for one in step.uses if step.gathers else ():
        released = -1
        for span in one.spans:
            key = ChunkAction.GATHER, one.group, one.number, span.first
            yield _Movable(key, step.sizes.ranks * step.sizes.parameters, released + 1, span.first)
            released = span.last


def _latest(step: Slots, one: GroupUses) -> Iterator[tuple[int, int]]:
    """By run its end, and the latest moment before the next one begins to write gradients of the
    group.
    """
    yield from ((run.last, following.first - 1) for run, following in pairwise(one.runs))
    yield from ((run.last, step.num_moments) for run in one.runs[-1:])


def _reduces(step: Slots) -> Iterator[_Movable]:
    """Whole groups of gradients, and what they are reduced to; where those are parameters' places
    they are reduced at once.
    """
    for one in step.uses if step.gathers and not step.in_parameters else ():
        size = step.sizes.gradients * (step.sizes.ranks + step.reduces_apart(one))
        yield from (
            _Movable((ChunkAction.REDUCE, one.group, one.number, last), size, limit, last)
            for last, limit in _latest(step, one)
        )


def _sends(step: Slots) -> Iterator[_Movable]:
    for one in step.uses:
        if step.home(one) is StateLocation.HOST:
            for last, limit in _latest(step, one):
                yield _Movable(
                    (ChunkAction.SEND, one.group, one.number, last),
                    step.sizes.gradients,
                    limit,
                    last,
                )
