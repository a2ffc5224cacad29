"""The layer program prices options like the layer, and its optimum equals brute force."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from benchmarks.search.formulations import StrategyPairs
from parplan.costmodels.layers.layer_price import StageAxes, price_operators
from parplan.costmodels.layers.operator_price import operator_price
from parplan.costmodels.layers.recompute import saved_bytes, workspace_bytes
from parplan.costmodels.layers.tensor_flow import shared_beside_a_copy
from parplan.costmodels.operators.sharding import Sharding
from parplan.planner.layer_options.layer_front import layer_fronts, least_times_s
from parplan.planner.layer_options.layer_problem import LayerStrategies, layer_problem
from parplan.planner.layer_options.layer_program import LayerProgram, evaluate
from parplan.planner.request import SolverName
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack, with_gpus
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerKind, layer_class
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.stack import AttentionKernel, ContextForm, Stack
from tests.helpers.cases import mostly_slow, named

MACHINE = machine_for(with_gpus(load_cluster("a100-80gb"), 16))
NO_HOST = Stack(host_operator_s=0.0)  # the host's launch time bounds the whole layer
TRAINING = TrainingSpec(global_batch_size=8, seq_length=256, stack=NO_HOST)
GPT, LLAMA = load_model("gpt-tiny").spec, load_model("llama3-8b").spec
NEOX = replace(GPT, parallel_residual=True, dropout=0.0)
MIXTRAL = load_model("mixtral-tiny").spec
OLMO = load_model("olmo-2-7b").spec
MODELS = {"gpt": GPT, "gpt-no-dropout": replace(GPT, dropout=0.0), "neox": NEOX, "llama": LLAMA}
SHARDINGS = {
    "one": Sharding(),
    "tp2": Sharding(2),
    "tp2-sp": Sharding(2, True),
    "tp4-sp": Sharding(4, True),
    "2x2": Sharding(4, False, (), (2, 2)),
    "2x2-sp": Sharding(4, True, (), (2, 2)),
    "dp2-tp2": Sharding(2, data=2),
    "dp2-tp2-sp": Sharding(2, True, data=2),
}
SEEDS = mostly_slow(range(12), {1, 3, 4})
HOST_S = 20e-6  # as long as some of these operators


def drawn(problem, draw):
    """Returns a row of random layers for `evaluate`: the number of each operator's option."""
    return np.array([[draw.randrange(len(options)) for options in problem.options]])


def sharding_of(problem, options, sharding):
    return replace(
        sharding,
        own=tuple(
            (name, option.splits) for name, option in zip(problem.names, options, strict=True)
        ),
    )


@pytest.mark.parametrize("kernel", list(AttentionKernel))
@pytest.mark.parametrize("sharding", named(SHARDINGS, {"one", "tp4-sp", "dp2-tp2-sp"}))
@pytest.mark.parametrize("model", named(MODELS, {"gpt", "llama"}))
def test_options_add_up_to_the_price_of_the_layer(model, sharding, kernel):
    training = replace(
        TRAINING, attention=kernel, stack=replace(load_stack("megatron-core"), host_operator_s=0.0)
    )
    layer = build_graph(model, training, 4).block
    problem, draw = layer_problem(layer, sharding, MACHINE, training), random.Random(0)
    for _ in range(12):
        rows = drawn(problem, draw)
        (evaluated,) = evaluate(problem, rows)
        options = evaluated.options
        shardings, recomputed = (
            sharding_of(problem, options, sharding),
            tuple(n for n, o in zip(problem.names, options, strict=True) if o.recomputed),
        )

        priced = price_operators(layer, shardings, MACHINE, training).time(recomputed)
        assert evaluated.time_s == pytest.approx(priced.total_s, rel=1e-12)
        slow = replace(problem, host_forward_s=HOST_S, host_backward_s=HOST_S)
        slow_training = replace(training, stack=replace(training.stack, host_operator_s=HOST_S))
        launched = price_operators(layer, shardings, MACHINE, slow_training).time(recomputed)
        assert evaluate(slow, rows)[0].launched_s == pytest.approx(launched.total_s, rel=1e-12)
        exact = saved_bytes(layer, shardings, recomputed, training.stack)
        assert evaluated.saved_bytes <= exact
        if not shared_beside_a_copy(layer, shardings):
            assert evaluated.saved_bytes == exact
            assert evaluated.workspace_bytes == pytest.approx(
                workspace_bytes(layer, shardings, recomputed, training.stack), abs=1
            )


