"""Baselines divide experts and sequences as their systems do, and never beat our plan."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from parplan.costmodels.communication.mesh import Mesh, illegal_expert_parallel
from parplan.costmodels.layers.context_parallel import illegal_context
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.step import StepPrice, price_step
from parplan.costmodels.strategy import ParallelLayout, Strategy
from parplan.planner.baselines.systems import baseline_strategies
from parplan.planner.launchers.compare_described import compare
from parplan.planner.request import SearchOptions
from parplan.planner.search.estimate import uniform_strategy
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack, with_gpus
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import ModelSpec, TrainingSpec
from parplan.profiles.stack import ContextForm
from tests.helpers.cases import named
from tests.helpers.planning import find_plan

Parts = tuple[ModelSpec, Cluster, TrainingSpec]
EXPERTS = ("qwen3-moe-tiny", 4, 4)
FEW_SEQUENCES = ("qwen3-moe-tiny", 4, 2)  # fewer than GPUs, so that sequences are divided
UNLIKE = ("deepseek-tiny", 4, 4)


def parts(model: str, gpus: int, batch: int, stack: str = "megatron-core") -> Parts:
    entry = load_model(model)
    training = TrainingSpec(
        global_batch_size=batch, seq_length=entry.seq_length, stack=load_stack(stack)
    )
    return entry.spec, with_gpus(load_cluster("a100-80gb"), gpus), training


def every_mesh(
    model: ModelSpec, cluster: Cluster, forms: tuple[ContextForm, ...]
) -> Iterator[Mesh]:
    """Yields every mesh whose degrees divide what they divide."""
    gpus = cluster.num_gpus
    degrees = [degree for degree in range(1, gpus + 1) if gpus % degree == 0]
    for pp, cp, tp, ep in itertools.product(degrees, repeat=4):
        etps = {1, tp}
        for etp, form in itertools.product(etps, forms if cp > 1 else (None,)):
            if gpus % (pp * cp * tp) or gpus // pp % (ep * etp):
                continue
            mesh = Mesh(
                pp=pp, dp=gpus // (pp * cp * tp), cp=cp, tp=tp, ep=ep, etp=etp, context_form=form
            )
            if any(size % tp for _, size in model.tensor_parallel_sizes):
                continue
            if not (illegal_expert_parallel(mesh, model) or illegal_context(mesh, model, cluster)):
                yield mesh


def every_megatron_price(
    model: ModelSpec, cluster: Cluster, training: TrainingSpec
) -> Iterator[tuple[Mesh, StepPrice]]:
    """Yields Megatron-LM's strategies on equal stages with one model chunk, with their prices."""
    price_cache = PriceCache(model, training, machine_for(cluster))
    for mesh in every_mesh(model, cluster, tuple(ContextForm)):
        sequences, rest = divmod(training.global_batch_size, mesh.dp)
        if rest or model.num_layers % mesh.pp:
            continue
        blocks = [model.num_layers // mesh.pp] * mesh.pp
        for size, zero, level in itertools.product(range(1, sequences + 1), (0, 1), Recompute):
            if sequences % size == 0:
                layout = ParallelLayout(
                    mesh=mesh,
                    schedule=Schedule.ONE_F_ONE_B,
                    virtual_stages=1,
                    micro_batch_size=size,
                    num_micro_batches=sequences // size,
                    sequence_parallel=mesh.tp > 1,  # experts need it
                )
                strategy = uniform_strategy(
                    layout, blocks, zero=zero, recompute=level, price_cache=price_cache
                )
                yield mesh, price_step(strategy, price_cache)


def spaces(name: str, case: tuple[str, int, int]) -> tuple[PriceCache, tuple[Strategy, ...]]:
    model, cluster, training = parts(*case)
    price_cache = PriceCache(model, training, machine_for(cluster))
    return price_cache, baseline_strategies(name, price_cache, float("inf"))


def blocks_of(strategy: Strategy) -> set[int]:
    """Returns the numbers of blocks of the stages."""
    return {
        sum(choice.kind.role is LayerKind.BLOCK for choice in stage) for stage in strategy.stages
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(EXPERTS, id="experts", marks=pytest.mark.slow),
        pytest.param(FEW_SEQUENCES, id="sequences"),
    ],
)
def test_the_megatron_optimum_equals_an_enumeration_of_ep_etp_and_cp(case):
    everything = [
        (mesh, price.step_s)
        for mesh, price in every_megatron_price(*parts(*case))
        if case == FEW_SEQUENCES or mesh.cp == 1
    ]

    price_cache, strategies = spaces("megatron-1f1b", case)
    equal = [strategy for strategy in strategies if len(blocks_of(strategy)) == 1]

    assert {mesh.ep for mesh, _ in everything} == {1, 2, 4}
    assert {mesh.etp for mesh, _ in everything} == {1, 2}
    assert {mesh.context_form for mesh, _ in everything} == (
        {None, *ContextForm} if case == FEW_SEQUENCES else {None}
    )
    assert {strategy.layout.mesh for strategy in equal} <= {mesh for mesh, _ in everything}
    assert min(price_step(strategy, price_cache).step_s for strategy in equal) == pytest.approx(
        min(step_s for _, step_s in everything), rel=1e-12
    )


