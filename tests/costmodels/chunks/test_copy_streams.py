"""Copies and collectives beside compute: timelines worked by hand, bounds and limits."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parplan.costmodels.chunks.chunk_budget import NonChunkBytes
from parplan.costmodels.chunks.chunk_operations import ChunkAction
from parplan.costmodels.chunks.chunk_schedule import rank_chunks
from parplan.costmodels.chunks.copy_streams import Stream, StreamCosts, run_streams
from parplan.costmodels.host.state_location import Eviction
from parplan.costmodels.schedules.actions import ActionKind
from tests.helpers.chunked import BOOKS, DEV, HOST, OPT, chunked, chunks_of_blocks, schedule

F, B = ActionKind.FORWARD, ActionKind.BACKWARD


def costs_of(chunk_schedule, *, chunk_s=1.0, forward_s=2.0, backward_s=3.0, **rest):
    """Parameters of a chunk of 16 bits take `chunk_s` either way."""
    rate = 2 * chunk_schedule.groups[0].chunk_layout.chunk_elements / chunk_s
    blocks = [block for group in chunk_schedule.groups for block in group.blocks]
    given_ = {
        "forward_s": dict.fromkeys(blocks, forward_s),
        "backward_s": dict.fromkeys(blocks, backward_s),
        "in_bytes_per_s": rate,
        "out_bytes_per_s": rate,
    }
    return StreamCosts(**(given_ | rest))


@pytest.fixture
def alone(monkeypatch):
    """Nothing but chunks is on the device."""

    def nothing(strategy, rank, passes, price_cache):
        none = (0,) * sum(layer_pass.block is not None for layer_pass in passes)
        return NonChunkBytes(moments=none, gaps=(*none, 0), rests=none, made=none, end=0)

    monkeypatch.setattr("parplan.costmodels.chunks.chunk_schedule.non_chunk_bytes", nothing)


def two_blocks(more, homes=(HOST, HOST), **layout):
    return schedule(chunked(homes, m=1, ends=False, **layout), more=more)


@pytest.mark.usefixtures("alone")
def test_with_room_for_one_chunk_every_copy_is_waited_for():
    """Fetch 0-1, F0 -3, fetch -4, F1 -6, B1 -9, sent -10, fetch -11, B0 -14.

    The last chunk is sent at once, with the update behind the step.
    """
    chunk_schedule = two_blocks(0.0)
    run = run_streams(chunk_schedule, costs_of(chunk_schedule))

    assert [(transfer.op.does, transfer.start_s, transfer.end_s) for transfer in run.transfers] == [
        (ChunkAction.FETCH, 0, 1),
        (ChunkAction.FETCH, 3, 4),
        (ChunkAction.SEND, 9, 10),
        (ChunkAction.FETCH, 10, 11),
        (ChunkAction.SEND, 14, 15),
    ]
    assert run.actions_s == {(F, 0, 0): 2, (B, 0, 0): 2}
    assert (run.compute_s, run.tail_s, run.step_s) == (10, 1, 15)


@pytest.mark.usefixtures("alone")
def test_with_room_for_two_only_the_first_copy_and_the_last_are_waited_for():
    chunk_schedule = two_blocks(1.0)
    run = run_streams(chunk_schedule, costs_of(chunk_schedule, host_adam_s=4.0))

    assert [(transfer.op.does, transfer.start_s, transfer.end_s) for transfer in run.transfers] == [
        (ChunkAction.FETCH, 0, 1),
        (ChunkAction.FETCH, 1, 2),
        (ChunkAction.SEND, 8, 9),
        (ChunkAction.SEND, 11, 12),
    ]
    assert run.actions_s == {(F, 0, 0): 1, (B, 0, 0): 0}
    assert (run.compute_s, run.tail_s, run.step_s) == (10, 1 + 2 * 4, 20)


@pytest.mark.usefixtures("alone")
def test_the_update_goes_chunk_by_chunk_and_chunks_return_while_the_next_is_updated():
    """Gradients are there at 9 and at 12.

    An update takes 4 seconds for each chunk; device updates run beside it.
    """
    chunk_schedule = two_blocks(1.0, homes=(OPT, OPT))

    late = run_streams(chunk_schedule, costs_of(chunk_schedule, host_adam_s=4.0))
    assert [
        (transfer.op.does, transfer.start_s, transfer.end_s) for transfer in late.transfers
    ] == [
        (ChunkAction.SEND, 7, 8),
        (ChunkAction.SEND, 10, 11),
        (ChunkAction.RETURN, 15, 16),
        (ChunkAction.RETURN, 19, 20),
    ]
    assert late.tail_s == 10
    soon = run_streams(
        chunk_schedule, costs_of(chunk_schedule, host_adam_s=4.0, waits_for_all=False)
    )
    assert [transfer.end_s for transfer in soon.transfers] == [8, 11, 15, 19]
    mixed = two_blocks(1.0, homes=(DEV, OPT))
    assert run_streams(
        mixed, costs_of(mixed, host_adam_s=4.0, device_adam_s=7.0)
    ).tail_s == pytest.approx(7.0)


@pytest.mark.usefixtures("alone")
def test_passes_of_embedding_and_head_are_a_window_for_copies_too():
    chunk_schedule = two_blocks(0.0)
    ends = {(F, 0): (1.5, 0.0), (B, 0): (0.25, 0.5)}
    run = run_streams(chunk_schedule, costs_of(chunk_schedule, ends_s=ends))

    assert run.compute_s == 10 + 2.25
    assert run.actions_s == {(F, 0, 0): 2, (B, 0, 0): 2}
    assert run.tail_s == 0.5  # of the last gradients half is on its way under the embedding's pass
    assert run.step_s == 12.25 + 4 + 0.5


@pytest.mark.usefixtures("alone")
def test_own_chunks_come_before_they_are_gathered_and_gradients_are_reduced_before_they_are_sent():
    with chunks_of_blocks(0.5):
        chunk_schedule = schedule(
            chunked((HOST, HOST, HOST), dp=2, m=2, ends=False), prices=BOOKS["mixed"]
        )
    run = run_streams(chunk_schedule, costs_of(chunk_schedule, gather_s=5.0, reduce_s=6.0))
    ends = {}
    for transfer in run.transfers:
        before = {ChunkAction.GATHER: ChunkAction.FETCH, ChunkAction.SEND: ChunkAction.REDUCE}.get(
            transfer.op.does
        )
        assert before is None or transfer.start_s >= ends.get(
            (before, transfer.op.group, transfer.op.number), 0.0
        )
        ends[transfer.op.does, transfer.op.group, transfer.op.number] = transfer.end_s

    assert {copy.op.does for copy in run.transfers} == {
        ChunkAction.FETCH,
        ChunkAction.GATHER,
        ChunkAction.REDUCE,
        ChunkAction.SEND,
    }


@st.composite
def cases(draw):
    homes = draw(st.lists(st.sampled_from([DEV, OPT, HOST]), min_size=4, max_size=4))
    prices = BOOKS[draw(st.sampled_from(sorted(BOOKS)))]
    strategy = chunked(
        homes,
        dp=draw(st.sampled_from([1, 2])),
        m=draw(st.integers(1, 4)),
        pp=draw(st.sampled_from([1, 2])),
    )
    with chunks_of_blocks(draw(st.sampled_from([0.3, 1.0, 1.5]))):
        chunk_schedule = schedule(
            strategy, prices=prices, more=draw(st.sampled_from([0.0, 0.1, 0.5]))
        )
    seconds = st.floats(0.0, 10.0)
    return chunk_schedule, costs_of(
        chunk_schedule,
        chunk_s=draw(st.floats(0.01, 10.0)),
        forward_s=draw(seconds),
        backward_s=draw(seconds),
        gather_s=draw(seconds),
        reduce_s=draw(seconds),
        host_adam_s=draw(seconds),
        device_adam_s=draw(seconds),
        waits_for_all=draw(st.booleans()),
    )


@given(cases())
@settings(max_examples=20, deadline=None)
def test_a_step_is_never_shorter_than_any_stream_and_never_longer_than_all_in_a_row(case):
    chunk_schedule, costs = case
    run = run_streams(chunk_schedule, costs)
    busy = [run.compute_s, *(run.busy_s(stream) for stream in Stream)]
    updates = sum(group.chunk_layout.num_groups for group in chunk_schedule.groups) * (
        costs.host_adam_s + costs.device_adam_s
    )

    assert max(busy) - 1e-9 <= run.step_s <= sum(busy) + updates + 1e-9
    assert run.step_s == pytest.approx(run.compute_s + sum(run.actions_s.values()) + run.tail_s)
    for stream in Stream:
        transfers = [transfer for transfer in run.transfers if transfer.stream is stream]
        assert all(before.end_s <= after.start_s for before, after in pairwise(transfers))


@given(cases(), st.floats(1.0, 100.0))
@settings(max_examples=20, deadline=None)
def test_faster_copies_never_make_a_step_longer(case, faster):
    chunk_schedule, costs = case
    quick = replace(
        costs, in_bytes_per_s=costs.in_bytes_per_s * faster, gather_s=costs.gather_s / faster
    )

    assert (
        run_streams(chunk_schedule, quick).step_s
        <= run_streams(chunk_schedule, costs).step_s + 1e-9
    )


@given(cases())
@settings(max_examples=20, deadline=None)
def test_a_step_without_copies_is_compute_and_update_and_without_compute_the_copies_in_order(
    case,
):
    chunk_schedule, costs = case
    count = sum(
        group.chunk_layout.num_groups for group in chunk_schedule.groups if group.home is not DEV
    )
    endless = replace(
        costs,
        in_bytes_per_s=1e30,
        out_bytes_per_s=1e30,
        gather_s=0.0,
        reduce_s=0.0,
        device_adam_s=0.0,
    )
    run = run_streams(chunk_schedule, endless)
    assert run.step_s == pytest.approx(run.compute_s + count * costs.host_adam_s)

    blocks = costs.forward_s
    none = dict.fromkeys(blocks, 0.0)
    only_in = replace(
        endless,
        forward_s=none,
        backward_s=none,
        in_bytes_per_s=costs.in_bytes_per_s,
        host_adam_s=0.0,
    )
    run = run_streams(chunk_schedule, only_in)
    assert run.step_s == pytest.approx(run.busy_s(Stream.IN))


def test_room_hides_copies_that_a_full_device_waits_for():
    strategy, prices = chunked([HOST] * 8, m=4), BOOKS["mixed"]
    tight = schedule(strategy, prices=prices)
    roomy = rank_chunks(
        strategy, 0, prices, eviction=Eviction.OPT, device_bytes=int(1.3 * tight.device_bytes)
    )
    waits = [
        run_streams(scheduled, costs_of(scheduled, chunk_s=0.5)).step_s
        for scheduled in (tight, roomy)
    ]

    assert waits[1] < waits[0]
