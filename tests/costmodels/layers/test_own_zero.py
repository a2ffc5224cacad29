"""Prices of a layer whose operators have several ZeRO stages: groups, their window, their bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.communication.hiding import CONTENTION
from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.data_parallel import DataParallelMoves, exposed_moves
from parplan.costmodels.layers.layer_price import ENDLESS, UNHIDING
from parplan.costmodels.layers.model_states import (
    StateBytes,
    StateSharding,
    operator_states,
    stage_groups,
    zero_buffer_bytes,
)
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.price_cache import PriceCache
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.provenance import ZERO, Kind, Seconds
from parplan.profiles.stack import NEUTRAL

MODEL = load_model("gpt-tiny").spec
OVERLAPPED = TrainingSpec(global_batch_size=8, seq_length=128, stack=NEUTRAL)
EXPOSED = replace(OVERLAPPED, overlap_grad_reduce=False)
MACHINE = machine_for(with_gpus(load_cluster("a100-80gb"), 16))
MESH = Mesh(pp=1, dp=8, tp=1)
OWN = (("fc1", 3), ("fc2", 3), ("qkv", 2))
STAGES = {"norm1": 1, "qkv": 2, "attention_out": 1, "norm2": 1, "fc1": 3, "fc2": 3}


def cache_of(training=EXPOSED):
    return PriceCache(MODEL, training, MACHINE)


def moves(gather_s, reduce_s):
    return DataParallelMoves(
        inside=ZERO,
        optimizer=ZERO,
        gather=Seconds(gather_s, Kind.ANALYTIC),
        reduce=Seconds(reduce_s, Kind.ANALYTIC),
    )


def of_groups(*groups, time, training=OVERLAPPED):
    priced = exposed_moves(
        [(zero, moves(*each)) for zero, *each in groups], time, MACHINE, training
    )
    return priced.forward.value_s, priced.backward.value_s, priced.step.value_s


def test_operators_of_one_stage_are_one_group():
    block = cache_of().graph(1).block

    assert stage_groups(block, 1, OWN) == (
        (1, frozenset({"norm1", "attention_out", "norm2"})),
        (2, frozenset({"qkv"})),
        (3, frozenset({"fc1", "fc2"})),
    )
    assert stage_groups(block, 1, (("attention", 3),)) == stage_groups(block, 1, ())


def test_the_states_are_those_of_every_operator_at_its_stage():
    price_cache = cache_of()

    held = price_cache.states(LayerKind.BLOCK, MESH, Sharding(), 1, OWN)

    expected = StateBytes()
    for operator in price_cache.graph(1).block.operators:
        zero = STAGES.get(operator.name, 1)
        expected += operator_states(operator, Sharding(), StateSharding(zero, 8), EXPOSED)
    assert held.states == expected
    assert held.ideal == price_cache.states(LayerKind.BLOCK, MESH, Sharding(), 1).ideal


def test_groups_of_the_backward_pass_have_buffers_together_and_the_others_after_it():
    price_cache = cache_of()
    sizes = {
        operator.name: Sharding().parameter_elements(operator)
        for operator in price_cache.graph(1).block.operators
    }

    held = price_cache.states(LayerKind.BLOCK, MESH, Sharding(), 1, OWN)

    by_stage = {
        stage: zero_buffer_bytes(
            sum(sizes[name] for name, its in STAGES.items() if its == stage), stage, 8, EXPOSED
        )
        for stage in (1, 2, 3)
    }
    assert dict(held.buffers) == by_stage
    assert held.zero_buffer == max(by_stage[1], by_stage[2] + by_stage[3])
    assert held.gathered_bytes == by_stage[3] / 2
    assert held.reduced_bytes == by_stage[2] / 2 + by_stage[3] / 4
    assert held.reduced_after_bytes == by_stage[1]
    whole = price_cache.states(LayerKind.BLOCK, MESH, Sharding(), 3)
    assert held.zero_buffer < whole.zero_buffer


@pytest.mark.parametrize("training", [EXPOSED, OVERLAPPED])
def test_communication_without_a_window_is_that_of_each_group(training):
    forward_s, backward_s, step_s = of_groups(
        (1, 1.0, 2.0), (2, 4.0, 8.0), (3, 16.0, 32.0), time=UNHIDING, training=training
    )

    assert (forward_s, backward_s, step_s) == (16.0, 8.0 + 16.0 + 32.0, 1.0 + 2.0 + 4.0)


def test_groups_share_what_a_pass_hides():
    window = Seconds(10.0, Kind.ANALYTIC)
    time = replace(UNHIDING, forward=window, backward=window)

    def exposed(sent_s, window_s=10.0):
        hidden_s = min(sent_s, window_s)
        return sent_s - hidden_s + CONTENTION * hidden_s

    forward_s, backward_s, step_s = of_groups((1, 6.0, 7.0), (3, 3.0, 5.0), time=time)

    assert forward_s == pytest.approx(exposed(3.0))
    assert backward_s == pytest.approx(exposed(3.0 + 5.0))
    # the gather and the reduction of the step have what is left of both windows
    assert step_s == pytest.approx(exposed(6.0, 10.0 - 3.0) + exposed(7.0, 10.0 - 8.0))
    assert forward_s + backward_s + step_s == pytest.approx(
        exposed(3.0 + 6.0) + exposed(3.0 + 5.0 + 7.0)
    )
    assert of_groups((1, 6.0, 7.0), (3, 3.0, 5.0), time=ENDLESS)[2] == pytest.approx(
        CONTENTION * 13.0
    )


def test_half_of_the_communication_of_two_blocks_hides_better_than_all_of_one():
    """A reason for stages by operator: a window that one block does not use is lost to another."""
    window = Seconds(10.0, Kind.ANALYTIC)
    time = replace(UNHIDING, forward=window, backward=window)

    both = 2 * sum(of_groups((2, 2.0, 2.0), (3, 6.0, 2.0), time=time))
    one_of_two = sum(of_groups((2, 8.0, 4.0), time=time)) + sum(of_groups((3, 8.0, 4.0), time=time))

    assert both < one_of_two


@pytest.mark.parametrize("zero", range(4))
def test_operators_named_at_the_layers_stage_change_nothing(zero):
    price_cache = cache_of(OVERLAPPED)
    own_zero = tuple((name, zero) for name in STAGES)
    plain = price_cache.data_parallel(LayerKind.BLOCK, 2, MESH, Sharding(), zero)

    assert price_cache.data_parallel(LayerKind.BLOCK, 2, MESH, Sharding(), 0, own_zero) == plain
    assert price_cache.states(LayerKind.BLOCK, MESH, Sharding(), 0, own_zero) == price_cache.states(
        LayerKind.BLOCK, MESH, Sharding(), zero
    )
