"""States of tensors and chunks on a device, and the legal transitions (EQUATIONS O7).

    FREE              not on the device
    HOLD              on the device, not in use: as it came, or as the update left it
    COMPUTE           a pass uses it: it may not be evicted
    HOLD_AFTER_FWD    on the device, not in use since a forward pass
    HOLD_AFTER_BWD    on the device, not in use since a backward pass; it holds the gradient if
                      gradients overwrite parameters

The states are those of PatrickStar, arXiv:2108.05818, section 6. The parameters of one block, or of
one part of it, in one communication group change together. They lie in the own chunk for one
data-parallel rank, else in the gathered group; the own chunk then has a separate state, COMPUTE
while it is gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

from parplan.costmodels.chunks.accesses import Key, keys_of_parts
from parplan.costmodels.chunks.chunk_operations import (
    ChunkAction,
    ChunkedBlocks,
    ChunkOp,
    RankChunks,
)
from parplan.costmodels.host.state_location import StateLocation
from parplan.costmodels.layers.block_parts import WHOLE, PartPass
from parplan.costmodels.schedules.actions import ActionKind
from parplan.profiles.errors import PlannerError


class ChunkState(StrEnum):
    FREE = "free"
    HOLD = "hold"
    COMPUTE = "compute"
    HOLD_AFTER_FWD = "hold-after-fwd"
    HOLD_AFTER_BWD = "hold-after-bwd"


LEGAL: Mapping[ChunkState, frozenset[ChunkState]] = {
    ChunkState.FREE: frozenset({ChunkState.HOLD}),
    ChunkState.HOLD: frozenset({ChunkState.COMPUTE, ChunkState.FREE}),
    ChunkState.COMPUTE: frozenset({ChunkState.HOLD_AFTER_FWD, ChunkState.HOLD_AFTER_BWD}),
    ChunkState.HOLD_AFTER_FWD: frozenset({ChunkState.COMPUTE, ChunkState.FREE}),
    ChunkState.HOLD_AFTER_BWD: frozenset({ChunkState.COMPUTE, ChunkState.FREE, ChunkState.HOLD}),
}
# a gradient that replaces its parameter: nothing computes with it until the update
LEGAL_IN_PARAMETERS = {
    **LEGAL,
    ChunkState.HOLD_AFTER_BWD: frozenset({ChunkState.FREE, ChunkState.HOLD}),
}
# a fetch or gather makes HOLD from FREE alone; elsewhere an update leaves HOLD
_COMING = {
    state: frozenset({ChunkState.HOLD} if state is ChunkState.FREE else ()) for state in ChunkState
}

Part = tuple[int, int]  # a block, and the number of its part


class TransitionError(PlannerError):
    """An illegal transition of a tensor from one state to another."""


def chunk_state(tensors: Iterable[ChunkState]) -> ChunkState:
    """Returns the state of a chunk from the states of its tensors.

    It is COMPUTE if one tensor is in use, the common state if there is one, else HOLD.
    """
    states = set(tensors)
    if ChunkState.COMPUTE in states:
        return ChunkState.COMPUTE
    return states.pop() if len(states) == 1 else ChunkState.HOLD


class ChunkStates:
    """The states of all memory for parameters on one device, followed through a step."""

    def __init__(self, groups: tuple[ChunkedBlocks, ...], *, in_parameters: bool) -> None:
        self._legal = LEGAL_IN_PARAMETERS if in_parameters else LEGAL
        self._gathers = groups[0].chunk_layout.ranks > 1
        self._of_part = keys_of_parts(groups)
        self._tensors: dict[Key, dict[Part, ChunkState]] = {}
        for part, keys in self._of_part.items():
            for key in keys:
                there = groups[key[0]].home is not StateLocation.HOST and not self._gathers
                self._tensors.setdefault(key, {})[part] = (
                    ChunkState.HOLD if there else ChunkState.FREE
                )
        self._own: dict[Key, ChunkState] = {}
        for key in self._tensors if self._gathers else ():
            on_host = groups[key[0]].home is StateLocation.HOST
            self._own[key] = ChunkState.FREE if on_host else ChunkState.HOLD

    def state(self, key: Key) -> ChunkState:
        """Returns the state of the memory that blocks use: the chunk or the gathered group."""
        return chunk_state(self._tensors[key].values())

    def own_state(self, key: Key) -> ChunkState:
        """Returns the state of the own chunk."""
        return self._own[key] if self._gathers else self.state(key)

    def begin(self, block: int, access: PartPass = WHOLE) -> None:
        """Begins a pass of a block, or one access of it."""
        for part in access.reads:
            for key in self._of_part[block, part]:
                self._to(key, ((block, part),), ChunkState.COMPUTE, self._legal)

    def end(self, block: int, work: ActionKind, access: PartPass = WHOLE) -> None:
        """Ends a pass of a block, or one access of it."""
        for part in access.reads:
            backward = work is ActionKind.BACKWARD and part in access.makes
            state = ChunkState.HOLD_AFTER_BWD if backward else ChunkState.HOLD_AFTER_FWD
            for key in self._of_part[block, part]:
                self._to(key, ((block, part),), state, self._legal)

    def do(self, op: ChunkOp) -> None:
        """Applies an operation of the schedule; copies of gradients change no state."""
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
        """Ends the step: the device holds updated parameters."""
        for key, tensors in self._tensors.items():
            if self._gathers and self._own[key] is not ChunkState.FREE:
                self._own[key] = ChunkState.HOLD
            settled = (ChunkState.FREE, ChunkState.HOLD)
            used = [part for part, state in tensors.items() if state not in settled]
            self._to(key, used, ChunkState.HOLD, self._legal)

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
        parts: Iterable[Part],
        state: ChunkState,
        legal: Mapping[ChunkState, frozenset[ChunkState]],
    ) -> None:
        tensors = self._tensors[key]
        for part in parts:
            if state not in legal[tensors[part]]:
                raise _illegal(
                    f"chunk {key[1]} of group {key[0]}, parameters of block {part[0]}: they are",
                    tensors[part],
                    state,
                )
            tensors[part] = state


def _illegal(what: str, old: ChunkState, new: ChunkState) -> TransitionError:
    return TransitionError(
        f"{what} {old} and cannot become {new}", hint="report this: the chunks' schedule is wrong"
    )


def check_states(chunks: RankChunks) -> None:
    """Follows a step through its states.

    Raises TransitionError if the schedule is wrong.
    """
    states = ChunkStates(chunks.groups, in_parameters=chunks.in_parameters)
    for moment in chunks.moments:
        for op in moment.before:
            states.do(op)
        states.begin(moment.block, moment.access)
        states.end(moment.block, moment.work, moment.access)
        for op in moment.after:
            states.do(op)
    for op in chunks.closing:
        states.do(op)
    states.update()
