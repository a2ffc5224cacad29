"""Redundant bytes: held bytes less one copy, by class, operator, layer, stage and cluster."""

from __future__ import annotations

import pytest

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.memory.rank_memory import rank_layers
from parplan.costmodels.operators.sharding import Sharding, Split
from parplan.costmodels.step import price_step
from parplan.costmodels.strategy import LayerChoice
from parplan.costmodels.usage.redundancy import (
    RedundantBytes,
    operator_redundancy,
    summed_redundancy,
)
from parplan.profiles.machines.machine_catalog import with_gpus
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.stack import NEUTRAL
from tests.helpers.planning import find_plan
from tests.helpers.uniform_strategies import A100, TINY, book_of, frame_of, uniform

A100_16 = with_gpus(A100, 16)
CLASSES = ("parameters", "gradients", "optimizer", "activations", "temporaries")
FRAMES = [
    pytest.param(frame_of(dp=4), 0, Recompute.NONE, id="dp-zero-0"),
    pytest.param(frame_of(pp=2, dp=2, tp=2), 1, Recompute.SELECTIVE, id="pp-dp-tp-zero-1"),
    pytest.param(
        frame_of(pp=4, dp=2, tp=2, sequence_parallel=True),
        3,
        Recompute.FULL,
        id="sequence-parallel-zero-3",
    ),
    pytest.param(frame_of(tp=4), 0, Recompute.FULL, id="tp"),
]


@pytest.mark.parametrize(("layout", "zero", "recompute"), FRAMES)
def test_summed_by_class_it_is_the_memory_less_the_ideal(layout, zero, recompute):
    """The ideal is worked out here.

    It is every state and every saved tensor once, over the devices that share them.
    """
    price_cache = book_of(TINY, layout.mesh.num_ranks)
    strategy = uniform(layout, 8, zero=zero, recompute=recompute)
    price = price_step(strategy, price_cache)
    for rank, (memory, redundant) in enumerate(zip(price.memory, price.redundant, strict=True)):
        parameters, kept = 0, 0.0
        for choice in rank_layers(strategy, rank):
            layer = price_cache.graph(layout.micro_batch_size).layer_class(choice.kind)
            parameters += sum(
                p.num_elements for op in layer.operators for p in op.parameters if not p.tied
            )
            stashes = min(layout.num_micro_batches, layout.mesh.pp - rank)
            kept += (
                stashes
                * price_cache.activations(
                    choice.kind, layout.micro_batch_size, Sharding(), choice.recompute
                ).saved
                / layout.mesh.tp
            )
        ideal = parameters * (4 + 12) / layout.mesh.ranks_per_stage + kept
        held = memory.states.total + memory.activations + memory.temporaries

        assert redundant.total == pytest.approx(held - ideal, rel=1e-9, abs=64)
        assert redundant.total == sum(getattr(redundant, name) for name in CLASSES)


@pytest.mark.parametrize(("layout", "zero", "recompute"), FRAMES)
def test_operators_and_layers_add_up_to_their_stage(layout, zero, recompute):
    price_cache = book_of(TINY, layout.mesh.num_ranks)
    strategy = uniform(layout, 8, zero=zero, recompute=recompute)
    for rank, redundant in enumerate(price_step(strategy, price_cache).redundant):
        layers = [
            summed_redundancy(operator_redundancy(choice, rank, layout, price_cache).values())
            for choice in rank_layers(strategy, rank)
        ]
        total = summed_redundancy(layers)

        for name in CLASSES[:-1]:
            assert getattr(total, name) == pytest.approx(getattr(redundant, name), rel=1e-9, abs=64)
        assert redundant.temporaries > 0


def test_the_classes_by_hand():
    """At ZeRO 0 one of two copies of everything in fc1 on two replicas is redundant.

    Divided over tp, none of its weight is.
    """
    price_cache, whole = book_of(TINY, 2), frame_of(dp=2)
    weight = price_cache.graph(1).block.operator("fc1").num_parameters

    twice = operator_redundancy(LayerChoice(LayerKind.BLOCK, (), 0), 0, whole, price_cache)["fc1"]
    shared = operator_redundancy(
        LayerChoice(LayerKind.BLOCK, (), 0), 0, frame_of(tp=2), book_of(TINY, 2)
    )["fc1"]

    assert twice.gradients == 4 * weight / 2
    assert twice.optimizer == 12 * weight / 2
    assert (
        twice.parameters == 2 * weight
    )  # the fp32 master is the one copy: every 16-bit copy is redundant
    assert shared.gradients == shared.optimizer == 0


def test_an_operator_that_is_not_divided_holds_its_weights_twice():
    layout, price_cache = frame_of(tp=2), book_of(TINY, 2)
    undivided = Sharding(2, own=(("fc1", (Split(),)),))
    megatron, whole = (
        operator_redundancy(LayerChoice(LayerKind.BLOCK, (), 0, sharding), 0, layout, price_cache)[
            "fc1"
        ]
        for sharding in (None, undivided)
    )

    assert megatron.optimizer == 0
    assert whole.optimizer == 12 * price_cache.graph(1).block.operator("fc1").num_parameters / 2


@pytest.mark.slow
def test_the_plan_holds_every_level_and_they_agree():
    training = TrainingSpec(global_batch_size=16, seq_length=128, stack=NEUTRAL)
    plan = find_plan(TINY, A100_16, training)

    actual, mesh = plan.predicted.redundancy_gib, plan.mesh
    assert len(actual.stages) == mesh.pp
    assert set(actual.layers) == set(plan.layer_plans)
    per_stage = mesh.dp * mesh.tp
    for name in (*CLASSES, "total"):
        assert getattr(actual, name) == pytest.approx(
            per_stage * sum(getattr(stage, name) for stage in actual.stages), abs=1e-3 * per_stage
        )
    for layer in actual.layers.values():
        for name in CLASSES[:-1]:
            assert getattr(layer.layer, name) == pytest.approx(
                sum(getattr(operator, name) for operator in layer.operators.values()), abs=2e-3
            )


def test_nothing_adds_up_to_nothing():
    assert summed_redundancy([]) == RedundantBytes()