@pytest.mark.parametrize("name", ["megatron-1f1b-2021", "merak"])
def test_systems_without_experts_and_context_parallelism_divide_neither(name):
    _, strategies = spaces(name, FEW_SEQUENCES)

    meshes = {strategy.layout.mesh for strategy in strategies}
    assert meshes
    assert {(mesh.ep, mesh.etp, mesh.cp) for mesh in meshes} == {(1, 1, 1)}


def test_deepspeed_divides_experts_over_dp_below_zero_3_and_sequences_by_heads_alone():
    _, strategies = spaces("deepspeed-3d", EXPERTS)
    of_experts = [each for each in strategies if each.layout.mesh.ep > 1]
    assert {each.layout.mesh.ep for each in of_experts} == {2, 4}
    assert all(each.layout.mesh.dp % each.layout.mesh.ep == 0 for each in of_experts)
    assert {each.stages[0][0].zero for each in of_experts} == {0, 1, 2}
    assert 3 in {each.stages[0][0].zero for each in strategies}

    _, strategies = spaces("deepspeed-3d", FEW_SEQUENCES)
    of_sequences = [each.layout.mesh for each in strategies if each.layout.mesh.cp > 1]
    assert {mesh.context_form for mesh in of_sequences} == {ContextForm.ALL_TO_ALL}
    assert {(mesh.pp, mesh.tp, mesh.ep) for mesh in of_sequences} == {(1, 1, 1)}


def test_torchtitan_shards_all_and_divides_experts_over_all_of_cp_and_tp_first():
    _, strategies = spaces("torchtitan", FEW_SEQUENCES)

    meshes = {each.layout.mesh for each in strategies}
    # All-gather waits as long as the ring on these links, and one of two equal forms is searched.
    assert {mesh.context_form for mesh in meshes} == {None, ContextForm.RING}
    assert {mesh.ep for mesh in meshes} == {1, 2, 4}
    for mesh in meshes:
        assert mesh.ep > 1 or mesh.etp == mesh.tp
        assert mesh.ep == 1 or mesh.ep * mesh.etp % (mesh.cp * mesh.tp) == 0
    assert {each.layout.schedule for each in strategies} == {
        Schedule.ONE_F_ONE_B,
        Schedule.INTERLEAVED,
        Schedule.ZBV,
    }
    assert all(each.layout.sequence_parallel == (each.layout.mesh.tp > 1) for each in strategies)
    assert {each.stages[0][0].zero for each in strategies} == {2, 3}


def test_fsdp_divides_long_sequences_and_nothing_else():
    _, strategies = spaces("fsdp", FEW_SEQUENCES)

    meshes = {each.layout.mesh for each in strategies}
    assert {(mesh.pp, mesh.tp, mesh.ep) for mesh in meshes} == {(1, 1, 1)}
    assert {(mesh.dp, mesh.cp) for mesh in meshes} == {(2, 2), (1, 4)}


CASES = {"experts": EXPERTS, "sequences": FEW_SEQUENCES, "unlike-blocks": UNLIKE}
SYSTEMS = (
    ("megatron-core", "megatron"),
    ("torchtitan", "torchtitan"),
    ("megatron-deepspeed", "deepspeed-3d"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stack", "name", "case"),
    named(
        {
            f"{case}-{stack}-{name}": (stack, name, parts)
            for case, parts in CASES.items()
            for stack, name in SYSTEMS
        },
        {
            "unlike-blocks-torchtitan-torchtitan",
        },
    ),
)
def test_our_plan_is_no_slower_than_a_baseline_of_its_stack(stack, name, case):
    plan = find_plan(*parts(*case, stack=stack))

    comparison = compare(plan, [name], SearchOptions())

    side = comparison.rows[0].side
    assert side is not None
    assert comparison.ours.step_s * (1 - plan.search.gap) <= side.step_s * (1 + 1e-6)
