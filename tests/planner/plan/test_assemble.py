"""From a priced strategy to the Plan: layer plans, stages, units, and parts that add up."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.model_states import StateBytes
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.memory.rank_memory import RankMemory
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.step import RankTime, price_step
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy
from parplan.planner.objective import Objective
from parplan.planner.plan.assemble import _stage_memory, assemble, runner_up
from parplan.planner.plan.plan import LayerRun, StagePlan
from parplan.planner.plan.prediction import (
    Band,
    Candidates,
    ErrorBand,
    SearchRecord,
    Status,
)
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.provenance import Kind, Seconds
from parplan.profiles.stack import NEUTRAL
from parplan.profiles.units import GIB
from tests.helpers.cases import mostly_slow
from tests.helpers.instances import every_price, peak_bytes, random_instance, redundant_bytes

RECORD = SearchRecord(
    objective=Objective.THROUGHPUT,
    status=Status.ESTIMATE,
    value=1.0,
    bound=0.0,
    gap=1.0,
    fastest_step_time_s=1.0,
    candidates=Candidates(considered=1, pruned=0, solved=1, left=0),
)
TRAINING = TrainingSpec(global_batch_size=8, seq_length=128, stack=NEUTRAL)
EMBEDDING = LayerChoice(LayerKind.EMBEDDING, Recompute.NONE, 1)
HEAD = LayerChoice(LayerKind.HEAD, Recompute.NONE, 1)
NONE = LayerChoice(LayerKind.BLOCK, Recompute.NONE, 1)
SELECTIVE = LayerChoice(LayerKind.BLOCK, Recompute.SELECTIVE, 1)
FULL = LayerChoice(LayerKind.BLOCK, Recompute.FULL, 1)


def assembled(stages, *, pp=2, dp=2, tp=1, v=1, sequence_parallel=False):
    num_layers = sum(choice.kind is LayerKind.BLOCK for stage in stages for choice in stage)
    model = replace(load_model("gpt-tiny").spec, num_layers=num_layers)
    price_cache = PriceCache(
        model, TRAINING, machine_for(with_gpus(load_cluster("a100-80gb"), pp * dp * tp))
    )
    layout = ParallelLayout(
        mesh=Mesh(pp=pp, dp=dp, tp=tp),
        schedule=Schedule.INTERLEAVED if v > 1 else Schedule.ONE_F_ONE_B,
        virtual_stages=v,
        micro_batch_size=1,
        num_micro_batches=8 // dp,
        sequence_parallel=sequence_parallel,
    )
    strategy = Strategy(layout=layout, stages=stages)
    price = price_step(strategy, price_cache)
    return assemble(strategy, price, RECORD, price_cache), price


def test_layer_plans_are_named_in_order_of_use_and_runs_are_merged():
    plan, _ = assembled(((EMBEDDING, NONE, NONE, FULL), (FULL, SELECTIVE, NONE, HEAD)))

    assert list(plan.layer_plans) == ["embedding", "A", "B", "C", "head"]
    assert plan.stages == (
        StagePlan(
            rank=0,
            layers=(
                LayerRun(plan="embedding", first=0, last=0),
                LayerRun(plan="A", first=1, last=2),
                LayerRun(plan="B", first=3, last=3),
            ),
        ),
        StagePlan(
            rank=1,
            layers=(
                LayerRun(plan="B", first=4, last=4),
                LayerRun(plan="C", first=5, last=5),
                LayerRun(plan="A", first=6, last=6),
                LayerRun(plan="head", first=7, last=7),
            ),
        ),
    )
    assert plan.layer_plans["A"].recompute == ()
    assert plan.layer_plans["C"].recompute == ("norm1", "norm2", "activation")
    assert len(plan.layer_plans["B"].recompute) == 10


def test_virtual_stages_run_on_the_ranks_in_turn():
    plan, _ = assembled(((EMBEDDING, NONE), (NONE,), (NONE,), (NONE, HEAD)), v=2)

    assert [stage.rank for stage in plan.stages] == [0, 1, 0, 1]
    assert len(plan.predicted.memory_gib) == 2


def test_zero_is_written_only_where_there_is_data_parallelism():
    with_dp, _ = assembled(((EMBEDDING, NONE), (NONE, HEAD)))
    without, _ = assembled(((EMBEDDING, NONE), (NONE, HEAD)), dp=1)

    assert {layer.zero for layer in with_dp.layer_plans.values()} == {1}
    assert {layer.zero for layer in without.layer_plans.values()} == {0}


@pytest.mark.parametrize(
    ("sequence_parallel", "norm_output", "projection_output"),
    [
        pytest.param(False, (), (), id="replicated-between"),
        pytest.param(True, ("Shard(1)@tp",), ("Shard(1)@tp",), id="split-by-token-between"),
    ],
)
def test_operators_carry_megatrons_placements(sequence_parallel, norm_output, projection_output):
    plan, _ = assembled(
        ((EMBEDDING, NONE), (NONE, HEAD)), tp=2, sequence_parallel=sequence_parallel
    )
    operators = plan.layer_plans["A"].operators

    assert operators["qkv"].parameters == {"weight": ("Shard(0)@tp",), "bias": ("Shard(0)@tp",)}
    assert operators["attention_out"].parameters == {"weight": ("Shard(1)@tp",), "bias": ()}
    assert operators["qkv"].output == ("Shard(2)@tp",)
    assert operators["norm1"].output == norm_output
    assert operators["attention_out"].output == projection_output


def test_without_tensor_parallelism_there_are_no_placements():
    plan, _ = assembled(((EMBEDDING, NONE), (NONE, HEAD)))

    assert all(not layer.operators for layer in plan.layer_plans.values())


@pytest.mark.parametrize("seed", mostly_slow((0, 1, 4), {4}))
def test_the_parts_add_up_and_the_units_are_seconds_and_gib(seed):
    instance = random_instance(seed)
    price_cache = instance.price_cache()
    cluster = instance.cluster
    training = instance.training
    for strategy, price in every_price(instance)[::7]:
        predicted = assemble(strategy, price, RECORD, price_cache).predicted

        step_s, parts = predicted.step_time_s.value, predicted.breakdown
        assert step_s == pytest.approx(price.step_s, rel=1e-5)
        assert sum(getattr(parts, field.name).value for field in fields(parts)) == pytest.approx(
            step_s, rel=1e-4
        )
        assert predicted.tokens_per_s_per_gpu.value == pytest.approx(
            training.global_batch_size * training.seq_length / price.step_s / cluster.num_gpus,
            rel=1e-5,
        )
        for memory in predicted.memory_gib:
            classes = (
                "parameters",
                "gradients",
                "optimizer",
                "activations",
                "temporaries",
                "reserve",
            )
            assert memory.total == pytest.approx(
                sum(getattr(memory, name) for name in classes), abs=1e-3
            )
            assert memory.capacity == pytest.approx(cluster.device.memory_bytes / GIB, abs=1e-3)
        assert max(memory.total for memory in predicted.memory_gib) == pytest.approx(
            peak_bytes(price) / GIB, abs=1e-4
        )
        assert predicted.redundancy_gib.total == pytest.approx(
            redundant_bytes(strategy, price) / GIB, abs=1e-3
        )


def test_a_runner_up_has_the_figures_of_its_whole_plan():
    plan, price = assembled(((EMBEDDING, NONE), (NONE, FULL, HEAD)))
    layout = ParallelLayout(
        mesh=plan.mesh,
        schedule=plan.pipeline.schedule,
        virtual_stages=1,
        micro_batch_size=1,
        num_micro_batches=4,
        sequence_parallel=False,
    )
    line = runner_up(Strategy(layout=layout, stages=((EMBEDDING, NONE), (NONE, FULL, HEAD))), price)

    assert (line.mesh, line.pipeline) == (plan.mesh, plan.pipeline)
    assert line.step_time_s == plan.predicted.step_time_s
    assert line.peak_memory_gib == max(memory.total for memory in plan.predicted.memory_gib)
    assert line.redundancy_gib == plan.predicted.redundancy_gib.total


@pytest.mark.parametrize(
    ("factor", "inside"),
    [
        pytest.param(1.0, True, id="as-fast"),
        pytest.param(1.099, True, id="inside"),
        pytest.param(1.101, False, id="outside"),
        pytest.param(0.95, True, id="faster-under-the-memory-objective"),
    ],
)
def test_a_runner_up_is_marked_when_its_step_is_inside_the_error_band(factor, inside, monkeypatch):
    tenth = Band(share=0.1, rows=50, stack="all")
    monkeypatch.setattr(
        "parplan.planner.plan.assemble.error_band", lambda _: ErrorBand(time=tenth, memory=tenth)
    )
    monkeypatch.setattr("parplan.planner.plan.assemble.ratio_share", lambda *_: 0.1)
    stages = ((EMBEDDING, NONE, NONE, NONE, NONE, HEAD),)
    price_cache = PriceCache(
        load_model("gpt-tiny").spec, TRAINING, machine_for(with_gpus(load_cluster("a100-80gb"), 2))
    )
    layout = ParallelLayout(
        mesh=Mesh(pp=1, dp=2, tp=1),
        schedule=Schedule.ONE_F_ONE_B,
        virtual_stages=1,
        micro_batch_size=1,
        num_micro_batches=4,
        sequence_parallel=False,
    )
    strategy = Strategy(layout=layout, stages=stages)
    price = price_step(strategy, price_cache)
    slower = runner_up(strategy, price)
    slower = replace(
        slower, step_time_s=replace(slower.step_time_s, value=factor * slower.step_time_s.value)
    )

    plan = assemble(strategy, price, replace(RECORD, runners_up=(slower,)), price_cache)

    assert [runner.inside_error_band for runner in plan.search.runners_up] == [inside]


def test_a_step_is_only_as_certain_as_its_least_certain_rank():
    """The slowest rank is measured throughout and waits for one that is not."""
    stages = ((EMBEDDING, NONE, NONE, NONE), (NONE, HEAD))
    plan, price = assembled(stages)
    slowest = max(price.ranks, key=lambda rank: rank.total.value_s)
    measured = RankTime(
        **{
            field.name: Seconds(getattr(slowest, field.name).value_s, Kind.MEASURED)
            for field in fields(RankTime)
        }
    )
    mixed = replace(
        price, ranks=tuple(measured if rank is slowest else rank for rank in price.ranks)
    )
    layout = ParallelLayout(
        mesh=plan.mesh,
        schedule=plan.pipeline.schedule,
        virtual_stages=1,
        micro_batch_size=1,
        num_micro_batches=4,
        sequence_parallel=False,
    )
    price_cache = PriceCache(plan.model, TRAINING, machine_for(plan.cluster))

    predicted = assemble(
        Strategy(layout=layout, stages=stages), mixed, RECORD, price_cache
    ).predicted

    assert predicted.breakdown.compute_s.kind is Kind.MEASURED
    assert predicted.step_time_s.kind is predicted.breakdown.pp_bubble_s.kind is Kind.ANALYTIC


@pytest.mark.parametrize("apart", [0.0, 3.0, 8.0, 12.0])
def test_no_class_of_memory_is_below_zero_whatever_is_apart(apart):
    memory = RankMemory(
        states=StateBytes(parameters=1 * GIB, gradients=5 * GIB, optimizer=2 * GIB),
        activations=1.0 * GIB,
        temporaries=10.0 * GIB,
        allocator_reserve=0.0,
        communicators=0.0,
        context=0.0,
        apart=apart * GIB,
    )
    stage = _stage_memory(0, memory, 80 * GIB)
    classes = (
        stage.parameters,
        stage.gradients,
        stage.optimizer,
        stage.activations,
        stage.temporaries,
        stage.reserve,
    )

    assert min(classes) >= 0
    assert sum(classes) == pytest.approx(stage.total) == pytest.approx(19.0 - apart)
