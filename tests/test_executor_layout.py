from __future__ import annotations

import dataclasses

import pytest

from costmodels.mesh import Mesh
from costmodels.schedules import Schedule
from executor.layout import local_stages, stage_layers, torchrun_line, validate
from executor.place import parse_placement
from planner.plan import LayerRun, StagePlan
from profiles.errors import ConfigError
from profiles.spec import Precision
from tests.executor_plans import GPT, LLAMA, make_plan


def _with_pipeline(plan, **changes):
    return dataclasses.replace(plan, pipeline=dataclasses.replace(plan.pipeline, **changes))


def _with_training(plan, **changes):
    return dataclasses.replace(plan, training=dataclasses.replace(plan.training, **changes))


def _with_layer_plan(plan, name, **changes):
    changed = dataclasses.replace(plan.layer_plans[name], **changes)
    return dataclasses.replace(plan, layer_plans={**plan.layer_plans, name: changed})


def test_stages_are_spelled_out_layer_by_layer_in_order():
    plan = make_plan(GPT, pp=2, blocks=(1, 3))

    names = [[layer.name for layer in stage] for stage in stage_layers(plan)]

    assert names == [["embedding", "block0"], ["block1", "block2", "block3", "head"]]
    assert [layer.index for stage in stage_layers(plan) for layer in stage] == [0, 1, 2, 3, 4, 5]


def test_a_pipeline_rank_runs_every_pp_th_stage():
    plan = make_plan(LLAMA, pp=2, virtual_stages=2, schedule=Schedule.INTERLEAVED)

    assert [local_stages(plan, rank) for rank in range(2)] == [(0, 2), (1, 3)]


@pytest.mark.parametrize("plan", [
    pytest.param(make_plan(), id="one-rank"),
    pytest.param(make_plan(pp=2, dp=2, tp=2, sp=True, zero=(1,)), id="all-axes"),
    pytest.param(make_plan(pp=4, num_micro_batches=4), id="pp4"),
])
def test_a_good_plan_is_accepted(plan):
    validate(plan)


PP2 = make_plan(GPT, pp=2)
TIED = make_plan(GPT, pp=2, dp=2, zero=(0, 1))


@pytest.mark.parametrize(("plan", "message"), [
    pytest.param(dataclasses.replace(PP2, stages=PP2.stages[:1]), "they hold 3 layers, not each of the model's 6", id="layers-missing"),
    pytest.param(dataclasses.replace(PP2, stages=PP2.stages[::-1]), "not each of the model's 6 once and in order", id="wrong-order"),
    pytest.param(
        dataclasses.replace(PP2, stages=(PP2.stages[0], dataclasses.replace(PP2.stages[1], rank=0))),
        r"the ranks must be \[0, 1\]", id="wrong-rank"),
    pytest.param(
        dataclasses.replace(PP2, stages=(*PP2.stages, StagePlan(rank=0, layers=()))), "a stage holds no layer", id="empty-stage"),
    pytest.param(
        dataclasses.replace(PP2, stages=(StagePlan(rank=0, layers=(LayerRun(plan="nope"),)),)), "'nope' is not among", id="no-layer-plan"),
    pytest.param(
        dataclasses.replace(PP2, stages=(StagePlan(rank=0, layers=(LayerRun(plan="block-0"),)),)), "is for block", id="wrong-kind"),
    pytest.param(_with_training(PP2, global_batch_size=9), "are 8 sequences, global_batch_size is 9", id="batch"),
    pytest.param(make_plan(GPT, pp=4), "1f1b needs at least 4 micro-batches, found 2", id="few-micro-batches"),
    pytest.param(make_plan(GPT, pp=2, schedule=Schedule.INTERLEAVED, virtual_stages=2, num_micro_batches=5, global_batch_size=5),
                 "num_micro_batches 5 to be a multiple of 2", id="rounds"),
    pytest.param(_with_pipeline(PP2, virtual_stages=2, schedule=Schedule.GPIPE), "the ranks must be", id="stages-per-rank"),
    pytest.param(make_plan(GPT, pp=2, virtual_stages=2), "1f1b has one stage per rank, virtual_stages is 2", id="virtual-1f1b"),
    pytest.param(_with_training(PP2, precision=Precision.FP16), "does not run fp16", id="fp16"),
    pytest.param(
        _with_training(PP2, precision=Precision.BF16, gradient_precision=Precision.BF16), "gradient_precision is bf16",
        id="bf16-gradients"),
    pytest.param(make_plan(LLAMA, tp=4), "tp 4 does not divide num_kv_heads 2", id="kv-heads"),
    pytest.param(
        make_plan(dataclasses.replace(GPT, ffn_hidden_size=61), tp=2), r"tp 2 does not divide fc1.weight of shape \(61, 32\)", id="ffn"),
    pytest.param(_with_training(make_plan(GPT, tp=2, sp=True), seq_length=15), "does not divide seq_length 15", id="sequence"),
    pytest.param(_with_layer_plan(TIED, "head-0", zero=1), "tied embedding has zero 0 and the head zero 1, they need zero 0", id="tied"),
    pytest.param(
        _with_layer_plan(make_plan(GPT, tp=2), "block-0", operators={}), "layer_plans.block-0: operator norm1 has no placement",
        id="placement"),
    pytest.param(
        _with_layer_plan(make_plan(GPT, dp=2, zero=(1,)), "head-1", zero=2), "zero 1 and the head zero 2, they need the same",
        id="tied-on-one-stage"),
])
def test_a_plan_that_cannot_run_is_refused_with_what_is_wrong(plan, message):
    with pytest.raises(ConfigError, match=message):
        validate(plan)


def test_the_torchrun_line_fills_nodes():
    plan = make_plan(pp=2, dp=2, tp=2)

    assert torchrun_line(plan, "p.yaml") == "torchrun --nproc-per-node 8 -m executor p.yaml"
    more = dataclasses.replace(plan, mesh=Mesh(pp=2, dp=4, tp=4))
    assert torchrun_line(more, "p.yaml") == "torchrun --nnodes 4 --nproc-per-node 8 -m executor p.yaml"


@pytest.mark.parametrize("entries", [("Shard(0)@dp",), ("Partial@tp",), ("Shard(0)@tp", "Shard(1)@tp")])
def test_a_placement_that_is_not_one_shard_over_tp_is_refused(entries):
    with pytest.raises(ConfigError, match="is not one Shard"):
        parse_placement(entries, "block0.operators.qkv")
