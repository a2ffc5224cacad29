"""The collectives that a prediction counts are those of the price and of the textbooks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from parplan.costmodels.communication.collectives import Collective, collective_time
from parplan.costmodels.communication.mesh import Mesh, place_axis
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy
from parplan.costmodels.usage.rank_traffic import (
    MESSAGE,
    SentBytes,
    Tally,
    forward_moves,
    layer_moves,
    rank_tally,
    rank_traffic,
)
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.models.towers import Projection, Tower
from parplan.profiles.stack import NEUTRAL
from tests.helpers.executor_plans import CLUSTER, GPT, LLAMA

TRAINING = TrainingSpec(global_batch_size=8, seq_length=16, stack=NEUTRAL)
MACHINE = machine_for(CLUSTER)


def price_cache(model=LLAMA, training=TRAINING) -> PriceCache:
    return PriceCache(model, training, MACHINE)


def strategy(
    model, *, pp=1, dp=1, tp=1, zero=0, virtual_stages=1, schedule=Schedule.ONE_F_ONE_B
) -> Strategy:
    layout = ParallelLayout(
        mesh=Mesh(pp=pp, dp=dp, tp=tp),
        schedule=schedule,
        virtual_stages=virtual_stages,
        micro_batch_size=2,
        num_micro_batches=4,
        sequence_parallel=False,
    )
    layers = [
        LayerChoice(kind, (), zero)
        for kind in (LayerKind.EMBEDDING, *[LayerKind.BLOCK] * model.num_layers, LayerKind.HEAD)
    ]
    size = len(layers) // layout.num_virtual_stages
    cuts = [layers[k * size : (k + 1) * size] for k in range(layout.num_virtual_stages - 1)]
    return Strategy(layout=layout, stages=(*map(tuple, cuts), tuple(layers[len(cuts) * size :])))


def counts(sent: tuple[SentBytes, ...]) -> dict[tuple[str, str], int]:
    return {(message.axis, message.kind): message.calls for message in sent}


@pytest.mark.parametrize(
    "sharding",
    [Sharding(2), Sharding(2, sequence_parallel=True)],
    ids=["megatron", "sequence-parallel"],
)
@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_the_forward_collectives_take_as_long_as_the_price_of_the_layer_says(model, sharding):
    priced = price_cache(model)
    for layer in priced.graph(2):
        actual = [
            move
            for operator in layer.operators
            for move in forward_moves(layer, operator, sharding, priced.training)
        ]
        where = place_axis(2, 1, 2, CLUSTER.gpus_per_node)
        seconds = math.fsum(
            collective_time(move.collective, move.num_bytes, where, MACHINE).value_s
            for move in actual
        )

        assert actual
        assert seconds == pytest.approx(
            priced.layer_time(layer.kind, 2, sharding).tp_forward.value_s, rel=1e-12
        )


@pytest.mark.parametrize(
    ("sp", "expected"),
    [
        pytest.param(False, {Collective.ALL_REDUCE: 4}, id="megatron-all-reduces-twice-each-way"),
        # twice each way the layer's input is gathered and its output scattered; inputs are gathered
        # again for their weight gradients
        pytest.param(
            True, {Collective.ALL_GATHER: 6, Collective.REDUCE_SCATTER: 4}, id="sequence-parallel"
        ),
    ],
)
def test_a_megatron_block_sends_what_korthikanti_says(sp, expected):
    block = price_cache().graph(2).block
    collected = list(
        layer_moves(block, Sharding(2, sequence_parallel=sp), (), price_cache().training)
    )

    assert {
        kind: sum(move.collective is kind for move in collected)
        for kind in {move.collective for move in collected}
    } == expected
    assert {move.num_bytes for move in collected} == {2 * 16 * LLAMA.hidden_size * 2}


def test_recomputed_operators_send_their_forward_collectives_again():
    block, sharding = price_cache().graph(2).block, Sharding(2)
    training = price_cache().training
    everything = tuple(operator.name for operator in block.operators)

    once = len(list(layer_moves(block, sharding, (), training)))
    repeated = len(list(layer_moves(block, sharding, everything, training)))

    assert (
        repeated - once
        == sum(
            len(list(forward_moves(block, operator, sharding, training)))
            for operator in block.operators
        )
        == 2
    )


@pytest.mark.parametrize(
    ("zero", "gathers", "scatters", "reduces"),
    [(0, 0, 0, 1), (1, 1, 1, 0), (2, 1, 4, 0), (3, 8, 4, 0)],
)
def test_a_step_of_four_micro_batches_sends_what_its_zero_stage_says(
    zero, gathers, scatters, reduces
):
    layers = LLAMA.num_layers + 2
    sent = rank_traffic(strategy(LLAMA, dp=2, zero=zero), 0, price_cache())
    expected = {
        Collective.ALL_GATHER: gathers,
        Collective.REDUCE_SCATTER: scatters,
        Collective.ALL_REDUCE: reduces,
    }

    assert counts(sent) == {
        ("dp", kind): count * layers for kind, count in expected.items() if count
    }
    num_parameters = price_cache().graph(1).num_parameters
    for message in sent:
        width = 2 if message.kind == Collective.ALL_GATHER else 4  # bf16 parameters, fp32 gradients
        assert message.num_bytes == message.calls // layers * width * num_parameters


def test_every_stage_receives_an_activation_and_a_gradient_but_for_the_ends():
    plan = strategy(LLAMA, pp=2, virtual_stages=3, schedule=Schedule.INTERLEAVED)

    first = counts(rank_traffic(plan, 0, price_cache()))["pp", MESSAGE]
    last = counts(rank_traffic(plan, 1, price_cache()))["pp", MESSAGE]

    assert (
        first == last == 4 * (3 + 2)
    )  # chunk 0 of rank 0 receives no activation, the last chunk no gradient


def test_a_cut_inside_a_tower_sends_its_tensor_and_the_embedding_s():
    tower = Tower(
        num_layers=2,
        hidden_size=96,
        num_heads=4,
        ffn_hidden_size=256,
        patches=8,
        patch_features=588,
        projector=(Projection(width=LLAMA.hidden_size),),
    )
    seen = replace(LLAMA, tower=tower)
    cache = price_cache(seen)
    choices = [LayerChoice(key, (), 0) for key in cache.keys(0, cache.num_layers)]
    layout = strategy(LLAMA, pp=2).layout

    def sent(cut):
        plan = Strategy(layout=layout, stages=(tuple(choices[:cut]), tuple(choices[cut:])))
        return {
            (each.calls, each.num_bytes // each.calls)
            for each in rank_tally(plan, 0, cache).by_size()
            if each.kind == MESSAGE
        }

    text, image = 2 * 2 * 16 * LLAMA.hidden_size, 2 * 2 * 8 * 96  # of micro-batches of 2, in bf16
    assert sent(2) == sent(4) == {(4, text), (4, image)}  # gradients that the first rank receives
    assert sent(1) == sent(5) == {(4, text)}


def test_a_tied_embedding_is_reduced_once_between_the_ends():
    sent = rank_traffic(strategy(GPT, pp=2), 0, price_cache(GPT))

    assert (
        SentBytes("pp", Collective.ALL_REDUCE, 1, 4 * GPT.padded_vocab_size * GPT.hidden_size)
        in sent
    )


def test_one_rank_sends_nothing():
    assert rank_traffic(strategy(GPT), 0, price_cache(GPT)) == ()


def test_partitioned_transfers_send_a_part_and_gather_it():
    training = replace(TRAINING, stack=replace(TRAINING.stack, partitioned_transfers=True))
    plan = strategy(LLAMA, pp=2, tp=2)

    whole, parted = (
        {(s.axis, s.kind): s.num_bytes for s in rank_traffic(plan, 0, price_cache(training=t))}
        for t in (TRAINING, training)
    )

    assert parted["pp", MESSAGE] * 2 == whole["pp", MESSAGE]
    assert (
        parted["tp", Collective.ALL_GATHER]
        == whole.get(("tp", Collective.ALL_GATHER), 0) + whole["pp", MESSAGE]
    )


def test_a_tally_adds_calls_and_bytes_by_axis_and_kind():
    tally = Tally()
    tally.add("tp", "all_reduce", 8, 3)
    tally.add("tp", "all_reduce", 4)
    tally.add("dp", "all_gather", 2)
    tally.add("dp", "all_to_all", 2, 0)

    assert tally.total() == (
        SentBytes("dp", "all_gather", 1, 2),
        SentBytes("tp", "all_reduce", 4, 28),
    )
