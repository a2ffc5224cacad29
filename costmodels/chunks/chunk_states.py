"""States of tensors and chunks on a device, and the transitions that are legal (EQUATIONS O7;
PatrickStar, arXiv:2108.05818, section 6).

    FREE              not on the device
    HOLD              there, not in use: as it came, or as the update left it
    COMPUTE           a pass uses it: it may not be given up
    HOLD_AFTER_FWD    there, not in use, a forward pass was the last
    HOLD_AFTER_BWD    the same of a backward pass; where gradients are written over parameters it
                      holds the gradient

The parameters of one block that lie in one communication group change together. What holds them is
the own chunk for one data-parallel rank, else the gathered group; the own chunk then has a state of
its own, in COMPUTE while it is gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

from parplan.costmodels.chunks.accesses import blocks_of
from parplan.costmodels.chunks.chunk_operations import (
    ChunkAction,
    ChunkedBlocks,
    ChunkOp,
    RankChunks,
)
from parplan.costmodels.host.state_location import StateLocation
from parplan.costmodels.schedules.actions import ActionKind
from parplan.profiles.errors import PlannerError


class ChunkState(StrEnum):
    FREE = "free"
    HOLD = "hold"
    COMPUTE = "compute"
    HOLD_AFTER_FWD = "hold-after-fwd"
    HOLD_AFTER_BWD = "hold-after-bwd"


_HELD = frozenset({ChunkState.HOLD, ChunkState.HOLD_AFTER_FWD, ChunkState.HOLD_AFTER_BWD})
LEGAL: Mapping[ChunkState, frozenset[ChunkState]] = {
    ChunkState.FREE: frozenset({ChunkState.HOLD}),
    ChunkState.HOLD: frozenset({ChunkState.COMPUTE, ChunkState.FREE}),
    ChunkState.COMPUTE: frozenset({ChunkState.HOLD_AFTER_FWD, ChunkState.HOLD_AFTER_BWD}),
    ChunkState.HOLD_AFTER_FWD: frozenset({ChunkState.COMPUTE, ChunkState.FREE}),
    ChunkState.HOLD_AFTER_BWD: frozenset({ChunkState.COMPUTE, ChunkState.FREE, ChunkState.HOLD}),
}
# a gradient in the parameter's place is no parameter: nothing computes with it until the update
LEGAL_IN_PARAMETERS = {
    **LEGAL,
    ChunkState.HOLD_AFTER_BWD: frozenset({ChunkState.FREE, ChunkState.HOLD}),
}
_COMING = {
    state: frozenset({ChunkState.HOLD} if state is ChunkState.FREE else ()) for state in ChunkState
}  # HOLD otherwise is what an update leaves

Key = tuple[int, int]  # which of the groups, and the communication group's number in it


class TransitionError(PlannerError):
    """A tensor was to go from one state to another that it cannot go to."""


def chunk_state(tensors: Iterable[ChunkState]) -> ChunkState:
    """The state of a chunk from those of its tensors: COMPUTE if one is in use, what all are, HOLD
    where they differ.
    """
    found = set(tensors)
    if ChunkState.COMPUTE in found:
        return ChunkState.COMPUTE
    return found.pop() if len(found) == 1 else ChunkState.HOLD


class ChunkStates:
    """The states of everything that holds parameters on one device, followed through a step."""

    def __init__(self, groups: tuple[ChunkedBlocks, ...], *, in_parameters: bool) -> None:
        self._legal = LEGAL_IN_PARAMETERS if in_parameters else LEGAL
        self._gathers = groups[0].chunk_layout.ranks > 1
        self._of_block = {
            block: keys
            for index, group in enumerate(groups)
            for block, keys in blocks_of(index, group)
        }
        self._tensors: dict[Key, dict[int, ChunkState]] = {}
        for block, keys in self._of_block.items():
            for key in keys:
                there = groups[key[0]].home is not StateLocation.HOST and not self._gathers
                self._tensors.setdefault(key, {})[block] = (
                    ChunkState.HOLD if there else ChunkState.FREE
                )
        self._own = (
            {
                key: ChunkState.FREE
                if groups[key[0]].home is StateLocation.HOST
                else ChunkState.HOLD
                for key in self._tensors
            }
            if self._gathers
            else {}
        )

    def state(self, key: Key) -> ChunkState:
        """Of what blocks compute with: the chunk, or the gathered group."""
        return chunk_state(self._tensors[key].values())

    def own_state(self, key: Key) -> ChunkState:
        """Of the own chunk."""
        return self._own[key] if self._gathers else self.state(key)

    def begin(self, block: int) -> None:
        """A pass of a block begins."""
        for key in self._of_block[block]:
            self._to(key, (block,), ChunkState.COMPUTE, self._legal)

    def end(self, block: int, work: ActionKind) -> None:
        """A pass of a block is over."""
        for key in self._of_block[block]:
            self._to(
                key,
                (block,),
                ChunkState.HOLD_AFTER_BWD
                if work is ActionKind.BACKWARD
                else ChunkState.HOLD_AFTER_FWD,
                self._legal,
            )

    def do(self, op: ChunkOp) -> None:
        """What an op of the schedule does to the states; copies of gradients do nothing."""
        key = op.group, op.number
        if op.does is ChunkAction.FETCH:
            self._own_to(key, ChunkState.HOLD, _COMING)
        elif op.does is ChunkAction.DROP:
            self._own_to(key, ChunkState.FREE, self._legal)
        elif op.does is ChunkAction.GATHER:
            self._own_to(key, ChunkState.COMPUTE, LEGAL)
            self._own_to(key, ChunkState.HOLD_AFTER_FWD, LEGAL)
            self._to(key, self._tensors[key], ChunkState.HOLD, _COMING)
        elif op.does is ChunkAction.RELEASE:
            self._to(key, self._tensors[key], ChunkState.FREE, self._legal)

    def update(self) -> None:
        """The step is over: what stays on the device holds updated parameters."""
        for key, tensors in self._tensors.items():
            if self._gathers and self._own[key] is not ChunkState.FREE:
                self._own[key] = ChunkState.HOLD
            self._to(
                key,
                [
                    block
                    for block, state in tensors.items()
                    if state not in (ChunkState.FREE, ChunkState.HOLD)
                ],
                ChunkState.HOLD,
                self._legal,
            )

    def _own_to(
        self, key: Key, state: ChunkState, legal: Mapping[ChunkState, frozenset[ChunkState]]
    ) -> None:
        if not self._gathers:
            self._to(key, self._tensors[key], state, legal)
            return
        if state not in legal[self._own[key]]:
            raise _illegal(f"own chunk {key[1]} of group {key[0]}: it is", self._own[key], state)
        self._own[key] = state

    def _to(
        self,
        key: Key,
        blocks: Iterable[int],
        state: ChunkState,
        legal: Mapping[ChunkState, frozenset[ChunkState]],
    ) -> None:
        tensors = self._tensors[key]
        for block in blocks:
            if state not in legal[tensors[block]]:
                raise _illegal(
                    f"chunk {key[1]} of group {key[0]}, parameters of block {block}: they are",
                    tensors[block],
                    state,
                )
            tensors[block] = state


def _illegal(what: str, old: ChunkState, new: ChunkState) -> TransitionError:
    return TransitionError(
        f"{what} {old} and cannot become {new}", hint="report this: the chunks' schedule is wrong"
    )


def check_states(chunks: RankChunks) -> None:
    """Follow a step through its states. Raises TransitionError where its schedule is wrong."""
    states = ChunkStates(chunks.groups, in_parameters=chunks.in_parameters)
    for moment in chunks.moments:
        for op in moment.before:
            states.do(op)
        states.begin(moment.block)
        states.end(moment.block, moment.work)
        for op in moment.after:
            states.do(op)
    for op in chunks.closing:
        states.do(op)
    states.update()
