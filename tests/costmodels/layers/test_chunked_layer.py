"""Costs of a chunked block by location: bytes against sums written here, seconds against rates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.host.state_location import ChunkCommunication, StateLocation
from parplan.costmodels.layers.chunked_layer import (
    Chunking,
    group_collectives,
    state_widths,
    writes_over_parameters,
)
from parplan.costmodels.layers.model_states import owned_parameters
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.price_cache import PriceCache
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import Precision, TrainingSpec
from parplan.profiles.stack import NEUTRAL

HALF = TrainingSpec(
    global_batch_size=8,
    seq_length=1024,
    precision=Precision.FP16,
    gradient_precision=Precision.FP16,
    stack=NEUTRAL,
)
MIXED = replace(HALF, gradient_precision=Precision.FP32)
FULL = replace(MIXED, precision=Precision.FP32)


def price_cache(training: TrainingSpec = HALF, gpus: int = 4) -> PriceCache:
    cluster = with_gpus(load_cluster("v100-32gb"), gpus)
    return PriceCache(load_model("gpt-1.5b").spec, training, machine_for(cluster))


# EQUATIONS O2: 14 bytes a parameter where gradients take the place of parameters, 16 with gradients
# of 16 bits, 18 of 32; fp32: 16
@pytest.mark.parametrize(
    ("training", "in_parameters", "expected"),
    [
        pytest.param(HALF, True, 14, id="in-parameters"),
        pytest.param(HALF, False, 16, id="16-bit-gradients"),
        pytest.param(MIXED, False, 18, id="fp32-gradients"),
        pytest.param(FULL, False, 16, id="fp32"),
    ],
)
def test_a_parameter_at_one_place_takes_14_16_or_18_bytes(training, in_parameters, expected):
    for home, place in ((StateLocation.DEVICE, 0), (StateLocation.HOST, 1)):
        widths = state_widths(home, training, in_parameters)

        assert widths[place].total == expected
        assert widths[1 - place].total == 0


@pytest.mark.parametrize(
    ("training", "in_parameters", "device", "host"),
    [
        pytest.param(HALF, True, 2, 14, id="in-parameters"),
        pytest.param(HALF, False, 4, 14, id="16-bit-gradients"),
        pytest.param(MIXED, False, 6, 16, id="fp32-gradients"),
        pytest.param(FULL, False, 8, 16, id="fp32"),
    ],
)
def test_an_optimizer_home_has_parameters_and_gradients_here_and_all_that_an_update_reads_there(
    training, in_parameters, device, host
):
    here, there = state_widths(StateLocation.OPTIMIZER, training, in_parameters)

    assert (here.total, there.total) == (device, host)


def test_gradients_take_the_place_of_parameters_only_in_16_bits_with_one_micro_batch():
    assert writes_over_parameters(HALF, 1)
    assert not any(
        (
            writes_over_parameters(HALF, 2),
            writes_over_parameters(MIXED, 1),
            writes_over_parameters(FULL, 1),
        )
    )


def test_a_host_block_moves_its_share_of_parameters_in_and_of_gradients_out():
    prices, mesh = price_cache(MIXED), Mesh(pp=1, dp=4, tp=1)
    elements = owned_parameters(prices.layer(LayerKind.BLOCK, 1), Sharding())
    cost = prices.chunked(
        LayerKind.BLOCK, StateLocation.HOST, 1, mesh, Sharding(), in_parameters=False
    )

    rank_elements = -(-elements // 4)
    assert (cost.fetched_bytes, cost.sent_bytes, cost.returned_bytes, cost.left_bytes) == (
        2 * rank_elements,
        4 * rank_elements,
        0,
        0,
    )
    assert cost.fetch_s == pytest.approx(2 * rank_elements / 7.875e9)
    assert cost.send_s == pytest.approx(
        4 * rank_elements / 7.875e9
    )  # the first four of eight GPUs share two uplinks: half a lane each
    assert (cost.gathered_bytes, cost.reduced_bytes, cost.used_bytes) == (
        2 * elements,
        4 * elements,
        2 * elements,
    )


def test_an_optimizer_block_moves_once_a_step_and_a_device_block_never():
    prices, mesh = price_cache(HALF), Mesh(pp=1, dp=4, tp=1)
    rank_elements = -(-owned_parameters(prices.layer(LayerKind.BLOCK, 1), Sharding()) // 4)
    once = prices.chunked(
        LayerKind.BLOCK, StateLocation.OPTIMIZER, 1, mesh, Sharding(), in_parameters=True
    )
    never = prices.chunked(
        LayerKind.BLOCK, StateLocation.DEVICE, 1, mesh, Sharding(), in_parameters=True
    )

    assert (once.fetched_bytes, once.sent_bytes, once.returned_bytes, once.left_bytes) == (
        0,
        0,
        2 * rank_elements,
        2 * rank_elements,
    )
    assert not any(
        (
            never.fetched_bytes,
            never.sent_bytes,
            never.returned_bytes,
            never.left_bytes,
            never.host_adam_s,
        )
    )
    assert once.host_adam_s > never.device_adam_s > once.device_adam_s == 0


def test_padding_is_moved_gathered_and_updated_like_everything_else():
    prices, mesh = price_cache(), Mesh(pp=1, dp=4, tp=1)
    tight, padded = (
        prices.chunked(
            LayerKind.BLOCK,
            StateLocation.HOST,
            1,
            mesh,
            Sharding(),
            in_parameters=False,
            elements=elements,
        )
        for elements in (10**7, 2 * 10**7)
    )

    assert padded.host.total == 2 * tight.host.total
    assert padded.gathered_bytes == 2 * tight.gathered_bytes
    assert padded.fetch_s == pytest.approx(2 * tight.fetch_s)
    assert padded.host_adam_s == pytest.approx(2 * tight.host_adam_s)


def test_one_rank_gathers_nothing_and_uses_a_device_block_where_it_lies():
    prices, mesh = price_cache(gpus=1), Mesh(pp=1, dp=1, tp=1)
    costs = {
        home: prices.chunked(LayerKind.BLOCK, home, 1, mesh, Sharding(), in_parameters=False)
        for home in StateLocation
    }

    assert all(
        cost.forward_s == cost.backward_s == cost.gathered_bytes == 0 for cost in costs.values()
    )
    assert costs[StateLocation.DEVICE].used_bytes == 0
    assert costs[StateLocation.HOST].used_bytes == costs[StateLocation.HOST].fetched_bytes


def test_one_chunk_after_the_other_is_broadcast_in_twice_the_bytes_and_smaller_messages():
    cache, mesh, elements = price_cache(MIXED), Mesh(pp=1, dp=4, tp=1), 4 * 10**6
    machine = cache.machine
    prices = {"in_parameters": False}
    gather, reduce = group_collectives(elements, mesh, machine, MIXED, **prices)

    single = group_collectives(
        elements, mesh, machine, MIXED, **prices, communication=ChunkCommunication.SINGLE
    )

    chunk_gather, chunk_reduce = group_collectives(elements // 4, mesh, machine, MIXED, **prices)
    assert single[0].value_s == pytest.approx(2 * 4 * chunk_gather.value_s)
    assert single[1].value_s == pytest.approx(4 * chunk_reduce.value_s)
    assert single[0].value_s > 2 * gather.value_s
    assert single[1].value_s > reduce.value_s
    nothing = Mesh(pp=1, dp=1, tp=1)
    for communication in ChunkCommunication:
        both = group_collectives(
            elements, nothing, machine, MIXED, **prices, communication=communication
        )
        assert [each.value_s for each in both] == [0.0, 0.0]


@pytest.mark.parametrize("training", [HALF, MIXED])
def test_no_reduction_of_single_chunks_is_hidden(training):
    cache, mesh = price_cache(training), Mesh(pp=1, dp=4, tp=1)
    single = cache.within(Chunking(communication=ChunkCommunication.SINGLE))
    where = LayerKind.BLOCK, StateLocation.HOST, 1, mesh, Sharding(tp=1)

    group, alone = (each.chunked(*where, in_parameters=False) for each in (cache, single))

    reduce = group_collectives(
        owned_parameters(cache.layer(LayerKind.BLOCK, 1), Sharding(tp=1)),
        mesh,
        cache.machine,
        training,
        in_parameters=False,
        communication=ChunkCommunication.SINGLE,
    )[1]
    assert alone.backward_s >= reduce.value_s
    assert alone.backward_s > group.backward_s
    assert alone.forward_s >= group.forward_s
    assert (alone.gathered_bytes, alone.reduced_bytes) == (
        group.gathered_bytes,
        group.reduced_bytes,
    )
