"""Traced modules with the states of their shards in chunks train as in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from parplan.costmodels.chunks.chunk_operations import RankChunks
from parplan.costmodels.host.state_location import StateLocation
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.executor.checking.parity import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    OPTIONS,
    STEPS,
    gradient_errors,
    loss_errors,
    run_ranks,
)
from parplan.executor.rules.traced_rules import validate_traced_plan
from parplan.executor.traced.traced_parity import run_traced_plans, run_traced_reference
from parplan.executor.traced.traced_trainer import build_traced_trainer
from parplan.executor.training.training_states import make_optimizer_states, training_tensors
from parplan.planner.plan.plan_file import any_plan_from_document, plan_to_document
from parplan.planner.plan.traced_plan import TracedPlan
from parplan.planner.request import Constraints, PlanRequest
from parplan.planner.search.estimate import ChunkRequest
from parplan.planner.traced.estimate_traced import estimate_traced_plan
from parplan.planner.traced.plan_traced import traced_request
from parplan.planner.traced.stage_rules import StageRule, parse_stages
from parplan.planner.traced.traced_chunks import chunk_schedules, in_smallest_budget
from parplan.planner.traced.traced_strategy import PricedModule, reprice_traced
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack
from parplan.profiles.models.module_source import ModuleSource
from parplan.profiles.models.spec import Precision, TrainingSpec
from tests.helpers.traced_modules import HUGGING_FACE
from tests.helpers.traced_plans import hand_plan

MODULES = "tests.helpers.traced_modules"
UNLIKE = f"{MODULES}:unlike"
FUSED = "tests.helpers.divided_modules:gpt"


def made(
    module=UNLIKE,
    *,
    pp=1,
    dp=1,
    tp=1,
    num_micro_batches=2,
    host=2,
    optimizer=1,
    recompute=Recompute.NONE,
    stages="",
    virtual_stages=1,
    precision=Precision.FP32,
) -> PricedModule:
    """Returns a plan in the smallest budget, with the last `host` shards of a rank on the host."""
    is_factory = isinstance(module, str)
    source = ModuleSource(factory=module) if is_factory else ModuleSource(huggingface=module)
    request = traced_request(
        PlanRequest(
            model=source,
            cluster=replace(load_cluster("cpu"), nodes=1, gpus_per_node=pp * dp * tp),
            training=TrainingSpec(
                global_batch_size=dp * num_micro_batches,
                seq_length=16,
                precision=precision,
                stack=load_stack("parplan"),
            ),
            constraints=Constraints(
                pp=(pp,),
                dp=(dp,),
                tp=(tp,),
                micro_batch_size=(1,),
                virtual_stages=(virtual_stages,),
                schedule=(_schedule(pp, virtual_stages, num_micro_batches),),
                zero=(0,),
                recompute=(recompute,),
                offload=(),
            ),
        )
    )
    rule = parse_stages(stages) if stages else StageRule()
    chunks = ChunkRequest(host_blocks=host, optimizer_blocks=optimizer)
    plan = estimate_traced_plan(request, rule, chunks=chunks)
    return in_smallest_budget(plan, request.model)


def _schedule(pp: int, virtual_stages: int, num_micro_batches: int) -> Schedule:
    if virtual_stages > 1:
        return Schedule.INTERLEAVED
    return Schedule.ONE_F_ONE_B if pp <= num_micro_batches else Schedule.GPIPE


def host_bytes(plan: TracedPlan, schedules: Sequence[RankChunks] = ()) -> tuple[int, int]:
    """Returns the pipeline rank of this process, and the host bytes of its chunks."""
    trainer = build_traced_trainer(plan, OPTIONS, torch.device("cpu"), schedules=schedules)
    return trainer.ranks.coordinate("pp"), trainer.on_host_bytes


def check(priced: PricedModule) -> None:
    plan, schedules = priced.plan, chunk_schedules(priced)
    (actual,) = run_traced_plans([plan], schedules)
    expected = run_traced_reference(plan, by_micro_batch=True)

    assert actual.agree
    assert max(loss_errors(actual, expected)) <= LOSS_TOLERANCE
    assert max(gradient_errors(actual, expected).values()) <= GRADIENT_TOLERANCE
    assert actual.norms == pytest.approx(expected.norms, rel=1e-5)
    assert all(predicted == measured for predicted, measured in actual.states.values())
    assert len(actual.moved) == plan.mesh.num_ranks
    for moved in actual.moved.values():
        for name in ("in_bytes", "out_bytes", "gathered_bytes", "reduced_bytes"):
            assert getattr(moved, name).predicted == getattr(moved, name).measured
        assert moved.device_bytes.measured <= moved.device_bytes.predicted


@pytest.mark.multiproc
def test_unlike_shards_on_device_and_host_train_as_in_one_process():
    priced = made(dp=2, num_micro_batches=2)
    homes = {each.home for stage in priced.plan.stages for each in stage.homes}

    assert homes == set(StateLocation)
    assert len({shard.parameters for shard in priced.plan.shards}) > 2
    check(priced)


@pytest.mark.slow
@pytest.mark.multiproc
def test_chunks_compute_what_zero_3_does_to_the_rounding_of_the_norm():
    priced = made(dp=2)
    stages = tuple(replace(stage, homes=()) for stage in priced.plan.stages)
    plain = replace(priced.plan, chunks=None, stages=stages)

    (in_chunks,) = run_traced_plans([priced.plan], chunk_schedules(priced))
    (sharded,) = run_traced_plans([plain])

    assert in_chunks.losses[0] == sharded.losses[0]
    assert in_chunks.losses == pytest.approx(sharded.losses, rel=1e-6)
    assert in_chunks.norms == pytest.approx(sharded.norms, rel=1e-6)


@pytest.mark.slow
@pytest.mark.multiproc
def test_the_hosts_hold_the_predicted_bytes():
    priced = made(pp=2, dp=2)
    train = partial(host_bytes, schedules=chunk_schedules(priced))
    (results,) = run_ranks([priced.plan], train)

    assert len(results) == 4
    for rank, measured in results:
        assert measured == priced.price.memory[rank].host > 0


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("module", "options"),
    [
        pytest.param(UNLIKE, {"num_micro_batches": 1}, id="one micro-batch"),
        pytest.param(UNLIKE, {"pp": 2, "dp": 2, "num_micro_batches": 2}, id="1f1b"),
        pytest.param(UNLIKE, {"pp": 2, "dp": 2, "num_micro_batches": 1}, id="gpipe of one"),
        pytest.param(
            UNLIKE,
            {"pp": 2, "virtual_stages": 2, "recompute": Recompute.FULL, "host": 9},
            id="interleaved, all recomputed, all on the host",
        ),
        pytest.param(HUGGING_FACE["t5"], {"pp": 2, "dp": 2, "host": 1}, id="t5"),
        pytest.param(HUGGING_FACE["bert"], {"dp": 2, "tp": 2}, id="bert, tp"),
        pytest.param(FUSED, {"dp": 2, "tp": 2}, id="fused matrices, tp"),
        pytest.param(f"{MODULES}:unet", {"dp": 2, "host": 0, "optimizer": 9}, id="unet"),
    ],
)
def test_modules_in_chunks_train_as_in_one_process(module, options):
    check(made(module, **options))


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_checkpoint_of_fused_matrices_in_chunks_is_read_without_chunks_and_tp(tmp_path):
    priced = made(FUSED, dp=2, tp=2, num_micro_batches=2)
    schedules = chunk_schedules(priced)
    whole = hand_plan(FUSED, num_micro_batches=4)

    after = [
        run_ranks([plan], partial(went_on, folder=tmp_path, number=number, schedules=of_chunks))[0]
        for number, (plan, of_chunks) in enumerate(
            ((priced.plan, schedules), (whole, ()), (priced.plan, schedules))
        )
    ]

    first, *others = after[0]
    assert all(each == first for each in others)
    for losses in (*after[1], *after[2]):
        assert losses == pytest.approx(first, rel=LOSS_TOLERANCE)


def went_on(
    plan: TracedPlan, folder: Path, number: int, schedules: Sequence[RankChunks]
) -> list[float]:
    """Trains, or loads what world `number` - 1 has saved; saves, and returns the next losses."""
    trainer = build_traced_trainer(plan, OPTIONS, torch.device("cpu"), schedules=schedules)
    make_optimizer_states(trainer.optimizer)
    states = training_tensors(trainer.held().own, trainer.optimizer, trainer.strips)
    if trainer.adam is not None:
        states = {part: states[part] | more for part, more in trainer.adam.tensors().items()}
    if number:
        dcp.load(states, checkpoint_id=folder / f"{number - 1}")
        if trainer.adam is not None:
            trainer.adam.settle()
    else:
        list(trainer.run())
    dcp.save(states, checkpoint_id=folder / f"{number}")
    losses = []
    for step in (STEPS, STEPS + 1):
        losses.append(trainer.gradients(step).item())
        trainer.update(step)
    return losses


@pytest.fixture(scope="module")
def priced() -> PricedModule:
    return made(dp=2)


def test_the_plan_file_keeps_chunks_and_homes(priced):
    document = plan_to_document(priced.plan)

    again = any_plan_from_document(document, "plan.yaml")

    assert again == priced.plan
    assert document["chunks"]["groups"]


def test_a_plan_priced_again_is_the_same(priced):
    request = traced_request(
        PlanRequest(
            model=priced.plan.module, cluster=priced.plan.cluster, training=priced.plan.training
        )
    )

    again = reprice_traced(priced.plan, request.model)

    assert again.plan == priced.plan
    assert chunk_schedules(again) == chunk_schedules(priced)


def test_chunks_without_homes_and_homes_that_shards_do_not_have_are_errors(priced):
    plan = priced.plan
    bare = tuple(replace(stage, homes=()) for stage in plan.stages)
    with pytest.raises(ConfigError, match="chunks and the homes of shards are there together"):
        replace(plan, stages=bare)
    (stage,) = plan.stages
    fewer = replace(stage, homes=stage.homes[1:])
    with pytest.raises(ConfigError, match="homes for the shards"):
        reprice_traced(replace(plan, stages=(fewer,)), priced.price_cache.sharded.model)


def test_chunks_of_another_size_are_an_error(priced):
    plan = priced.plan
    first, *rest = plan.chunks.groups
    groups = (replace(first, num_chunks=first.num_chunks + 2), *rest)
    wrong = replace(plan, chunks=replace(plan.chunks, groups=groups))

    with pytest.raises(ConfigError, match=r"chunks\.groups: stage 0"):
        reprice_traced(wrong, priced.price_cache.sharded.model)


def test_a_plan_with_chunks_that_cannot_run_is_refused(priced):
    plan = priced.plan
    (stage,) = plan.stages
    (rank,) = plan.chunks.ranks
    small = replace(rank, device_bytes=rank.smallest_bytes - 1)
    for wrong, message in (
        (replace(plan, stages=(replace(stage, zero=0),)), "zero 0 of a stage with chunks"),
        (replace(plan, chunks=replace(plan.chunks, ranks=(small,))), "it needs"),
        (
            replace(plan, pipeline=replace(plan.pipeline, schedule=Schedule.EARLY_RECOMPUTE)),
            "recomputes shards in chunks ahead",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            validate_traced_plan(wrong)


@pytest.mark.multiproc
def test_parameters_that_are_not_trained_do_not_lie_in_chunks():
    frozen = made(f"{MODULES}:frozen")

    with pytest.raises(ConfigError, match=r"up\.3\.weight is not trained"):
        run_traced_plans([frozen.plan], chunk_schedules(frozen))