@pytest.mark.parametrize(
    "sharding",
    [
        Sharding(ep=4),
        Sharding(2, True, ep=4),
        Sharding(2, True, ep=2, etp=2),
        Sharding(2, True, ep=2, cp=2, context_form=ContextForm.ALL_GATHER),
    ],
    ids=str,
)
@pytest.mark.parametrize("overlaps", [False, True])
def test_options_of_a_block_of_experts_add_up_to_its_price(sharding, overlaps):
    """The divisions of attention and norms, and recompute, are free beside those of the experts."""
    training = replace(TRAINING, stack=replace(NO_HOST, overlap_exchanges=overlaps))
    part = sharding.part
    layer = build_graph(MIXTRAL, training, 4, cp=part.cp, exchanged=part.exchanged).block
    problem = layer_problem(layer, sharding, MACHINE, training).only(
        lambda name, option: (
            not layer.operator(name).in_mixture
            or option.splits == sharding.splits(layer.operator(name))
        )
    )
    draw = random.Random(0)
    for _ in range(12):
        (evaluated,) = evaluate(problem, drawn(problem, draw))
        recomputed = tuple(
            n for n, o in zip(problem.names, evaluated.options, strict=True) if o.recomputed
        )
        divided = sharding_of(problem, evaluated.options, sharding)

        priced = price_operators(layer, divided, MACHINE, training).time(recomputed)
        assert evaluated.time_s == pytest.approx(priced.total_s, rel=1e-12)
        exact = saved_bytes(layer, divided, recomputed, training.stack)
        assert evaluated.saved_bytes <= exact
        if not shared_beside_a_copy(layer, divided):
            assert evaluated.saved_bytes == exact


@cache
def drawn_layer(seed):
    """Returns 2 to 5 operators of a random block on a mesh of 2 or 4 ranks, with a few strategies.

    With an odd seed the axes are dp 2 x tp 2.
    """
    draw = random.Random(seed)
    model = draw.choice(list(MODELS.values()))
    training = replace(
        TRAINING, seq_length=draw.choice((128, 1024)), attention=draw.choice(list(AttentionKernel))
    )
    degrees = draw.choice(((2,), (2, 2)))
    sharding = Sharding(
        2 ** len(degrees), draw.random() < 0.5, (), degrees if len(degrees) > 1 else ()
    )
    if seed % 2:
        sharding = Sharding(2, sharding.sequence_parallel, data=2)
    operators = build_graph(model, training, draw.choice((2, 4))).block.operators
    count = draw.randint(2, 5)
    first = draw.randint(0, len(operators) - count)
    layer = layer_class(LayerKind.BLOCK, operators[first : first + count])
    problem = layer_problem(layer, sharding, MACHINE, training)
    return with_few(problem, draw), layer, sharding, training


def with_few(problem, draw):
    """Returns a problem of which brute force can price every layer."""
    few = {2: 12, 3: 8, 4: 5, 5: 4}[len(problem.options)]
    kept = {
        name: draw.sample(options, min(few, len(options)))
        for name, options in zip(problem.names, problem.options, strict=True)
    }
    return problem.only(lambda name, option: option in kept[name])


def instance(seed):
    return drawn_layer(seed)[0]


