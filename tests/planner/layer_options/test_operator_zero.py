"""With a ZeRO stage for every operator, the program and the walk equal brute force."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.operators.sharding import Sharding
from parplan.planner.layer_options.layer_front import layer_fronts
from parplan.planner.layer_options.layer_problem import layer_problem
from parplan.planner.layer_options.layer_program import LayerProgram, evaluate
from parplan.planner.request import SolverName
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerKind, layer_class
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.stack import Stack
from tests.helpers.cases import mostly_slow
from tests.helpers.operator_zero import OperatorZero, with_states_held

STAGES = (0, 1, 2, 3)
MACHINE = machine_for(with_gpus(load_cluster("a100-80gb"), 4))
GPT, LLAMA = load_model("gpt-tiny").spec, load_model("llama3-8b").spec
MODELS = (GPT, replace(GPT, dropout=0.0), replace(GPT, parallel_residual=True), LLAMA)
SEEDS = mostly_slow(range(10), {0, 1, 2, 3})
STASHES = 2.0


@cache
def instance(seed):
    """Returns 3 or 4 operators of a random block on a 2x2 mesh of data and tensor, with stages."""
    draw = random.Random(seed)
    training = TrainingSpec(
        global_batch_size=8,
        seq_length=draw.choice((128, 1024)),
        stack=Stack(host_operator_s=0.0),
        overlap_grad_reduce=draw.random() < 0.5,
    )
    sharding = Sharding(2, draw.random() < 0.5)
    operators = build_graph(draw.choice(MODELS), training, 2).block.operators
    count = draw.randint(3, 4)
    first = draw.randint(0, len(operators) - count)
    layer = layer_class(LayerKind.BLOCK, operators[first : first + count])
    zero = OperatorZero(layer, Mesh(pp=1, dp=2, tp=2), (2,), 2, MACHINE, training)
    problem = layer_problem(layer, sharding, MACHINE, training)
    # stages are added to a few strategies of each operator
    kept = {
        name: draw.sample(options, min(2, len(options)))
        for name, options in zip(problem.names, problem.options, strict=True)
    }
    return zero.added_to(problem.only(lambda name, option: option in kept[name]), STAGES)


@cache
def everything(seed):
    problem = instance(seed)
    return evaluate(problem, np.array(list(np.ndindex(*map(len, problem.options)))))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_fastest_layer_within_a_budget_is_that_of_brute_force(seed):
    sizes = sorted(layer.memory_bytes(STASHES) for layer in everything(seed))
    for budget in (sizes[0], sizes[len(sizes) // 4], sizes[-1]):
        budget *= 1 + 1e-6
        best_s = min(
            layer.time_s for layer in everything(seed) if layer.memory_bytes(STASHES) <= budget
        )

        fastest = LayerProgram(instance(seed), STASHES).fastest(budget, SolverName.CBC)

        assert fastest.proven
        assert fastest.time_s == pytest.approx(best_s, rel=1e-6)
        assert fastest.memory_bytes(STASHES) <= budget * (1 + 1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_leanest_layer_within_a_time_is_that_of_brute_force(seed):
    times = sorted(layer.time_s for layer in everything(seed))
    for slowest_s in (times[0], times[len(times) // 4], times[-1]):
        slowest_s *= 1 + 1e-6
        least = min(
            layer.memory_bytes(STASHES) for layer in everything(seed) if layer.time_s <= slowest_s
        )

        leanest = LayerProgram(instance(seed), STASHES).leanest(slowest_s, SolverName.HIGHS)

        assert leanest.memory_bytes(STASHES) == pytest.approx(least, rel=1e-6)
        assert leanest.time_s <= slowest_s * (1 + 1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_walk_finds_the_front_of_brute_force_over_all_lasting_bytes(seed):
    problem = instance(seed)

    def held(layer):
        return layer.state_bytes + STASHES * layer.saved_bytes

    front = evaluate(problem, layer_fronts(with_states_held(problem, STASHES))[0])

    for layer in everything(seed):
        assert any(
            each.time_s <= layer.time_s * (1 + 1e-12) and held(each) <= held(layer) * (1 + 1e-12)
            for each in front
        )


def test_stages_of_several_operators_are_chosen_apart():
    chosen = {
        tuple(option.zero for option in layer.options if option.zero is not None)
        for seed in range(4)
        for layer in (
            LayerProgram(instance(seed), STASHES).fastest(
                sorted(each.memory_bytes(STASHES) for each in everything(seed))[
                    len(everything(seed)) // 4
                ],
                SolverName.HIGHS,
            ),
        )
    }

    assert any(len(set(stages)) > 1 for stages in chosen)
