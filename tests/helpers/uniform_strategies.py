"""Uniform strategies on one kind of cluster, for tests of prices and memory by hand."""

from __future__ import annotations

from dataclasses import replace

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.stack import NEUTRAL

A100 = load_cluster("a100-80gb")
TRAINING = TrainingSpec(
    global_batch_size=8, seq_length=128, overlap_grad_reduce=False, stack=NEUTRAL
)
TINY = replace(load_model("gpt-tiny").spec, num_layers=8)


def frame_of(
    pp=1, dp=1, tp=1, schedule=Schedule.ONE_F_ONE_B, v=1, b=1, m=8, sequence_parallel=False
):
    return ParallelLayout(
        mesh=Mesh(pp=pp, dp=dp, tp=tp),
        schedule=schedule,
        virtual_stages=v,
        micro_batch_size=b,
        num_micro_batches=m,
        sequence_parallel=sequence_parallel,
    )


def uniform(layout, num_layers, *, recompute=Recompute.NONE, zero=0, ends=True):
    """The strategy with equal stages, with or without embedding and head."""
    per_stage = num_layers // layout.num_virtual_stages
    stages = [
        [LayerChoice(LayerKind.BLOCK, recompute, zero)] * per_stage
        for _ in range(layout.num_virtual_stages)
    ]
    if ends:
        stages[0].insert(0, LayerChoice(LayerKind.EMBEDDING, Recompute.NONE, zero))
        stages[-1].append(LayerChoice(LayerKind.HEAD, Recompute.NONE, zero))
    return Strategy(layout=layout, stages=tuple(map(tuple, stages)))


def book_of(model, num_gpus, training=TRAINING, **network):
    cluster = with_gpus(A100, num_gpus)
    return PriceCache(model, training, machine_for(replace(cluster, **network)))
