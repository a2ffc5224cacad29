from __future__ import annotations

import dataclasses

import pytest

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.schedules.schedule import Schedule
from parplan.executor.placed_layers import local_stages, stage_layers, torchrun_line
from parplan.executor.sharding.place import parse_placement
from parplan.profiles.errors import ConfigError
from tests.helpers.executor_plans import CLUSTER, GPT, LLAMA, make_plan


def test_stages_are_spelled_out_layer_by_layer_in_order():
    plan = make_plan(GPT, pp=2, blocks=(1, 3))

    names = [[layer.name for layer in stage] for stage in stage_layers(plan)]

    assert names == [["embedding", "block0"], ["block1", "block2", "block3", "head"]]
    assert [layer.index for stage in stage_layers(plan) for layer in stage] == [0, 1, 2, 3, 4, 5]


def test_a_pipeline_rank_runs_every_pp_th_stage():
    plan = make_plan(LLAMA, pp=2, virtual_stages=2, schedule=Schedule.INTERLEAVED)

    assert [local_stages(plan, rank) for rank in range(2)] == [(0, 2), (1, 3)]


def test_the_torchrun_line_fills_nodes():
    plan = make_plan(pp=2, dp=2, tp=2)

    assert torchrun_line(plan, "p.yaml") == "torchrun --nproc-per-node 8 -m parplan.executor p.yaml"
    more = dataclasses.replace(plan, mesh=Mesh(pp=2, dp=4, tp=4))
    assert (
        torchrun_line(more, "p.yaml")
        == "torchrun --nnodes 4 --nproc-per-node 8 -m parplan.executor p.yaml"
    )


def test_pools_have_nodes_of_their_own_in_the_torchrun_line():
    four, two = make_plan(dp=4), make_plan(dp=2)
    pairs = dataclasses.replace(four, cluster=dataclasses.replace(CLUSTER, gpus_per_node=2))

    equal, unlike = torchrun_line(pairs, "a b", [two]), torchrun_line(pairs, "a b", [four])

    line = "torchrun --nnodes 3 --nproc-per-node 2 -m parplan.executor a b"
    assert equal == line
    assert unlike == f"{line}  # --nproc-per-node 4 on the nodes of pool 1"


@pytest.mark.parametrize(
    "entries", [("Shard(0)@dp",), ("Partial@tp",), ("Shard(0)@tp", "Shard(1)@tp")]
)
def test_a_placement_that_is_not_one_shard_over_tp_is_refused(entries):
    with pytest.raises(ConfigError, match="is not one Shard"):
        parse_placement(entries, "block0.operators.qkv")
