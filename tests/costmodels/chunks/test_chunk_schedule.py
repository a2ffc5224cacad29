"""Chunk schedules: run op by op on a device made of sets, and counted against closed forms."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parplan.costmodels.chunks.chunk_budget import NonChunkBytes
from parplan.costmodels.chunks.chunk_operations import ChunkAction
from parplan.costmodels.chunks.chunk_schedule import rank_chunks
from parplan.costmodels.chunks.prefetch import COPIES
from parplan.costmodels.host.state_location import Eviction, StateLocation
from parplan.costmodels.layers.chunked_layer import state_widths
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.actions import ActionKind
from parplan.costmodels.schedules.schedule import Schedule
from parplan.profiles.errors import ConfigError, InfeasibleError
from tests.helpers.chunk_formulas import (
    OwnedShares,
    collective_bytes,
    copied_in_bytes,
    copied_out_bytes,
)
from tests.helpers.chunked import (
    BOOKS,
    DEV,
    HOST,
    OPT,
    chunked,
    chunks_of_blocks,
    schedule,
    smallest_bytes,
)


@st.composite
def cases(draw):
    """Draws (strategy, prices, rank, budget over the smallest, blocks in a chunk)."""
    pp = draw(st.integers(1, 4))
    kinds = [Schedule.GPIPE, Schedule.ONE_F_ONE_B] + [Schedule.INTERLEAVED] * (pp in (2, 4))
    kind = draw(st.sampled_from(kinds))
    v = 2 if kind is Schedule.INTERLEAVED else 1
    m = pp * draw(st.integers(1, 8 // pp)) if v == 2 else draw(st.integers(1, 8))
    homes = draw(
        st.lists(
            st.sampled_from(StateLocation),
            min_size=8 if pp != 3 else 9,
            max_size=8 if pp != 3 else 9,
        )
    )
    strategy = chunked(
        homes,
        pp=pp,
        dp=draw(st.sampled_from([1, 1, 2])),
        schedule=kind,
        v=v,
        m=m,
        recompute=draw(st.sampled_from([Recompute.NONE, Recompute.FULL])),
    )
    prices = BOOKS[draw(st.sampled_from(sorted(BOOKS)))]
    return (
        strategy,
        prices,
        draw(st.integers(0, pp - 1)),
        draw(st.sampled_from([0.0, 0.02, 0.1, 0.5])),
        draw(st.sampled_from([0.1, 0.7, 1.0, 1.6, 3.0])),
    )


class Device:
    """Contents of a device by communication group; gradients are sets of (block, micro-batch)."""

    def __init__(self, chunk_schedule):
        self.found, self.ranks = chunk_schedule, chunk_schedule.groups[0].chunk_layout.ranks
        self.own = {key for key in self.every() if self.home(key) is not HOST}
        self.whole = set()
        self.fresh, self.reduced, self.sent = (
            {key: Counter() for key in self.every()} for _ in range(3)
        )
        self.void = set()

    def every(self):
        return [
            (index, number)
            for index, group in enumerate(self.found.groups)
            for number in range(group.chunk_layout.num_groups)
        ]

    def home(self, key):
        return self.found.groups[key[0]].home

    def of_block(self, block):
        index = next(
            index for index, group in enumerate(self.found.groups) if block in group.blocks
        )
        chunk_layout = self.found.groups[index].chunk_layout
        named = zip(chunk_layout.tensors, chunk_layout.group_of, strict=True)
        return {
            (index, number) for tensor, number in named if tensor.name.startswith(f"block{block}.")
        }

    def run(self, moment):
        used = self.whole if self.ranks > 1 else self.own
        keys = self.of_block(moment.block)
        assert keys <= used - self.void, "a pass has all its parameters"
        if moment.work is ActionKind.BACKWARD:
            for key in keys:
                self.fresh[key][moment.block, moment.micro_batch] += 1

    def do(self, op):
        key = op.group, op.number
        getattr(self, op.does.value)(key)
        self.void |= (
            {key}
            if self.found.in_parameters and op.does in (ChunkAction.REDUCE, ChunkAction.SEND)
            else set()
        )

    def fetch(self, key):
        assert key not in self.own | self.void
        self.own.add(key)

    def drop(self, key):
        lost = self.found.in_parameters and self.ranks == 1 and self.fresh[key]
        assert not lost, "gradients in the parameters' place are not dropped"
        self.own.remove(key)

    def gather(self, key):
        assert key in self.own - self.whole
        self.whole.add(key)

    def release(self, key):
        assert not (self.found.in_parameters and self.fresh[key]), "nor are those of a group"
        self.whole.remove(key)

    def reduce(self, key):
        assert self.ranks > 1
        assert self.fresh[key]
        self.reduced[key] += self.fresh[key]
        self.fresh[key].clear()

    def send(self, key):
        made = self.reduced if self.ranks > 1 else self.fresh
        assert self.home(key) is not DEV
        assert made[key]
        self.sent[key] += made[key]
        made[key].clear()

    def all_gradients(self, strategy):
        m = strategy.layout.num_micro_batches
        expected = {key: Counter() for key in self.every()}
        for group in self.found.groups:
            for block, micro_batch in product(group.blocks, range(m)):
                for key in self.of_block(block):
                    expected[key][block, micro_batch] = 1
        return expected


@given(cases(), st.sampled_from(Eviction))
@settings(max_examples=30, deadline=None)
def test_every_pass_has_its_parameters_and_every_gradient_gets_where_the_update_is(case, eviction):
    strategy, prices, rank, more, share = case
    with chunks_of_blocks(share):
        chunk_schedule = schedule(strategy, rank, prices, more=more, eviction=eviction)
    device = Device(chunk_schedule)
    for moment in chunk_schedule.moments:
        for op in moment.before:
            device.do(op)
        device.run(moment)
        for op in moment.after:
            device.do(op)

    assert not device.whole
    assert device.own == {key for key in device.every() if device.home(key) is not HOST}
    for key, all_gradient in device.all_gradients(strategy).items():
        at = (
            device.sent
            if device.home(key) is not DEV
            else device.reduced
            if device.ranks > 1
            else device.fresh
        )
        assert at[key] == all_gradient
    returned = {
        (op.group, op.number) for op in chunk_schedule.closing if op.does is ChunkAction.RETURN
    }
    assert returned == {key for key in device.every() if device.home(key) is OPT}


def held_bytes(chunk_schedule, prices):
    """Bytes of chunks at each moment, from ops alone.

    Parameters count from where a FETCH or GATHER may begin; what REDUCE and SEND read counts to
    where they must be over.
    """
    training = prices.training
    elements = chunk_schedule.groups[0].chunk_layout.chunk_elements
    ranks = chunk_schedule.groups[0].chunk_layout.ranks
    width = training.precision.num_bytes * elements
    gradient = (
        training.precision if chunk_schedule.in_parameters else training.gradient_precision
    ).num_bytes * elements
    count = len(chunk_schedule.moments)
    always = sum(
        state_widths(group.home, training, chunk_schedule.in_parameters)[0].total
        * elements
        * group.chunk_layout.num_groups
        for group in chunk_schedule.groups
    )
    totals = [always] * count
    since = {}
    begun = {}
    device = Device(chunk_schedule)

    def add(first, last, size):
        for index in range(first, min(last, count - 1) + 1):
            totals[index] += size

    adds_up = {moment.micro_batch for moment in chunk_schedule.moments} != {0}
    for index, moment in enumerate(chunk_schedule.moments):
        for op in moment.before:
            since[op.does is ChunkAction.GATHER, op.group, op.number] = op.issued
        if moment.work is ActionKind.BACKWARD:
            for key in device.of_block(moment.block):
                begun.setdefault(key, index)
        ended = {
            (op.group, op.number): op
            for op in moment.after
            if op.does in (ChunkAction.REDUCE, ChunkAction.SEND)
        }
        for op in moment.after:
            if op.does in (ChunkAction.DROP, ChunkAction.RELEASE):
                whole = op.does is ChunkAction.RELEASE
                add(since.pop((whole, op.group, op.number)), index, width * (ranks if whole else 1))
        outputs = []
        for key in ended:
            first = begun.pop(key, None)
            ops = [
                op
                for op in moment.after
                if (op.group, op.number) == key
                and op.does in (ChunkAction.REDUCE, ChunkAction.SEND)
            ]
            if not chunk_schedule.in_parameters and (ranks > 1 or device.home(key) is HOST):
                add(first, ops[0].issued, gradient * ranks)
            apart = ranks > 1 and (adds_up or device.home(key) is HOST)
            if apart:
                outputs.append(key)
            if apart and ops[0].issued > index:
                add(index + 1, ops[0].issued, gradient)
            if device.home(key) is HOST and ranks > 1:
                add(ops[0].issued + 1, ops[1].issued, gradient)
            elif device.home(key) is HOST and chunk_schedule.in_parameters:
                add(index + 1, ops[0].issued, gradient)
        add(index, index, gradient if outputs else 0)
    return totals


@given(cases(), st.sampled_from(Eviction))
@settings(max_examples=30, deadline=None)
def test_the_bytes_of_chunks_at_every_moment_are_those_of_its_ops(case, eviction):
    strategy, prices, rank, more, share = case
    with chunks_of_blocks(share):
        chunk_schedule = schedule(strategy, rank, prices, more=more, eviction=eviction)

    assert [moment.chunk_bytes for moment in chunk_schedule.moments] == held_bytes(
        chunk_schedule, prices
    )
    assert all(
        moment.chunk_bytes <= moment.device_bytes <= chunk_schedule.device_bytes
        for moment in chunk_schedule.moments
    )


@given(cases())
@settings(max_examples=20, deadline=None)
def test_opt_never_moves_more_than_lru_or_fifo(case):
    strategy, prices, rank, more, share = case
    with chunks_of_blocks(share):
        by_policy = {
            policy: schedule(strategy, rank, prices, more=more, eviction=policy)
            for policy in Eviction
        }

    assert by_policy[Eviction.OPT].in_bytes <= min(
        scheduled.in_bytes for scheduled in by_policy.values()
    )
    assert len({scheduled.out_bytes for scheduled in by_policy.values()}) == 1
    assert len({scheduled.smallest_bytes for scheduled in by_policy.values()}) == 1


def shares(chunk_schedule):
    """Returns delta and gamma of the chunks of a rank, with padding counted as parameters."""
    elements = {
        group.home: group.chunk_layout.num_groups * group.chunk_layout.chunk_elements
        for group in chunk_schedule.groups
    }
    whole = sum(elements.values())
    return OwnedShares(
        parameters=whole,
        delta=elements.get(HOST, 0) / whole,
        gamma=(elements.get(HOST, 0) + elements.get(OPT, 0)) / whole,
    )


# the head's logits leave no room for a chunk between the two passes, so that nothing stays: O4's
# own assumption
@pytest.mark.parametrize(("host", "optimizer"), [(8, 0), (5, 3), (2, 4), (0, 8)])
def test_patrickstars_own_way_moves_to_the_byte_what_its_closed_form_says(host, optimizer):
    homes = [DEV] * (8 - host - optimizer) + [OPT] * optimizer + [HOST] * host
    chunk_schedule = schedule(chunked(homes, m=1, b=8), more=0.0, clean_copies=False)

    assert chunk_schedule.in_parameters
    assert chunk_schedule.in_bytes == pytest.approx(
        copied_in_bytes(shares(chunk_schedule), returned_width=4), rel=1e-12
    )
    assert chunk_schedule.out_bytes == pytest.approx(
        copied_out_bytes(shares(chunk_schedule), clean_copies=False), rel=1e-12
    )


@pytest.mark.parametrize(("training", "gradient"), [("half", 2), ("mixed", 4)])
@pytest.mark.parametrize("m", [1, 2, 5])
@pytest.mark.parametrize("staying", [0, 1, 3])
def test_clean_copies_move_gradients_alone_and_chunks_that_stay_are_fetched_once_a_turn(
    monkeypatch, training, gradient, m, staying
):
    def nothing_besides(strategy, rank, passes, price_cache):
        none = (0,) * 16 * m
        return NonChunkBytes(moments=none, gaps=(*none, 0), rests=none, made=none, end=0)

    monkeypatch.setattr("parplan.costmodels.chunks.chunk_schedule.non_chunk_bytes", nothing_besides)
    prices, strategy = BOOKS[training], chunked([HOST] * 8, m=m)
    chunk_schedule = schedule(strategy, prices=prices)
    chunk = 2 * chunk_schedule.groups[0].chunk_layout.chunk_elements
    chunk_schedule = rank_chunks(
        strategy,
        0,
        prices,
        eviction=Eviction.OPT,
        device_bytes=chunk_schedule.device_bytes + staying * chunk,
    )

    # the pass itself keeps one block, and the next pass begins with it
    expected = copied_in_bytes(
        shares(chunk_schedule), num_micro_batches=m, staying=(1 + staying) / 8
    )
    assert chunk_schedule.in_bytes == pytest.approx(expected, rel=1e-12)
    assert chunk_schedule.out_bytes == pytest.approx(
        copied_out_bytes(
            shares(chunk_schedule),
            num_micro_batches=m,
            gradient=gradient,
            in_parameters=chunk_schedule.in_parameters,
        ),
        rel=1e-12,
    )


def test_groups_of_chunks_are_gathered_twice_and_reduced_once_a_micro_batch():
    homes = [DEV, DEV, OPT, HOST, HOST, HOST]
    with chunks_of_blocks(0.5):
        chunk_schedule = schedule(chunked(homes, dp=2, m=3), prices=BOOKS["mixed"], more=0.5)
    whole = sum(
        2 * group.chunk_layout.num_groups * group.chunk_layout.chunk_elements
        for group in chunk_schedule.groups
    )
    used = [Device(chunk_schedule).of_block(moment.block) for moment in chunk_schedule.moments]
    new = sum(len(keys - before) for keys, before in zip(used, [set(), *used], strict=False))

    assert chunk_schedule.moved(ChunkAction.REDUCE) == 3 * 4 * whole
    assert (
        chunk_schedule.moved(ChunkAction.GATHER)
        == new * 2 * 2 * chunk_schedule.groups[0].chunk_layout.chunk_elements
        <= 3 * 2 * 2 * whole
    )
    assert (
        chunk_schedule.moved(ChunkAction.GATHER) + chunk_schedule.moved(ChunkAction.REDUCE)
    ) / 2 <= collective_bytes(whole, 2, num_micro_batches=3, gradient=4)


def test_a_group_that_the_next_pass_uses_too_is_not_gathered_again():
    chunk_schedule = schedule(chunked([DEV, DEV], dp=2, m=1, ends=False), more=1.0)
    gathered = [
        sum(op.does is ChunkAction.GATHER for op in moment.before)
        for moment in chunk_schedule.moments
    ]

    assert [moment.block for moment in chunk_schedule.moments] == [0, 1, 1, 0]
    assert gathered == [1, 1, 0, 1]


def test_a_budget_that_is_too_small_is_refused_with_the_smallest_which_suffices():
    strategy, prices = chunked([DEV, HOST, HOST, HOST], m=2, b=2), BOOKS["half"]
    least = smallest_bytes(strategy, 0, prices)

    assert (
        rank_chunks(strategy, 0, prices, eviction=Eviction.LRU, device_bytes=least).smallest_bytes
        == least
    )
    with pytest.raises(
        InfeasibleError,
        match=rf"^chunks of pipeline rank 0 need at least {least:,} bytes "
        rf".* budget is {least - 1:,} ",
    ):
        rank_chunks(strategy, 0, prices, eviction=Eviction.OPT, device_bytes=least - 1)


def test_the_smallest_budget_names_the_pass_that_needs_it():
    strategy = chunked([HOST] * 4, m=1, ends=False)
    with pytest.raises(InfeasibleError, match=r"in the backward pass of block 3, micro-batch 0"):
        rank_chunks(strategy, 0, BOOKS["half"], eviction=Eviction.OPT, device_bytes=0)


def test_a_schedule_that_splits_the_backward_is_refused():
    strategy = chunked([HOST] * 4, pp=2, m=4, schedule=Schedule.ZBV, v=2, recompute=Recompute.NONE)
    with pytest.raises(ConfigError, match="the schedule of pipeline rank 0 has I"):
        rank_chunks(strategy, 0, BOOKS["half"], eviction=Eviction.OPT, device_bytes=10**12)


@pytest.mark.parametrize("more", [0.0, 0.1, 0.3])
def test_moving_ops_apart_changes_no_op_and_no_byte(monkeypatch, more):
    strategy = chunked([DEV, OPT, HOST, HOST, HOST, HOST, HOST, HOST], dp=2, m=3)
    apart = schedule(strategy, prices=BOOKS["mixed"], more=more)
    monkeypatch.setattr("parplan.costmodels.chunks.chunk_schedule.issue_moments", lambda *_: {})
    at_once = schedule(strategy, prices=BOOKS["mixed"], more=more)

    for moment, second in zip(apart.moments, at_once.moments, strict=True):
        for moved, demanded in ((moment.before, second.before), (moment.after, second.after)):
            assert [replace(op, issued=-1) for op in moved] == [
                replace(op, issued=-1) for op in demanded
            ]
    assert apart.closing == at_once.closing


def test_where_there_is_room_every_copy_gets_moments_to_hide_under():
    strategy = chunked([HOST] * 8, m=2, ends=False)
    roomy = schedule(strategy, prices=BOOKS["mixed"], more=3.0)
    fetched = [
        (index, op)
        for index, moment in enumerate(roomy.moments)
        for op in moment.before
        if op.does is ChunkAction.FETCH
    ]
    sent = [
        (index, op)
        for index, moment in enumerate(roomy.moments)
        for op in moment.after
        if op.does is ChunkAction.SEND
    ]

    assert [op.issued for index, op in fetched] == [max(0, index - COPIES) for index, _ in fetched]
    assert all(index < op.issued <= index + COPIES for index, op in sent)
