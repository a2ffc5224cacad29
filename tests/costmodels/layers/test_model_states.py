"""Bytes of model states: the table by hand, torch.chunk itself, and shards that add up."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parplan.costmodels.layers.model_states import (
    StateBytes,
    StateSharding,
    chunk_elements,
    frozen_bytes,
    gradient_copy_bytes,
    ideal_states,
    layer_states,
    owned_parameters,
    states_of,
    step_copy_bytes,
    zero_buffer_bytes,
)
from parplan.costmodels.operators.sharding import Sharding
from parplan.profiles.models.fine_tuning import FineTuning
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import Precision, TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.stack import NEUTRAL

BF16 = TrainingSpec(global_batch_size=8, seq_length=128, stack=NEUTRAL)
BF16_GRADIENTS = replace(BF16, gradient_precision=Precision.BF16)
FP32 = replace(BF16, precision=Precision.FP32)
ODD = replace(
    load_model("gpt-tiny").spec, hidden_size=60, ffn_hidden_size=252, head_dim=15
)  # nothing divides by 7 or 8
GRAPH = build_graph(ODD, BF16, 1)


@pytest.mark.parametrize(
    ("training", "zero", "parameters", "gradients", "optimizer"),
    [
        # 1000 elements, of which this rank owns 250
        pytest.param(BF16, 0, 2000, 4000, 12000, id="bf16-zero-0"),
        pytest.param(BF16, 1, 2000, 4000, 3000, id="bf16-zero-1"),
        pytest.param(BF16, 2, 2000, 1000, 3000, id="bf16-zero-2"),
        pytest.param(BF16, 3, 0, 1000, 3000, id="bf16-zero-3"),
        pytest.param(BF16_GRADIENTS, 0, 2000, 2000, 12000, id="bf16-gradients-zero-0"),
        pytest.param(BF16_GRADIENTS, 2, 2000, 500, 3000, id="bf16-gradients-zero-2"),
        pytest.param(FP32, 0, 4000, 4000, 8000, id="fp32-zero-0"),
        pytest.param(FP32, 1, 5000, 4000, 2000, id="fp32-zero-1"),
        pytest.param(FP32, 2, 5000, 1000, 2000, id="fp32-zero-2"),
        pytest.param(FP32, 3, 1000, 1000, 2000, id="fp32-zero-3"),
    ],
)
def test_states_are_those_of_the_table(training, zero, parameters, gradients, optimizer):
    moments = 8 * (1000 if zero == 0 else 250)

    assert states_of(1000, 250, zero, training, moments) == StateBytes(
        parameters, gradients, optimizer
    )


@pytest.mark.parametrize("dp", [1, 2, 8, 64])
def test_bytes_per_parameter_are_megatrons(dp):
    """Megatron-LM needs 18 bytes without its distributed optimizer and 6 + 12/D with it.

    The source is its docs of the distributed optimizer, for bf16 with fp32 gradients.
    """
    elements = 64 * 1000

    whole = states_of(elements, elements // dp, 0, BF16, 8 * elements)
    sharded = states_of(elements, elements // dp, 1, BF16, 8 * elements // dp)

    assert whole.total == 18 * elements
    assert sharded.total == pytest.approx((6 + 12 / dp) * elements)


@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple), parts=st.integers(1, 50)
)
def test_shards_have_the_sizes_of_torch_chunk(shape, parts):
    chunks = torch.empty(shape, device="meta").chunk(parts)
    sizes = [chunk.numel() for chunk in chunks] + [0] * (
        parts - len(chunks)
    )  # torch gives fewer parts than asked for

    assert [chunk_elements(shape, parts, index) for index in range(parts)] == sizes
    assert sizes[0] == max(sizes)


@pytest.mark.parametrize("kind", list(LayerKind))
@pytest.mark.parametrize("dp", [2, 3, 7, 64])
@pytest.mark.parametrize("sharding", [Sharding(), Sharding(tp=4)], ids=["tp1", "tp4"])
def test_sharded_states_add_up_to_one_whole_copy_over_the_data_parallel_ranks(kind, dp, sharding):
    layer = GRAPH.layer_class(kind)
    local = owned_parameters(layer, sharding)

    ranks = [
        layer_states(layer, sharding, StateSharding(3, dp), BF16, dp_rank=rank)
        for rank in range(dp)
    ]

    assert sum(rank.optimizer for rank in ranks) == 12 * local
    assert sum(rank.gradients for rank in ranks) == 4 * local
    assert (
        max(rank.total for rank in ranks)
        == ranks[0].total
        == 16 * owned_parameters(layer, sharding, dp)
    )
    fp32 = [
        layer_states(layer, sharding, StateSharding(3, dp), FP32, dp_rank=rank)
        for rank in range(dp)
    ]
    assert sum(rank.total for rank in fp32) == (4 + 4 + 8) * local


@pytest.mark.parametrize(
    "training", [BF16, BF16_GRADIENTS, FP32], ids=["bf16", "bf16-gradients", "fp32"]
)
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (1, 4), (7, 1), (8, 4), (64, 2)])
def test_no_class_of_states_is_below_its_share_of_one_copy(training, zero, dp, tp):
    for layer in GRAPH:
        held = layer_states(layer, Sharding(tp=tp), StateSharding(zero, dp), training)
        whole = owned_parameters(layer, Sharding())
        ideal = ideal_states(whole, dp * tp, training)

        assert all(
            part <= actual
            for part, actual in zip(
                ideal, (held.parameters, held.gradients, held.optimizer), strict=True
            )
        )


def test_one_copy_of_everything_is_master_moments_and_gradient():
    assert sum(ideal_states(1000, 1, BF16)) == 16_000  # fp32 master 4, moments 8, gradient 4
    assert sum(ideal_states(1000, 1, FP32)) == 16_000
    assert sum(ideal_states(1000, 8, BF16)) == 2_000


def test_without_data_parallelism_every_zero_stage_is_zero_0():
    plain = layer_states(GRAPH.block, Sharding(), StateSharding(0, 1), FP32)

    assert [
        layer_states(GRAPH.block, Sharding(), StateSharding(zero, 1), FP32) for zero in (1, 2, 3)
    ] == [plain] * 3


def test_states_shrink_with_every_zero_stage_and_more_ranks():
    by_stage = [
        layer_states(GRAPH.block, Sharding(), StateSharding(zero, 8), BF16).total
        for zero in range(4)
    ]

    assert by_stage == sorted(by_stage, reverse=True)
    assert len(set(by_stage)) == 4
    by_ranks = [
        layer_states(GRAPH.block, Sharding(), StateSharding(1, dp), BF16).total
        for dp in (1, 2, 4, 64)
    ]
    assert by_ranks == sorted(by_ranks, reverse=True)


def test_a_tied_head_holds_its_matrix_only_where_it_is_a_copy_of_its_own():
    vocabulary = 512 * 60

    with_copy = layer_states(GRAPH.head, Sharding(), StateSharding(0, 1), BF16)
    without = layer_states(GRAPH.head, Sharding(), StateSharding(0, 1, with_tied=False), BF16)

    assert with_copy.total - without.total == 18 * vocabulary
    assert without.total == 18 * 2 * 60  # the norm


@pytest.mark.parametrize(
    ("zero", "dp", "bf16", "fp32"),
    [
        pytest.param(0, 8, 0, 0, id="zero-0"),
        pytest.param(3, 1, 0, 0, id="one-rank-has-no-buffers"),
        pytest.param(1, 8, 4000, 4000, id="zero-1-reduces-in-fp32"),
        pytest.param(2, 8, 4000 + 2000, 4000 + 4000, id="zero-2-and-the-unreduced-gradient"),
        pytest.param(
            3,
            8,
            4000 + 2000 + 2 * 2000,
            4000 + 4000 + 2 * 4000,
            id="zero-3-and-two-gathered-layers",
        ),
    ],
)
def test_zero_buffers_by_hand(zero, dp, bf16, fp32):
    assert zero_buffer_bytes(1000, zero, dp, BF16) == bf16
    assert zero_buffer_bytes(1000, zero, dp, FP32) == fp32


def stack_of(training, **facts):
    return replace(training, stack=replace(NEUTRAL, **facts))


FP16 = replace(BF16, precision=Precision.FP16, gradient_precision=Precision.FP16)


@pytest.mark.parametrize(
    ("training", "dp", "copies"),
    [
        pytest.param(BF16, 8, 0, id="neutral"),
        pytest.param(
            stack_of(BF16, keeps_low_precision_gradients=True), 1, 2, id="16-bit-beside-fp32"
        ),
        pytest.param(stack_of(FP16, keeps_low_precision_gradients=True), 1, 0, id="16-bit-alone"),
        pytest.param(stack_of(FP32, keeps_low_precision_gradients=True), 1, 0, id="fp32-alone"),
        pytest.param(stack_of(BF16, ddp_buckets=True), 8, 2, id="buckets"),
        pytest.param(stack_of(BF16, ddp_buckets=True), 1, 0, id="no-data-parallelism-no-buckets"),
        pytest.param(
            stack_of(BF16, ddp_buckets=True, keeps_low_precision_gradients=True), 2, 4, id="both"
        ),
    ],
)
def test_a_stack_holds_whole_copies_of_the_gradients(training, dp, copies):
    held, plain = (
        layer_states(GRAPH.block, Sharding(), StateSharding(1, dp), of)
        for of in (training, replace(training, stack=NEUTRAL))
    )

    assert gradient_copy_bytes(dp, training) == copies
    assert held.gradients - plain.gradients == copies * owned_parameters(GRAPH.block, Sharding())
    assert (held.parameters, held.optimizer) == (plain.parameters, plain.optimizer)


@pytest.mark.parametrize(("training", "width"), [(BF16, 2), (FP32, 0)])
def test_a_stack_keeps_shards_of_16_bit_parameters_at_zero_3(training, width):
    def parameters(zero, **facts):
        of = stack_of(training, **facts)
        return layer_states(GRAPH.block, Sharding(), StateSharding(zero, 8), of).parameters

    more = parameters(3, keeps_shards=True) - parameters(3)
    assert more == width * owned_parameters(GRAPH.block, Sharding(), 8)
    assert parameters(2, keeps_shards=True) == parameters(2)


def test_the_step_copies_the_16_bit_gradients_that_the_rank_updates():
    assert step_copy_bytes(1000, stack_of(FP16, step_copy_bytes=6)) == 6000
    assert step_copy_bytes(1000, stack_of(BF16, step_copy_bytes=6)) == 0  # its gradients are fp32
    assert step_copy_bytes(1000, FP16) == 0


@pytest.mark.parametrize(
    ("zero", "dp", "expected"),
    [(0, 8, 0), (1, 8, 0), (2, 8, 0), (3, 8, 4000 + 2000 + 2 * 2000), (1, 1, 0)],
)
def test_contiguous_gradients_are_reduced_in_place_up_to_zero_2(zero, dp, expected):
    assert zero_buffer_bytes(1000, zero, dp, stack_of(BF16, zero_buffers=False)) == expected


@pytest.mark.parametrize(("zero", "dp", "expected"), [(0, 8, 4 * 500), (1, 8, 4 * 500), (0, 1, 0)])
def test_a_bucket_is_there_whenever_gradients_are_reduced(zero, dp, expected):
    assert (
        zero_buffer_bytes(1000, zero, dp, stack_of(BF16, zero_buffers=False, bucket_elements=500))
        == expected
    )


@pytest.mark.parametrize("zero", range(4))
def test_frozen_parameters_have_weights_alone_and_only_zero_3_shards_them(zero):
    tuning = FineTuning(lora_rank=4, lora_targets=("qkv",))
    graph = build_graph(load_model("gpt-tiny").spec, replace(BF16, fine_tuning=tuning), 1)
    adapter = 4 * (64 + 192)  # A and B of one block
    frozen = graph.block.num_parameters - adapter

    states = layer_states(graph.block, Sharding(), StateSharding(zero, 4), BF16)

    owned = adapter // 4 if zero else adapter
    whole = states_of(adapter, owned, zero, BF16, 8 * owned)
    held = frozen // 4 if zero == 3 else frozen
    assert states == whole + StateBytes(2 * held)


def test_an_8_bit_weight_has_a_byte_an_element_and_a_scale_for_64():
    assert frozen_bytes(128, BF16, quantised=True) == 128 + 2 * 4
    assert frozen_bytes(130, BF16, quantised=True) == 130 + 3 * 4
    assert frozen_bytes(128, BF16, quantised=False) == 256
    assert frozen_bytes(128, FP32, quantised=False) == 512
