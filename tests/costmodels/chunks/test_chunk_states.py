"""States of tensors and chunks: what may follow what, and schedules that were made wrong."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from parplan.costmodels.chunks.chunk_operations import ChunkAction, ChunkOp
from parplan.costmodels.chunks.chunk_states import (
    ChunkState,
    ChunkStates,
    TransitionError,
    check_states,
    chunk_state,
)
from parplan.costmodels.schedules.actions import ActionKind
from tests.helpers.chunked import BOOKS, DEV, HOST, OPT, chunked, chunks_of_blocks, schedule

FREE, HOLD, COMPUTE, AFTER_FWD, AFTER_BWD = ChunkState


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ((FREE, FREE), FREE),
        ((HOLD, COMPUTE), COMPUTE),
        ((AFTER_FWD, AFTER_FWD), AFTER_FWD),
        ((AFTER_BWD, AFTER_FWD), HOLD),
        ((AFTER_BWD,), AFTER_BWD),
    ],
)
def test_a_chunk_is_in_use_if_one_of_its_tensors_is(tensors, expected):
    assert chunk_state(tensors) is expected


def driven(state, *, in_parameters):
    """One HOST block in one chunk that is in `state`."""
    chunk_schedule = schedule(chunked([HOST], m=1 if in_parameters else 2, ends=False))
    states = ChunkStates(chunk_schedule.groups, in_parameters=in_parameters)
    steps = {
        HOLD: [lambda: states.do(ChunkOp(ChunkAction.FETCH, 0, 0, 0))],
        COMPUTE: [lambda: states.begin(0)],
        AFTER_FWD: [lambda: states.begin(0), lambda: states.end(0, ActionKind.FORWARD)],
        AFTER_BWD: [lambda: states.begin(0), lambda: states.end(0, ActionKind.BACKWARD)],
    }
    for step in (steps[HOLD] if state is not FREE else []) + (
        steps[state] if state not in (FREE, HOLD) else []
    ):
        step()
    assert states.state((0, 0)) is state
    return states


MOVES = {
    HOLD: lambda states: states.do(ChunkOp(ChunkAction.FETCH, 0, 0, 0)),
    FREE: lambda states: states.do(ChunkOp(ChunkAction.DROP, 0, 0, 0)),
    COMPUTE: lambda states: states.begin(0),
    AFTER_FWD: lambda states: states.end(0, ActionKind.FORWARD),
    AFTER_BWD: lambda states: states.end(0, ActionKind.BACKWARD),
}
ALLOWED = {
    (FREE, HOLD),
    (HOLD, COMPUTE),
    (HOLD, FREE),
    (COMPUTE, AFTER_FWD),
    (COMPUTE, AFTER_BWD),
    (AFTER_FWD, COMPUTE),
    (AFTER_FWD, FREE),
    (AFTER_BWD, COMPUTE),
    (AFTER_BWD, FREE),
}


@pytest.mark.parametrize("in_parameters", [False, True])
@pytest.mark.parametrize(("old", "new"), list(product(ChunkState, ChunkState)))
def test_every_transition_is_legal_or_an_error_that_names_both_states(old, new, in_parameters):
    states = driven(old, in_parameters=in_parameters)
    legal = (old, new) in ALLOWED and not (in_parameters and (old, new) == (AFTER_BWD, COMPUTE))

    if legal:
        MOVES[new](states)
        assert states.state((0, 0)) is new
    else:
        with pytest.raises(
            TransitionError,
            match=rf"chunk 0 of group 0, parameters of block 0: "
            rf"they are {old} and cannot become {new}$",
        ):
            MOVES[new](states)


def moved(chunk_schedule, does, place):
    """A schedule with one op taken out of its moment and put into another, `place` moments away."""
    moments = list(chunk_schedule.moments)
    index, op = next(
        (i, op)
        for i, m in enumerate(moments)
        for op in (*m.before, *m.after)
        if op.does is does and i + place >= 0
    )
    for at, change in (
        (index, lambda ops: tuple(kept_op for kept_op in ops if kept_op is not op)),
        (index + place, lambda ops: (*ops, op)),
    ):
        if does in (ChunkAction.FETCH, ChunkAction.GATHER):
            moments[at] = replace(moments[at], before=change(moments[at].before))
        else:
            moments[at] = replace(moments[at], after=change(moments[at].after))
    return replace(chunk_schedule, moments=tuple(moments))


@pytest.mark.parametrize(
    ("dp", "does", "place"),
    [
        pytest.param(1, ChunkAction.FETCH, 1, id="fetched-too-late"),
        pytest.param(1, ChunkAction.DROP, -1, id="given-up-too-early"),
        pytest.param(2, ChunkAction.GATHER, 1, id="gathered-too-late"),
        pytest.param(2, ChunkAction.RELEASE, -1, id="released-too-early"),
        pytest.param(2, ChunkAction.FETCH, 1, id="an-own-chunk-that-is-not-there-is-gathered"),
    ],
)
def test_a_schedule_with_an_op_at_the_wrong_moment_is_found_out(dp, does, place):
    with chunks_of_blocks(1.0):
        chunk_schedule = schedule(
            chunked([HOST, OPT, DEV, HOST], dp=dp, m=3, ends=False), prices=BOOKS["mixed"]
        )
    check_states(chunk_schedule)

    with pytest.raises(TransitionError):
        check_states(moved(chunk_schedule, does, place))


def test_an_update_leaves_what_stays_on_the_device_as_parameters_and_waits_for_no_pass():
    chunk_schedule = schedule(chunked([DEV], m=1, ends=False))
    states = ChunkStates(chunk_schedule.groups, in_parameters=True)
    states.begin(0)
    with pytest.raises(TransitionError, match=r"compute and cannot become hold$"):
        states.update()
    states.end(0, ActionKind.BACKWARD)
    states.update()

    assert states.state((0, 0)) is states.own_state((0, 0)) is HOLD
