"""A step with context parallelism sends and keeps the bytes of the formulas, in a dry run."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest

from parplan.costmodels.communication.collectives import Collective
from parplan.costmodels.usage.rank_traffic import MESSAGE, SentBytes, rank_traffic
from parplan.costmodels.usage.rank_usage import RankUse
from parplan.executor.checking.dry_run import dry_run
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.plan_strategy import prices_of_plan, strategy_of
from parplan.profiles.models.blocks import BlockRun
from parplan.profiles.models.documents import Documents
from parplan.profiles.stack import ContextForm
from tests.helpers.cases import mostly_slow
from tests.helpers.executor_plans import LLAMA, SEQ_LENGTH, make_plan

RING, GATHER = ContextForm.RING, ContextForm.ALL_GATHER
EXCHANGE, TWO_LEVEL = ContextForm.ALL_TO_ALL, ContextForm.TWO_LEVEL
MODEL = dataclasses.replace(LLAMA, num_layers=2)
NUM_BLOCKS, MICRO_BATCHES, MICRO_BATCH, FP32_BYTES = MODEL.num_layers, 2, 4, 4

Sent = dict[str, tuple[int, int]]  # calls and bytes by kind


@cache
def used(form: ContextForm, cp: int, recompute: tuple[str, ...] = ()) -> RankUse:
    """Returns the use of the first rank in one step."""
    return dry_run(make_plan(MODEL, cp=cp, form=form, recompute=recompute), 0).use


def sent_over_context(form: ContextForm, cp: int, recompute: tuple[str, ...] = ()) -> Sent:
    """Returns the calls of the first rank to those that divide its sequences, in one step."""
    sent = used(form, cp, recompute).sent
    return {each.kind: (each.calls, each.num_bytes) for each in sent if each.axis == "cp"}


def predicted_over_context(form: ContextForm, cp: int, recompute: tuple[str, ...] = ()) -> Sent:
    """Returns the calls of the first rank to those that divide its sequences, as priced."""
    plan = make_plan(MODEL, cp=cp, form=form, recompute=recompute)
    price_cache = prices_of_plan(plan)
    sent = rank_traffic(strategy_of(plan, price_cache), 0, price_cache)
    return {each.kind: (each.calls, each.num_bytes) for each in sent if each.axis == "cp"}


@pytest.mark.parametrize(
    ("form", "cp", "recompute"),
    mostly_slow(
        [
            *((form, cp, ()) for form in (RING, GATHER, EXCHANGE) for cp in (2, 4)),
            (TWO_LEVEL, 4, ()),
            (RING, 4, ("attention",)),
        ],
        {(TWO_LEVEL, 4, ())},
    ),
)
def test_attention_sends_as_many_bytes_in_as_many_calls_as_predicted(form, cp, recompute):
    assert sent_over_context(form, cp, recompute) == predicted_over_context(form, cp, recompute)


def of_step(calls: int, num_bytes: int) -> tuple[int, int]:
    """Calls of so many bytes in every block and micro-batch, in a step."""
    passes = NUM_BLOCKS * MICRO_BATCHES
    return passes * calls, passes * calls * num_bytes


def kv_bytes(cp: int) -> int:
    """Bytes of the keys and values of a rank's tokens in a micro-batch."""
    return FP32_BYTES * MICRO_BATCH * SEQ_LENGTH // cp * 2 * LLAMA.kv_size


def output_bytes(cp: int) -> int:
    """Bytes of the queries, and of the output of attention, of a rank's tokens."""
    return FP32_BYTES * MICRO_BATCH * SEQ_LENGTH // cp * LLAMA.q_size


@pytest.mark.parametrize("cp", mostly_slow([2, 4], {2}))
def test_a_ring_passes_keys_and_values_on_in_both_passes_and_gradients_in_one(cp):
    expected = of_step(3 * (cp - 1), kv_bytes(cp))

    assert sent_over_context(RING, cp) == {MESSAGE: expected}


def test_attention_that_is_recomputed_goes_round_the_ring_once_more():
    expected = of_step(4 * (4 - 1), kv_bytes(4))

    assert sent_over_context(RING, 4, ("attention",)) == {MESSAGE: expected}


@pytest.mark.parametrize("cp", mostly_slow([2, 4], {4}))
def test_keys_and_values_are_gathered_in_both_passes_and_their_gradients_scattered(cp):
    assert sent_over_context(GATHER, cp) == {
        Collective.ALL_GATHER: of_step(2, cp * kv_bytes(cp)),
        Collective.REDUCE_SCATTER: of_step(1, cp * kv_bytes(cp)),
    }


@pytest.mark.parametrize(
    ("cp", "copies"),
    [
        pytest.param(2, 1, id="a-head-each", marks=pytest.mark.slow),
        pytest.param(4, 2, id="half-a-head"),
    ],
)
def test_tokens_are_exchanged_for_heads_and_back_in_both_passes(cp, copies):
    there, back = output_bytes(cp) + copies * kv_bytes(cp), output_bytes(cp)
    calls, num_bytes = of_step(1, 2 * there + 3 * back)

    assert sent_over_context(EXCHANGE, cp) == {Collective.ALL_TO_ALL: (4 * calls, num_bytes)}