@cache
def everything(seed):
    problem = instance(seed)
    return evaluate(problem, np.array(list(np.ndindex(*map(len, problem.options)))))


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_the_fastest_layer_within_a_budget_is_that_of_brute_force(seed):
    stashes = 1 + seed % 3
    sizes = sorted(solution.memory_bytes(stashes) for solution in everything(seed))
    for budget in (sizes[0], sizes[len(sizes) // 4], sizes[-1]):
        budget *= 1 + 1e-6
        best_s = min(
            solution.time_s
            for solution in everything(seed)
            if solution.memory_bytes(stashes) <= budget
        )

        by_placement = LayerProgram(instance(seed), stashes).fastest(budget, SolverName.CBC)
        by_strategy = StrategyPairs(instance(seed), stashes).fastest(budget, SolverName.CBC)

        for solution in (by_placement, by_strategy):
            assert solution.proven
            assert solution.time_s == pytest.approx(best_s, rel=1e-6)
            assert solution.memory_bytes(stashes) <= budget * (1 + 1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_leanest_layer_within_a_time_is_that_of_brute_force(seed):
    times = sorted(solution.time_s for solution in everything(seed))
    for slowest_s in (times[0], times[len(times) // 4], times[-1]):
        slowest_s *= 1 + 1e-6
        least = min(
            solution.memory_bytes(2.0)
            for solution in everything(seed)
            if solution.time_s <= slowest_s
        )

        by_placement = LayerProgram(instance(seed), 2.0).leanest(slowest_s, SolverName.HIGHS)
        by_strategy = StrategyPairs(instance(seed), 2.0).leanest(slowest_s, SolverName.HIGHS)

        for solution in (by_placement, by_strategy):
            assert solution.memory_bytes(2.0) == pytest.approx(least, rel=1e-6)
            assert solution.time_s <= slowest_s * (1 + 1e-6)


def of_attention(seed):
    """Returns the operators of attention that read tensors which norms over all heads save too."""
    draw = random.Random(seed)
    sharding = draw.choice((Sharding(2), Sharding(2, True), Sharding(4, True)))
    operators = build_graph(OLMO, TRAINING, 2).block.operators[: draw.randint(3, 5)]
    layer = layer_class(LayerKind.BLOCK, operators)
    problem = layer_problem(layer, sharding, MACHINE, TRAINING)
    return with_few(problem, draw), layer, sharding, TRAINING


def points_of(layers, problem, layer, sharding, training):
    """Returns the seconds of layers, and the bytes that an estimate says they save."""
    return [
        (
            each.time_s,
            saved_bytes(
                layer,
                sharding_of(problem, each.options, sharding),
                [n for n, o in zip(problem.names, each.options, strict=True) if o.recomputed],
                training.stack,
            ),
        )
        for each in layers
    ]


@pytest.mark.parametrize(
    ("draw", "seed"),
    mostly_slow(
        itertools.product((drawn_layer, of_attention), range(50)),
        [(drawn_layer, 1), (drawn_layer, 3), (of_attention, 1), (of_attention, 2)],
    ),
)
def test_the_front_is_that_of_brute_force(draw, seed):
    problem, *layer = draw(seed)
    every = np.array(list(np.ndindex(*map(len, problem.options))))
    points = set(points_of(evaluate(problem, every), problem, *layer))

    front = points_of(evaluate(problem, layer_fronts(problem)[0]), problem, *layer)

    for time_s, saved in points:
        assert any(other_s <= time_s * (1 + 1e-12) and other <= saved for other_s, other in front)
    for before, after in itertools.pairwise(front):
        assert before[0] <= after[0]
        assert before[1] > after[1]
    assert least_times_s(problem)[0] == pytest.approx(front[0][0], rel=1e-12)


@pytest.mark.parametrize(
    "sharding",
    named({"one": Sharding(), "tp4": Sharding(4), "tp4-sp": Sharding(4, True)}, {"tp4-sp"}),
)
@pytest.mark.parametrize("solver", mostly_slow(SolverName, {SolverName.HIGHS}))
def test_the_front_of_a_whole_block_is_that_of_the_integer_program(solver, sharding):
    """At every third point of the front, no program with as few saved bytes is faster."""
    training = replace(TRAINING, seq_length=2048)
    problem = layer_problem(
        build_graph(load_model("gpt-20b").spec, training, 4).block, sharding, MACHINE, training
    )
    kept_only = replace(
        problem,
        costs=tuple(
            replace(
                costs,
                gradient_bytes=0 * costs.gradient_bytes,
                state_bytes=0 * costs.state_bytes,
                whole_bytes=0 * costs.whole_bytes,
            )
            for costs in problem.costs
        ),
        links=tuple(
            replace(link, costs=replace(link.costs, whole_bytes=0 * link.costs.whole_bytes))
            for link in problem.links
        ),
    )
    for point in evaluate(problem, layer_fronts(problem)[0][::3]):
        fastest = LayerProgram(kept_only).fastest(point.saved_bytes * (1 + 1e-9), solver)

        assert fastest.time_s == pytest.approx(point.time_s, rel=1e-6)


def test_an_operator_without_a_strategy_leaves_nothing():
    problem = instance(0).only(lambda name, option: name != instance(0).names[0])

    assert len(layer_fronts(problem)[0]) == 0
    assert least_times_s(problem) == [None]
    assert LayerProgram(problem).fastest(1e15, SolverName.CBC) is None


@pytest.mark.slow
@pytest.mark.parametrize("sharding", named(SHARDINGS, {"one"}))
@pytest.mark.parametrize("model", named(MODELS, {"llama"}))
def test_all_micro_batch_sizes_at_once_have_the_prices_of_each(model, sharding):
    """Size 3 forbids splits of the batch that the others allow."""
    sizes = tuple(sharding.data * size for size in (1, 2, 3, 4, 8))
    layers = [build_graph(model, TRAINING, size).block for size in sizes]
    inside = StageAxes(sharding.degrees, MACHINE, TRAINING)

    strategies = LayerStrategies(layers, inside, TRAINING, over_data=sharding.data > 1)
    together = strategies.problems(sharding)

    for layer, found in zip(layers, together, strict=True):
        alone = layer_problem(layer, sharding, MACHINE, TRAINING)
        assert [set(options) for options in found.options] == [set(o) for o in alone.options]
        numbers = [
            [options.index(option) for option in mine]
            for mine, options in zip(alone.options, found.options, strict=True)
        ]
        draw = random.Random(0)
        for _ in range(20):
            row = drawn(alone, draw)
            moved = np.array([[n[k] for n, k in zip(numbers, row[0].tolist(), strict=True)]])
            (expected,), (priced,) = evaluate(alone, row), evaluate(found, moved)
            assert priced.options == expected.options
            for name in ("time_s", "state_bytes", "saved_bytes", "workspace_bytes", "launched_s"):
                assert getattr(priced, name) == pytest.approx(getattr(expected, name), rel=1e-12)


@pytest.mark.parametrize("sharding", named(SHARDINGS, {"one", "tp4-sp"}))
def test_an_array_of_prices_has_the_price_of_each_strategy(sharding):
    """The formulas are the same for numbers and for arrays."""
    layers = [build_graph(MODELS["gpt"], TRAINING, size).block for size in (2, 4)]
    inside = StageAxes(sharding.degrees, MACHINE, TRAINING)
    problems = LayerStrategies(layers, inside, TRAINING).problems(sharding)
    for layer, problem in zip(layers, problems, strict=True):
        for operator, options, costs in zip(
            layer.operators, problem.options, problem.costs, strict=True
        ):
            for option, cost in zip(options, costs.listed(), strict=True):
                price = operator_price(operator, option.splits, inside, TRAINING)
                assert cost.forward_s == pytest.approx(price.forward_s, rel=1e-12)
                assert cost.backward_s == pytest.approx(price.backward_s, rel=1e-12)
                assert cost.whole_bytes == price.saved_bytes
                assert cost.gradient_bytes == price.temporary_bytes
                assert cost.state_bytes == price.states.total
