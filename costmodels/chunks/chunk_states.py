"""States of tensors and chunks on a device, and the transitions that are legal (EQUATIONS O7; PatrickStar, arXiv:2108.05818, section 6).

    FREE              not on the device
    HOLD              there, not in use: as it came, or as the update left it
    COMPUTE           a pass uses it: it may not be given up
    HOLD_AFTER_FWD    there, not in use, a forward pass was the last
    HOLD_AFTER_BWD    the same of a backward pass; where gradients are written over parameters it holds the gradient

The parameters of one block that lie in one communication group change together. What holds them is the own chunk for one data-parallel
rank, else the gathered group; the own chunk then has a state of its own, in COMPUTE while it is gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

from parplan.costmodels.chunks.accesses import blocks_of
from parplan.costmodels.chunks.chunk_operations import Does, Group, Op, RankChunks
from parplan.costmodels.host.state_location import Home
from parplan.costmodels.schedules.actions import Work
from parplan.profiles.errors import PlannerError


class State(StrEnum):
    FREE = "free"
    HOLD = "hold"
    COMPUTE = "compute"
    HOLD_AFTER_FWD = "hold-after-fwd"
    HOLD_AFTER_BWD = "hold-after-bwd"


_HELD = frozenset({State.HOLD, State.HOLD_AFTER_FWD, State.HOLD_AFTER_BWD})
LEGAL: Mapping[State, frozenset[State]] = {
    State.FREE: frozenset({State.HOLD}),
    State.HOLD: frozenset({State.COMPUTE, State.FREE}),
    State.COMPUTE: frozenset({State.HOLD_AFTER_FWD, State.HOLD_AFTER_BWD}),
    State.HOLD_AFTER_FWD: frozenset({State.COMPUTE, State.FREE}),
    State.HOLD_AFTER_BWD: frozenset({State.COMPUTE, State.FREE, State.HOLD}),
}
# a gradient in the parameter's place is no parameter: nothing computes with it until the update
LEGAL_IN_PARAMETERS = {**LEGAL, State.HOLD_AFTER_BWD: frozenset({State.FREE, State.HOLD})}
_COMING = {state: frozenset({State.HOLD} if state is State.FREE else ()) for state in State}  # HOLD otherwise is what an update leaves

Key = tuple[int, int]  # which of the groups, and the communication group's number in it


class TransitionError(PlannerError):
    """A tensor was to go from one state to another that it cannot go to."""


def chunk_state(tensors: Iterable[State]) -> State:
    """The state of a chunk from those of its tensors: COMPUTE if one is in use, what all are, HOLD where they differ."""
    found = set(tensors)
    if State.COMPUTE in found:
        return State.COMPUTE
    return found.pop() if len(found) == 1 else State.HOLD


class ChunkStates:
    """The states of everything that holds parameters on one device, followed through a step."""

    def __init__(self, groups: tuple[Group, ...], *, in_parameters: bool) -> None:
        self._legal = LEGAL_IN_PARAMETERS if in_parameters else LEGAL
        self._gathers = groups[0].layout.ranks > 1
        self._of_block = {block: keys for index, group in enumerate(groups) for block, keys in blocks_of(index, group)}
        self._tensors: dict[Key, dict[int, State]] = {}
        for block, keys in self._of_block.items():
            for key in keys:
                there = groups[key[0]].home is not Home.HOST and not self._gathers
                self._tensors.setdefault(key, {})[block] = State.HOLD if there else State.FREE
        self._own = {key: State.FREE if groups[key[0]].home is Home.HOST else State.HOLD for key in self._tensors} if self._gathers else {}

    def state(self, key: Key) -> State:
        """Of what blocks compute with: the chunk, or the gathered group."""
        return chunk_state(self._tensors[key].values())

    def own_state(self, key: Key) -> State:
        """Of the own chunk."""
        return self._own[key] if self._gathers else self.state(key)

    def begin(self, block: int) -> None:
        """A pass of a block begins."""
        for key in self._of_block[block]:
            self._to(key, (block,), State.COMPUTE, self._legal)

    def end(self, block: int, work: Work) -> None:
        """A pass of a block is over."""
        for key in self._of_block[block]:
            self._to(key, (block,), State.HOLD_AFTER_BWD if work is Work.BACKWARD else State.HOLD_AFTER_FWD, self._legal)

    def do(self, op: Op) -> None:
        """What an op of the schedule does to the states; copies of gradients do nothing."""
        key = op.group, op.number
        if op.does is Does.FETCH:
            self._own_to(key, State.HOLD, _COMING)
        elif op.does is Does.DROP:
            self._own_to(key, State.FREE, self._legal)
        elif op.does is Does.GATHER:
            self._own_to(key, State.COMPUTE, LEGAL)
            self._own_to(key, State.HOLD_AFTER_FWD, LEGAL)
            self._to(key, self._tensors[key], State.HOLD, _COMING)
        elif op.does is Does.RELEASE:
            self._to(key, self._tensors[key], State.FREE, self._legal)

    def update(self) -> None:
        """The step is over: what stays on the device holds updated parameters."""
        for key, tensors in self._tensors.items():
            if self._gathers and self._own[key] is not State.FREE:
                self._own[key] = State.HOLD
            self._to(key, [block for block, state in tensors.items() if state not in (State.FREE, State.HOLD)], State.HOLD, self._legal)

    def _own_to(self, key: Key, state: State, legal: Mapping[State, frozenset[State]]) -> None:
        if not self._gathers:
            self._to(key, self._tensors[key], state, legal)
            return
        if state not in legal[self._own[key]]:
            raise _illegal(f"own chunk {key[1]} of group {key[0]}: it is", self._own[key], state)
        self._own[key] = state

    def _to(self, key: Key, blocks: Iterable[int], state: State, legal: Mapping[State, frozenset[State]]) -> None:
        tensors = self._tensors[key]
        for block in blocks:
            if state not in legal[tensors[block]]:
                raise _illegal(f"chunk {key[1]} of group {key[0]}, parameters of block {block}: they are", tensors[block], state)
            tensors[block] = state


def _illegal(what: str, old: State, new: State) -> TransitionError:
    return TransitionError(f"{what} {old} and cannot become {new}", hint="report this: the chunks' schedule is wrong")


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
