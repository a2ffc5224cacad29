"""Seconds of an update: streamed bytes, Muon's products and exchanges, Adafactor's sums."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.communication.collectives import Collective, collective_time
from parplan.costmodels.communication.mesh import Mesh, place_axis
from parplan.costmodels.layers.model_states import StateSharding, held_states, local_parameters
from parplan.costmodels.layers.parameter_update import newton_schulz_time, update_time
from parplan.costmodels.operators.compute import kernel_time, optimizer_time
from parplan.costmodels.operators.kernels import FORWARD, product_kernel
from parplan.costmodels.operators.sharding import Sharding
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import Optimizer, TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.stack import NEUTRAL

TRAINING = TrainingSpec(global_batch_size=8, seq_length=128, stack=NEUTRAL)
MODEL = load_model("llama3-8b").spec
GRAPH = build_graph(MODEL, TRAINING, 1)
MACHINE = machine_for(with_gpus(load_cluster("a100-80gb"), 16))
# of a block: query, key and value in one; projection; gate and up in one; down
MATRICES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
VECTORS = 2 * 4096


def update(optimizer, *, dp=1, tp=1, zero=0, kind=LayerKind.BLOCK):
    parameters = local_parameters(GRAPH.layer_class(kind), Sharding(tp=tp))
    training = replace(TRAINING, optimizer=optimizer)
    mesh = Mesh(pp=1, dp=dp, tp=tp)
    return update_time(parameters, mesh, StateSharding(zero, dp), MACHINE, training).value_s


def elements():
    return sum(rows * columns for rows, columns in MATRICES)


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("kind", list(LayerKind))
def test_adam_is_one_pass_over_what_the_rank_owns(kind, zero):
    owned = local_parameters(GRAPH.layer_class(kind), Sharding()).owned(8 if zero else 1)

    assert update(Optimizer.ADAM, dp=8, zero=zero, kind=kind) == (
        optimizer_time(owned, MACHINE, TRAINING).value_s
    )


@pytest.mark.parametrize(
    ("optimizer", "moved"),
    [
        # gradient 4, values 8, 16-bit parameter 2: 14 bytes, and the moments read and written
        (Optimizer.SGD, lambda matrices, vectors: 14 * (matrices + vectors)),
        (Optimizer.SGD_MOMENTUM, lambda matrices, vectors: 22 * (matrices + vectors)),
        (
            Optimizer.ADAM_8BIT,  # rows are multiples of 256, so that a scale has 256 elements
            lambda matrices, vectors: (14 + 4 + 16 / 256) * matrices + 30 * vectors,
        ),
    ],
)
def test_elementwise_updates_stream_their_bytes(optimizer, moved):
    expected = optimizer_time(
        elements() + VECTORS, MACHINE, TRAINING, moved(elements(), VECTORS)
    ).value_s

    assert update(optimizer) == pytest.approx(expected, rel=1e-12)


def test_the_products_of_muon_are_five_times_three():
    short, long = 4096, 14336
    expected = sum(
        5 * kernel_time(product_kernel(FORWARD, sizes, 2, 2), MACHINE, TRAINING).value_s
        for sizes in ((short, short, long), (short, short, short), (short, long, short))
    )

    for shape in ((short, long), (long, short)):
        assert newton_schulz_time(*shape, MACHINE, TRAINING).value_s == pytest.approx(expected)


def test_muon_without_division_is_its_products_and_its_pass():
    products = sum(newton_schulz_time(*shape, MACHINE, TRAINING).value_s for shape in MATRICES)
    # 14, the momentum twice, and the bf16 momentum and update; Adam's moments for vectors
    moved = (14 + 8 + 4) * elements() + 30 * VECTORS
    streamed = optimizer_time(elements() + VECTORS, MACHINE, TRAINING, moved).value_s

    assert update(Optimizer.MUON) == pytest.approx(products + streamed, rel=1e-12)
    assert update(Optimizer.MUON, dp=8) == update(Optimizer.MUON)  # every rank does the same


def test_muon_under_zero_divides_the_products_and_exchanges_parts_twice():
    whole = sum(newton_schulz_time(*shape, MACHINE, TRAINING).value_s for shape in MATRICES)
    where = place_axis(8, 1, 8, MACHINE.cluster.gpus_per_node)
    sent = collective_time(Collective.ALL_TO_ALL, 2 * elements() // 8, where, MACHINE).value_s
    moved = ((14 + 8 + 4) * elements() + 30 * VECTORS) // 8
    streamed = optimizer_time((elements() + VECTORS) // 8, MACHINE, TRAINING, moved).value_s

    for zero in (1, 2, 3):
        assert update(Optimizer.MUON, dp=8, zero=zero) == pytest.approx(
            whole / 8 + 2 * sent + streamed, rel=1e-9
        )


def test_muon_under_tensor_parallelism_gathers_each_matrix_and_does_all_of_it():
    products = sum(newton_schulz_time(*shape, MACHINE, TRAINING).value_s for shape in MATRICES)
    where = place_axis(2, 1, 2, MACHINE.cluster.gpus_per_node)
    gathered = sum(
        collective_time(Collective.ALL_GATHER, 2 * rows * columns, where, MACHINE).value_s
        for rows, columns in MATRICES
    )
    moved = (14 + 8 + 4) * elements() // 2 + 30 * VECTORS
    streamed = optimizer_time(elements() // 2 + VECTORS, MACHINE, TRAINING, moved).value_s

    assert update(Optimizer.MUON, tp=2) == pytest.approx(products + gathered + streamed, rel=1e-9)


@pytest.mark.parametrize("kind", [LayerKind.EMBEDDING, LayerKind.HEAD])
@pytest.mark.parametrize(("dp", "tp", "zero"), [(1, 1, 0), (8, 1, 3), (1, 2, 0)])
def test_tables_have_adam_under_muon(kind, dp, tp, zero):
    ways = {"dp": dp, "tp": tp, "zero": zero, "kind": kind}

    assert update(Optimizer.MUON, **ways) == update(Optimizer.ADAM, **ways)


def test_adafactor_sums_factors_over_the_ranks_that_divide_a_matrix():
    alone = update(Optimizer.ADAFACTOR)
    # the four matrices have their rows over dp: the sums of 4096, 4096, 4096 and 14336 columns
    where = place_axis(8, 1, 8, MACHINE.cluster.gpus_per_node)
    summed = sum(
        collective_time(Collective.ALL_REDUCE, 4 * columns, where, MACHINE).value_s
        for _, columns in MATRICES
    )
    # gradient three times, values twice and written, 16-bit parameter, factors of r and c
    factors = sum(8 * (rows // 8 + columns) for rows, columns in MATRICES)
    moved = (14 + 12) * elements() // 8 + factors + (14 + 8) * VECTORS // 8
    streamed = optimizer_time((elements() + VECTORS) // 8, MACHINE, TRAINING, moved).value_s

    assert update(Optimizer.ADAFACTOR, dp=8, zero=1) == pytest.approx(streamed + summed, rel=1e-9)
    assert update(Optimizer.ADAFACTOR, dp=8) == alone


@pytest.mark.parametrize("optimizer", Optimizer)
def test_higher_zero_stages_never_hold_more(optimizer):
    training = replace(TRAINING, optimizer=optimizer)
    for kind in LayerKind:
        parameters = local_parameters(GRAPH.layer_class(kind), Sharding(tp=2)).each
        held = [
            held_states(parameters, StateSharding(zero, 8), training).total for zero in range(4)
        ]

        assert held == sorted(held, reverse=True)
