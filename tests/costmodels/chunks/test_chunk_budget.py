"""Device bytes besides chunks, by moment, against the known peak without chunks and by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.chunks import chunk_budget as room
from parplan.costmodels.chunks.accesses import layer_passes
from parplan.costmodels.chunks.chunk_budget import non_chunk_bytes
from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers import model_layers
from parplan.costmodels.layers.model_states import owned_parameters
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.memory.rank_memory import layer_activations, rank_memory
from parplan.costmodels.schedules.schedule import Schedule
from parplan.profiles.machines.machine_catalog import load_stack
from parplan.profiles.models.operator_graph import LayerKind
from tests.helpers.chunked import BOOKS, DEV, HOST, MIXED, chunked, schedule
from tests.helpers.uniform_strategies import TINY, book_of


@pytest.fixture
def large_tensors_alone(monkeypatch):
    """Leaves out small tensors, as the peak without chunks does.

    The small tensors are ids, statistics of norms, tensors saved by the loss and received messages.
    """
    monkeypatch.setattr(model_layers, "IDS_BYTES", 0)
    for name in ("NORM_BYTES", "LOSS_KEPT_BYTES", "LOSS_MADE_BYTES", "POSTED"):
        monkeypatch.setattr(room, name, 0)
    monkeypatch.setattr(room, "_logits_bytes", lambda *_: 0)


def without_padding(chunk_schedule):
    """The bytes of chunks that no parameter fills, in mixed precision with fp32 gradients."""
    return sum(
        18
        * (
            group.chunk_layout.num_groups * group.chunk_layout.chunk_elements
            - group.chunk_layout.used_elements
        )
        for group in chunk_schedule.groups
    )


@pytest.mark.usefixtures("large_tensors_alone")
@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL])
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"m": 1}, id="one-micro-batch"),
        pytest.param({"m": 4, "b": 2}, id="accumulated"),
        pytest.param({"pp": 4, "m": 8}, id="1f1b"),
        pytest.param({"pp": 4, "m": 8, "schedule": Schedule.GPIPE}, id="gpipe"),
        pytest.param({"pp": 2, "m": 4, "v": 2, "schedule": Schedule.INTERLEAVED}, id="interleaved"),
    ],
)
def test_the_fullest_moment_of_chunks_on_the_device_is_the_peak_without_chunks(layout, recompute):
    """Chunks add up to a block's parameters.

    They hold whole gradients beside those that autograd makes of the block.
    """
    prices, strategy = BOOKS["mixed"], chunked([DEV] * 8, recompute=recompute, **layout)
    block = 2 * owned_parameters(prices.layer(LayerKind.BLOCK, 1), strategy.layout.sharding)
    for rank in range(strategy.layout.mesh.pp):
        chunk_schedule = schedule(strategy, rank, prices)
        more = (
            chunk_schedule.smallest_bytes
            - without_padding(chunk_schedule)
            - rank_memory(strategy, rank, prices).allocated
        )
        assert 0 <= more <= block


@pytest.mark.usefixtures("large_tensors_alone")
def test_the_same_with_gradients_that_are_freed_and_messages_that_are_kept():
    """This is the case of parplan's own executor.

    The first of several micro-batches has no gradient of the embedding yet; the later ones have.
    """
    prices = book_of(TINY, 8, replace(MIXED, stack=load_stack("parplan")))
    block = 2 * owned_parameters(prices.layer(LayerKind.BLOCK, 1), chunked([DEV]).layout.sharding)
    for rank, strategy in enumerate([chunked([DEV] * 8, pp=2, m=8)] * 2):
        chunk_schedule = schedule(strategy, rank, prices)
        more = (
            chunk_schedule.smallest_bytes
            - without_padding(chunk_schedule)
            - rank_memory(strategy, rank, prices).allocated
        )
        assert 0 <= more <= block


@pytest.mark.usefixtures("large_tensors_alone")
def test_activations_grow_block_by_block_and_are_freed_the_same_way():
    prices, strategy = BOOKS["mixed"], chunked([HOST] * 4, m=2, recompute=Recompute.NONE)
    non_chunk = non_chunk_bytes(strategy, 0, tuple(layer_passes(strategy, 0)), prices)
    saved = layer_activations(strategy.stages[0][1], strategy.layout, prices).saved

    steps = [
        after - before for before, after in zip(non_chunk.rests, non_chunk.rests[1:], strict=False)
    ]
    head = steps[3]
    assert steps[:3] == [saved] * 3
    assert steps[4:7] == [-saved] * 3
    assert head == -saved  # what the head keeps is gone with its backward pass
    assert non_chunk.rests[:8] == non_chunk.rests[8:]


@pytest.mark.usefixtures("large_tensors_alone")
def test_the_pass_of_the_head_is_a_gap_and_the_logits_are_in_it_alone():
    prices, strategy = BOOKS["mixed"], chunked([HOST] * 4, m=1, b=8)
    non_chunk = non_chunk_bytes(strategy, 0, tuple(layer_passes(strategy, 0)), prices)
    head = layer_activations(strategy.stages[0][-1], strategy.layout, prices)

    handed = TINY.hidden_size * MIXED.seq_length * 8 * 2  # which the head keeps
    assert non_chunk.gaps[4] == non_chunk.rests[3] - handed + head.saved + head.workspace
    assert max(non_chunk.gaps) == non_chunk.gaps[4]
    assert non_chunk.gaps[5] == non_chunk.rests[4]


def test_a_stage_that_sends_keeps_its_messages_where_the_stack_does():
    stack = load_stack("parplan")
    strategy = chunked([HOST] * 4, pp=2, m=4)
    kept, dropped = (
        non_chunk_bytes(
            strategy,
            0,
            tuple(layer_passes(strategy, 0)),
            book_of(TINY, 8, replace(MIXED, stack=variant)),
        )
        for variant in (stack, replace(stack, keeps_sent=False))
    )
    message = TINY.hidden_size * MIXED.seq_length * 2

    # F0 F1 B0 F2 B1 F3 B2 B3 of two blocks each: before each block of the n-th forward pass n
    # messages are kept and two are received
    assert [a - b for a, b in zip(kept.moments, dropped.moments, strict=True)] == [
        message * (2 + n) for n in (0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4)
    ]


@pytest.mark.parametrize("pp", [1, 2])
def test_what_fsdp2_gathers_of_embedding_and_head_is_there_in_their_passes_alone(pp):
    """GPT-tiny shares its table.

    On one rank embedding and head are one unit, which stays gathered throughout.
    """
    prices, sharding = BOOKS["mixed"], chunked([HOST]).layout.sharding
    one_rank, two = (
        non_chunk_bytes(strategy, 0, tuple(layer_passes(strategy, 0)), prices)
        for strategy in (chunked([HOST] * 4, pp=pp, m=2), chunked([HOST] * 4, pp=pp, dp=2, m=2))
    )
    outside = [LayerKind.EMBEDDING] + [LayerKind.HEAD] * (pp == 1)
    parameters = sum(
        owned_parameters(prices.layer(kind, 1), sharding, with_tied=pp == 2) for kind in outside
    )
    states = [
        sum(
            prices.states(kind, Mesh(pp=pp, dp=dp, tp=1), sharding, zero).states.total
            for kind in outside
        )
        for dp, zero in ((1, 0), (2, 3))
    ]
    always = two.moments[0] - one_rank.moments[0]

    assert always == states[1] - states[0] + 2 * parameters * (pp == 1)
    assert two.gaps[0] - one_rank.gaps[0] >= states[1] - states[0] + 2 * parameters


def test_norms_keep_two_numbers_of_a_token_unless_recomputed_and_the_batch_is_always_there():
    prices, tokens = BOOKS["mixed"], MIXED.seq_length
    per_block = 2 * room.NORM_BYTES * tokens
    for recompute, kept in ((Recompute.NONE, per_block), (Recompute.FULL, 0)):
        strategy = chunked([HOST] * 2, m=3, recompute=recompute)
        passes = tuple(layer_passes(strategy, 0))
        non_chunk = non_chunk_bytes(strategy, 0, passes, prices)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model_layers, "IDS_BYTES", 0)
            patch.setattr(room, "NORM_BYTES", 0)
            without = non_chunk_bytes(strategy, 0, passes, prices)

        assert [a - b for a, b in zip(non_chunk.rests, without.rests, strict=True)][:2] == [
            model_layers.IDS_BYTES * 3 * tokens + kept * blocks for blocks in (1, 2)
        ]
        assert non_chunk.made[:4] == (0, 0, non_chunk.made[2], non_chunk.made[2])
        assert non_chunk.made[2] == 2 * owned_parameters(
            prices.layer(LayerKind.BLOCK, 1), strategy.layout.sharding
        )
