"""The price of one layer: bytes of tensor and data parallelism, and the share overlap hides."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parplan.costmodels.communication.collectives import Collective
from parplan.costmodels.layers.layer_price import price_operators
from parplan.costmodels.layers.recompute import Recompute, recompute_operators
from parplan.costmodels.operators.compute import operator_time
from parplan.costmodels.operators.sharding import Sharding
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import Precision, TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.stack import Stack

S, B, H, V = 128, 2, 64, 512
TRAINING = TrainingSpec(
    global_batch_size=8, seq_length=S, overlap_grad_reduce=False, stack=Stack(host_operator_s=0.0)
)
BF16_GRADIENTS = replace(TRAINING, gradient_precision=Precision.BF16)
GPT = build_graph(load_model("gpt-tiny").spec, TRAINING, B)
LLAMA = build_graph(load_model("llama3-8b").spec, TRAINING, 1)
MACHINE = machine_for(with_gpus(load_cluster("a100-80gb"), 16))
WHOLE = Sharding()
TP4 = Sharding(4)
TP4_SP = Sharding(4, True)
OPERATORS = [operator.name for operator in GPT.block.operators]
BOUNDARY = 2 * S * B * H  # 2 S b h of EQUATIONS T2


def priced(layer, sharding=WHOLE, training=TRAINING, recompute=()):
    return price_operators(layer, sharding, MACHINE, training).time(recompute)


@pytest.mark.parametrize("graph", [GPT, LLAMA], ids=["gpt", "llama"])
def test_a_block_all_reduces_two_boundary_tensors_each_way(volumes, graph):
    priced(graph.block, TP4)

    assert volumes == [(Collective.ALL_REDUCE, graph.block.input.num_bytes)] * 4


@pytest.mark.parametrize("graph", [GPT, LLAMA], ids=["gpt", "llama"])
def test_sequence_parallelism_moves_the_same_bytes_as_gathers_and_scatters_and_gathers_inputs_again(
    volumes, graph
):
    """The inputs of qkv and fc1 are saved as the tokens of one rank.

    Nothing hides their second gather here.
    """
    plain = priced(graph.block, TP4)
    volumes.clear()
    sequence_parallel = priced(graph.block, TP4_SP)

    boundary = graph.block.input.num_bytes
    # the gather of an input is priced once and counts twice: forward, and again for the weight
    # gradient
    assert sorted(volumes) == sorted(
        [(Collective.ALL_GATHER, boundary)] * 4 + [(Collective.REDUCE_SCATTER, boundary)] * 4
    )
    moved = 2 * 2 * 3 / 4 * boundary
    assert (
        plain.tp_forward.value_s
        == plain.tp_backward.value_s
        == sequence_parallel.tp_forward.value_s
        == moved
    )
    assert sequence_parallel.tp_backward.value_s == pytest.approx(moved + 2 * 3 / 4 * boundary)


def test_full_recompute_makes_it_six_all_reduces(volumes):
    time = priced(GPT.block, TP4, recompute=recompute_operators(GPT.block, Recompute.FULL))

    assert (
        time.tp_recompute.value_s + time.tp_forward.value_s + time.tp_backward.value_s
        == 6 * 2 * 3 / 4 * BOUNDARY
    )


def test_the_embedding_reduces_its_output_and_the_head_its_input_gradient_and_three_numbers_a_token(
    volumes,
):
    embedding, head = priced(GPT.embedding, TP4), priced(GPT.head, TP4)

    assert (embedding.tp_forward.value_s, embedding.tp_backward.value_s) == (
        2 * 3 / 4 * BOUNDARY,
        0.0,
    )
    assert (head.tp_forward.value_s, head.tp_backward.value_s) == (
        3 * 2 * 3 / 4 * 4 * S * B,
        2 * 3 / 4 * BOUNDARY,
    )


@pytest.mark.slow
@given(names=st.sets(st.sampled_from(OPERATORS)), sharding=st.sampled_from([WHOLE, TP4, TP4_SP]))
def test_recompute_adds_exactly_the_forward_of_the_operators_it_names(names, sharding):
    operators = price_operators(GPT.block, sharding, MACHINE, TRAINING)
    plain, time = operators.time(), operators.time(names)

    assert (time.forward_s, time.backward_s) == (plain.forward_s, plain.backward_s)
    compute_s = sum(
        operator_time(GPT.block.operator(name), sharding, MACHINE, TRAINING).forward.value_s
        for name in names
    )
    reduces = sum(operators.tensor_parallel[name].forward.value_s for name in names)
    assert time.recompute_s == pytest.approx(compute_s + reduces, rel=1e-12)
    assert time.total_s - plain.total_s == pytest.approx(time.recompute_s, rel=1e-9, abs=1e-15)