def test_tokens_whose_rotation_is_recomputed_are_exchanged_for_heads_once_more():
    there, back = output_bytes(2) + kv_bytes(2), output_bytes(2)
    calls, num_bytes = of_step(1, 3 * there + 3 * back)

    assert sent_over_context(EXCHANGE, 2, ("norm1", "qkv", "rotary")) == {
        Collective.ALL_TO_ALL: (5 * calls, num_bytes)
    }


def test_two_levels_exchange_among_neighbours_and_pass_on_between_them():
    there, back = output_bytes(4) + kv_bytes(4), output_bytes(4)
    calls, num_bytes = of_step(1, 2 * there + 3 * back)

    assert sent_over_context(TWO_LEVEL, 4) == {
        Collective.ALL_TO_ALL: (4 * calls, num_bytes),
        MESSAGE: of_step(3, kv_bytes(4)),
    }


@pytest.mark.parametrize(
    ("form", "cp", "more"),
    [
        pytest.param(RING, 2, 0, id="ring", marks=pytest.mark.slow),
        pytest.param(GATHER, 4, 0, id="all-gather", marks=pytest.mark.slow),
        pytest.param(EXCHANGE, 2, 0, id="all-to-all", marks=pytest.mark.slow),
        pytest.param(EXCHANGE, 4, kv_bytes(4), id="all-to-all-of-two-copies-of-keys"),
        pytest.param(TWO_LEVEL, 4, 0, id="two-level", marks=pytest.mark.slow),
    ],
)
def test_a_block_keeps_what_it_would_of_sequences_as_short_as_its_part(form, cp, more):
    short = make_plan(MODEL)
    training = dataclasses.replace(short.training, seq_length=SEQ_LENGTH // cp)
    short = dataclasses.replace(short, training=training)

    expected = dry_run(short, 0).use.saved + NUM_BLOCKS * more

    assert used(form, cp).saved == expected


def within_reach(plan: Plan) -> tuple[SentBytes, SentBytes]:
    """Returns what the first rank sends over cp, counted and priced as the executor sends it."""
    stack = dataclasses.replace(plan.training.stack, sends_within_windows=True)
    plan = dataclasses.replace(plan, training=dataclasses.replace(plan.training, stack=stack))
    price_cache = prices_of_plan(plan)
    (priced,) = (
        each
        for each in rank_traffic(strategy_of(plan, price_cache), 0, price_cache)
        if each.axis == "cp"
    )
    (counted,) = (each for each in dry_run(plan, 0).use.sent if each.axis == "cp")
    return counted, priced


@pytest.mark.parametrize(
    ("cp", "window", "form"),
    mostly_slow(
        [
            (cp, window, form)
            for cp, window in ((2, 3), (2, 5), (2, 9), (4, 3), (4, 5))
            for form in (RING, GATHER)
        ],
        {(4, 5, RING)},
    ),
)
def test_the_first_rank_sends_no_more_within_a_window_than_the_fullest_is_predicted_to(
    form, cp, window
):
    model = dataclasses.replace(MODEL, blocks=(BlockRun(window=window),))
    plan = make_plan(model, cp=cp, form=form)

    counted, priced = within_reach(plan)

    assert (counted.kind, counted.calls) == (priced.kind, priced.calls)
    if (cp, window) in ((2, 3), (2, 5)):  # both ranks send and read one piece
        assert counted.num_bytes == priced.num_bytes
    assert counted.num_bytes <= priced.num_bytes


@pytest.mark.parametrize(
    ("form", "cp", "documents"),
    mostly_slow(
        [
            (RING, 2, Documents(lengths=((2, 1), (3, 1)))),
            (GATHER, 2, Documents(lengths=((5, 1),))),
            (RING, 4, Documents(lengths=((1, 3), (3, 1)))),
            (EXCHANGE, 2, Documents(lengths=((5, 1),))),
            (RING, 2, Documents(mean=4.0)),
            (RING, 4, None),
        ],
        {(RING, 2, Documents(lengths=((2, 1), (3, 1))))},
    ),
)
def test_packed_sequences_send_as_far_as_their_longest_document_reaches(form, cp, documents):
    model = MODEL if documents else dataclasses.replace(MODEL, blocks=(BlockRun(chunk=8),))
    plan = make_plan(model, cp=cp, form=form)
    training = dataclasses.replace(plan.training, documents=documents)

    counted, priced = within_reach(dataclasses.replace(plan, training=training))

    assert (counted.kind, counted.calls) == (priced.kind, priced.calls)
    if cp == 2:
        assert counted.num_bytes == priced.num_bytes
    assert counted.num_bytes <= priced.num_bytes
