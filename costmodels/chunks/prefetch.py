"""The moments at which transfers and collectives begin early or end late.

They then run beside compute: the window of EQUATIONS O6, as large as the free memory of each moment
allows (EQUATIONS O7). The set of transfers and evictions does not change: an operation is moved by
one moment only if the device has room for its bytes during that moment and the gap beside it. Every
operation is moved by one moment before any is moved by two. Copies to the device keep their order.

    FETCH, GATHER    begin a limited number of moments earlier, more where several parts of a
                     block use one group; a GATHER not before the FETCH of its own chunk
    REDUCE, SEND     end a limited number of moments later; their inputs and outputs are counted
                     until then
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from parplan.costmodels.chunks.accesses import GroupUses, parts_in_group
from parplan.costmodels.chunks.chunk_operations import ChunkAction
from parplan.costmodels.chunks.eviction import Residency
from parplan.costmodels.chunks.slots import OpKey, Slots
from parplan.costmodels.host.state_location import StateLocation

# moments: enough to copy a chunk under the previous backward pass if forward passes are too short;
# several times as many where several parts of a block use one group
COPIES = 4
COLLECTIVES = 1  # whole groups are large


@dataclass(slots=True)
class _Movable:
    """An operation that may be moved.

    size     its device bytes in each additional moment
    limit    the farthest moment
    at       the moment where it is now
    """

    key: OpKey
    size: int
    limit: int
    at: int


def issue_moments(
    step: Slots, held: Sequence[Residency], free_bytes: list[int]
) -> dict[OpKey, int]:
    """Returns for each operation the moment at which it begins, or has ended.

    free_bytes    free bytes by slot, from which this takes its room
    """
    fetches = _fetches(step, held)
    gathers = tuple(_gathers(step))
    reduces = tuple(_reduces(step))
    sends = tuple(_sends(step))
    fetched = {fetch.key[1:]: fetch for fetch in fetches}
    reduced = {reduce.key[1:]: reduce for reduce in reduces}
    pace = parts_in_group(step.groups)
    for depth in range(COPIES * pace):
        _fetch_earlier(fetches, free_bytes)
        if depth < COLLECTIVES * pace:
            for gather in gathers:
                fetch = fetched.get(gather.key[1:])
                _earlier(gather, fetch.at if fetch else 0, free_bytes)
            for reduce in reduces:
                _later(reduce, free_bytes)
        for send in sends:
            after = reduced.get(send.key[1:])
            send.at = max(send.at, after.at if after else 0)
            _later(send, free_bytes)
    return {op.key: op.at for op in (*fetches, *gathers, *reduces, *sends)}


def _earlier(op: _Movable, limit: int, free_bytes: list[int]) -> None:
    """Moves an operation one moment earlier if that is allowed and there is room."""
    if op.at > max(limit, op.limit) and _taken(
        range(2 * op.at - 1, 2 * op.at + 1), op.size, free_bytes
    ):
        op.at -= 1


def _later(op: _Movable, free_bytes: list[int]) -> None:
    """Moves an operation one moment later if that is allowed and there is room.

    After the last moment there is only a gap.
    """
    slots = range(2 * op.at + 2, min(2 * op.at + 4, len(free_bytes)))
    if op.at < op.limit and _taken(slots, op.size, free_bytes):
        op.at += 1


def _taken(slots: range, size: int, free_bytes: list[int]) -> bool:
    if any(free_bytes[slot] < size for slot in slots):
        return False
    for slot in slots:
        free_bytes[slot] -= size
    return True


def _fetch_earlier(fetches: Sequence[_Movable], free_bytes: list[int]) -> None:
    """Moves each fetch one moment earlier, but not before an earlier fetch."""
    before = 0
    for fetch in fetches:
        _earlier(fetch, before, free_bytes)
        before = fetch.at


def _fetches(step: Slots, held: Sequence[Residency]) -> tuple[_Movable, ...]:
    """Returns the fetches; a fetch waits until the same chunk has left."""
    gone: dict[int, int] = {}
    fetches = []
    for stay in held:
        moment = stay.first // 2
        key = ChunkAction.FETCH, step.on_host, stay.chunk, moment
        fetches.append(_Movable(key, step.sizes.parameters, gone.get(stay.chunk, 0), moment))
        gone[stay.chunk] = -(-stay.last // 2)
    return tuple(fetches)


def _gathers(step: Slots) -> Iterator[_Movable]:
    """Yields the gathers; a gather waits until the same group is released."""
    for group in step.uses if step.gathers else ():
        released = -1
        for span in group.spans:
            key = ChunkAction.GATHER, group.group, group.number, span.first
            yield _Movable(key, step.sizes.gathered_parameters, released + 1, span.first)
            released = span.last


def _latest(step: Slots, group: GroupUses) -> Iterator[tuple[int, int]]:
    """Yields each run's end, and the last moment before the next run writes gradients."""
    yield from ((run.last, following.first - 1) for run, following in pairwise(group.runs))
    yield from ((run.last, step.num_moments) for run in group.runs[-1:])


def _reduces(step: Slots) -> Iterator[_Movable]:
    """Yields the reductions of whole groups of gradients, with their inputs and outputs.

    Gradients that overwrite parameters, or that go through one buffer, are reduced at once.
    """
    late = step.gathers and not step.in_parameters and not step.single
    for group in step.uses if late else ():
        apart = step.sizes.gradients if step.reduces_apart(group) else 0
        size = step.sizes.gathered_gradients + apart
        yield from (
            _Movable((ChunkAction.REDUCE, group.group, group.number, last), size, limit, last)
            for last, limit in _latest(step, group)
        )


def _sends(step: Slots) -> Iterator[_Movable]:
    for group in step.uses:
        if step.home(group) is StateLocation.HOST:
            for last, limit in _latest(step, group):
                key = ChunkAction.SEND, group.group, group.number, last
                yield _Movable(key, step.sizes.gradients, limit, last)
