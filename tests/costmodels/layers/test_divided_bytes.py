"""The memory model's saved bytes follow the executor's rule, for random divisions and recompute."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from parplan.costmodels.layers.recompute import saved_bytes
from parplan.costmodels.operators.plan_placements import placements
from parplan.costmodels.operators.sharding import Sharding
from parplan.planner.layer_options.layer_problem import layer_problem
from parplan.planner.plan.plan import OperatorPlacement
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.stack import NEUTRAL, AttentionKernel
from tests.helpers.divided_bytes import divided_saved_bytes

MACHINE = machine_for(with_gpus(load_cluster("a100-80gb"), 8))
GPT = load_model("gpt-tiny").spec
MODELS = {
    "gpt": GPT,
    "gpt-no-dropout": replace(GPT, dropout=0.0),
    "neox": replace(GPT, parallel_residual=True, dropout=0.0),
    "llama": load_model("llama3-8b").spec,
}


@pytest.mark.parametrize("sharding", [Sharding(2), Sharding(4, True)], ids=["tp2", "tp4-sp"])
@pytest.mark.parametrize("kernel", list(AttentionKernel))
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_random_layer_plan_keeps_what_the_executor_keeps(model, kernel, sharding):
    training = TrainingSpec(global_batch_size=8, seq_length=256, attention=kernel, stack=NEUTRAL)
    layer, draw = build_graph(model, training, 4).block, random.Random(0)
    problem = layer_problem(layer, sharding, MACHINE, training)
    incoming = ("Shard(1)@tp",) if sharding.sequence_parallel else ()
    for _ in range(100):
        options = [draw.choice(option) for option in problem.options]
        divided = replace(
            sharding,
            own=tuple(
                (name, option.splits) for name, option in zip(problem.names, options, strict=True)
            ),
        )
        recomputed = tuple(
            name for name, option in zip(problem.names, options, strict=True) if option.recomputed
        )
        placed = {operator.name: placements(operator, divided) for operator in layer.operators}
        in_plan = {
            name: OperatorPlacement(
                parameters=placement.parameters, input=placement.input, output=placement.output
            )
            for name, placement in placed.items()
        }

        assert saved_bytes(layer, divided, recomputed) == divided_saved_bytes(
            layer, in_plan, sharding.tp, recomputed, incoming
        )
