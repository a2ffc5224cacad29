"""Data parallelism and ZeRO: the bytes that each stage sends, and the parts that compute hides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.communication.collectives import Collective
from parplan.costmodels.communication.hiding import CONTENTION, contention, under
from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.data_parallel import (
    data_parallel_moves,
    exposed_moves,
    has_tied_head,
    shared_reduction,
)
from parplan.costmodels.layers.layer_price import price_operators
from parplan.costmodels.layers.model_states import StateSharding, local_parameters, owned_parameters
from parplan.costmodels.layers.recompute import Recompute, recompute_operators
from parplan.costmodels.operators.sharding import Sharding
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import Precision, TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.provenance import ZERO, Kind, Seconds
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


def priced(layer, sharding=WHOLE, training=TRAINING, recompute=()):
    return price_operators(layer, sharding, MACHINE, training).time(recompute)


def data_parallel_time(layer, time, *, mesh, sharding, states, machine, training):
    moves = data_parallel_moves(local_parameters(layer, sharding), mesh, states, machine, training)
    return exposed_moves([(states.zero, moves)], time, machine, training)


@pytest.mark.parametrize("kind", list(LayerKind))
def test_one_rank_communicates_exactly_nothing(kind):
    layer = GPT.layer_class(kind)
    time = priced(layer, recompute=recompute_operators(layer, Recompute.FULL))

    assert (time.tp_forward, time.tp_backward, time.tp_recompute) == (ZERO, ZERO, ZERO)
    for zero in range(4):
        data = data_parallel_time(
            layer,
            time,
            mesh=Mesh(pp=2, dp=1, tp=1),
            sharding=Sharding(),
            states=StateSharding(zero, 1),
            machine=MACHINE,
            training=TRAINING,
        )
        assert (data.forward, data.backward, data.step) == (ZERO, ZERO, ZERO)
        assert data.optimizer.value_s > 0


def data_parallel(zero, *, dp=4, tp=1, training=TRAINING, layer=GPT.block, machine=MACHINE):
    sharding = Sharding(tp)
    return data_parallel_time(
        layer,
        priced(layer, sharding, training),
        mesh=Mesh(pp=1, dp=dp, tp=tp),
        sharding=sharding,
        states=StateSharding(zero, dp),
        machine=machine,
        training=training,
    )


@pytest.mark.parametrize(
    ("zero", "forward", "backward", "step"),
    [
        # EQUATIONS T1 in units of (D - 1)/D x 2w, w local parameters, with 16-bit gradients
        pytest.param(0, 0, 0, 2, id="dp-all-reduces"),
        pytest.param(1, 0, 0, 1 + 1, id="zero-1-scatters-and-gathers-once-a-step"),
        pytest.param(2, 0, 1, 1, id="zero-2-scatters-every-micro-batch"),
        pytest.param(3, 1, 1 + 1, 0, id="zero-3-gathers-twice-and-scatters-every-micro-batch"),
    ],
)
@pytest.mark.parametrize("tp", [1, 2])
def test_zero_stages_move_the_bytes_of_the_schemes_table(
    volumes, zero, forward, backward, step, tp
):
    unit = 3 / 4 * 2 * owned_parameters(GPT.block, Sharding(tp))

    time = data_parallel(zero, tp=tp, training=BF16_GRADIENTS)

    assert (time.forward.value_s, time.backward.value_s, time.step.value_s) == pytest.approx(
        (forward * unit, backward * unit, step * unit)
    )


def test_fp32_gradients_double_the_reduction_but_not_the_gather(volumes):
    unit = 3 / 4 * 2 * owned_parameters(GPT.block, Sharding())

    assert data_parallel(0).step.value_s == pytest.approx(2 * 2 * unit)
    assert data_parallel(1).step.value_s == pytest.approx((2 + 1) * unit)
    assert data_parallel(3).backward.value_s == pytest.approx((1 + 2) * unit)


def test_overlap_hides_a_reduction_under_its_own_layers_backward_and_a_gather_under_its_forward(
    volumes,
):
    overlapped = replace(TRAINING, overlap_grad_reduce=True)
    time = priced(GPT.block)  # far below one second: what is hidden is the layer's own time
    plain, hidden = data_parallel(3), data_parallel(3, training=overlapped)

    assert plain.forward.value_s - hidden.forward.value_s == pytest.approx(
        (1 - CONTENTION) * time.forward_s
    )
    assert plain.backward.value_s - hidden.backward.value_s == pytest.approx(
        (1 - CONTENTION) * time.backward_s
    )


def test_communication_that_is_hidden_whole_still_costs_its_share_of_the_compute_units(monkeypatch):
    monkeypatch.setattr(
        "parplan.costmodels.layers.data_parallel.collective_time",
        lambda *_: Seconds(1e-9, Kind.ANALYTIC),
    )
    overlapped = replace(TRAINING, overlap_grad_reduce=True)

    assert data_parallel(3, training=overlapped).forward.value_s == pytest.approx(CONTENTION * 1e-9)
    assert data_parallel(3, training=TRAINING).forward.value_s == pytest.approx(1e-9)


def test_what_hidden_communication_costs_is_the_machines_own_where_it_was_measured(monkeypatch):
    monkeypatch.setattr(
        "parplan.costmodels.layers.data_parallel.collective_time",
        lambda *_: Seconds(1e-9, Kind.ANALYTIC),
    )
    machine = replace(MACHINE, profile=replace(MACHINE.profile, contention=0.55))
    overlapped = replace(TRAINING, overlap_grad_reduce=True)

    assert (contention(MACHINE), contention(machine)) == (CONTENTION, 0.55)
    assert data_parallel(3, training=overlapped, machine=machine).forward.value_s == pytest.approx(
        0.55e-9
    )
    assert under(Seconds(3.0, Kind.ANALYTIC), 2.0, machine).value_s == pytest.approx(
        1.0 + 0.55 * 2.0
    )
    assert (
        under(
            Seconds(3.0, Kind.ANALYTIC),
            2.0,
            replace(machine, profile=replace(machine.profile, contention=0.0)),
        ).value_s
        == 1.0
    )


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("dp", [2, 8, 16])
@pytest.mark.parametrize("graph", [GPT, LLAMA], ids=["gpt", "llama"])
def test_overlap_makes_nothing_slower_and_nothing_negative(zero, dp, graph):
    for layer in graph:
        plain = data_parallel(zero, dp=dp, layer=layer)
        hidden = data_parallel(
            zero, dp=dp, layer=layer, training=replace(TRAINING, overlap_grad_reduce=True)
        )

        for part in ("forward", "backward", "step", "optimizer"):
            assert 0 <= getattr(hidden, part).value_s <= getattr(plain, part).value_s


def test_the_optimizer_updates_only_the_shard_it_owns():
    whole, shard = (
        data_parallel(0, dp=16, layer=LLAMA.block),
        data_parallel(1, dp=16, layer=LLAMA.block),
    )

    assert shard.optimizer.value_s < whole.optimizer.value_s / 8


def test_a_tied_matrix_adds_to_the_reduction_only_where_it_is_a_copy(volumes):
    head = GPT.head
    time = priced(head)
    both = [
        data_parallel_time(
            head,
            time,
            mesh=Mesh(pp=2, dp=4, tp=1),
            sharding=Sharding(),
            states=StateSharding(0, 4, with_tied=tied),
            machine=MACHINE,
            training=TRAINING,
        )
        for tied in (True, False)
    ]

    assert has_tied_head(head)
    assert both[0].step.value_s - both[1].step.value_s == pytest.approx(2 * 3 / 4 * 4 * V * H)


def test_the_two_gradients_of_a_tied_embedding_are_reduced_between_two_ranks(volumes):
    reduction = shared_reduction(
        V * H // 2,
        2,
        mesh=Mesh(pp=4, dp=1, tp=2),
        machine=MACHINE,
        training=TRAINING,
    )

    assert volumes == [(Collective.ALL_REDUCE, 4 * V * H // 2)]
    assert reduction.value_s == 2 * 1 / 2 * 4 * V * H / 2
