"""Plans whose blocks are in chunks, and what one step of them gives, moves and holds."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from parplan.costmodels.chunks.chunk_operations import ChunkAction
from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import ParallelLayout
from parplan.executor.checking.parity import run_ranks
from parplan.executor.data.batches import synthetic_batches
from parplan.executor.pipeline.pipeline import RankPipeline, build_pipeline
from parplan.executor.run_options import Options
from parplan.executor.training.optimizer import build_optimizer
from parplan.executor.training.train import ranks_of
from parplan.executor.watch.allocated import PeakBytes
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.plan_chunks import rank_chunks_of
from parplan.planner.search.estimate import ChunkRequest
from parplan.profiles.machines.machine_catalog import (
    load_cluster,
    load_stack,
    with_gpus,
)
from parplan.profiles.models.spec import ModelSpec, Precision, TrainingSpec
from tests.helpers.executor_plans import GPT, SEQ_LENGTH
from tests.helpers.planning import estimate_plan

AMPLE = 10**9
SEED = 7


def chunked_plan(
    request: ChunkRequest | None,
    model: ModelSpec = GPT,
    *,
    pp: int = 1,
    dp: int = 1,
    tp: int = 1,
    ep: int = 1,
    etp: int = 1,
    sp: bool = False,
    num_micro_batches: int = 1,
    schedule: Schedule = Schedule.ONE_F_ONE_B,
    virtual_stages: int = 1,
    batch: int = 8,
    recompute: Recompute = Recompute.NONE,
    precision: Precision = Precision.FP32,
    gradients: Precision = Precision.FP32,
    offload: tuple[Offload, ...] = (),
) -> Plan:
    """A plan of a tiny model; without a request the same plan without chunks."""
    layout = ParallelLayout(
        mesh=Mesh(pp=pp, dp=dp, tp=tp, ep=ep, etp=etp),
        schedule=schedule,
        virtual_stages=virtual_stages,
        micro_batch_size=batch // num_micro_batches // dp,
        num_micro_batches=num_micro_batches,
        sequence_parallel=sp,
    )
    training = TrainingSpec(
        global_batch_size=batch,
        seq_length=SEQ_LENGTH,
        precision=precision,
        gradient_precision=gradients,
        stack=load_stack("parplan"),
    )
    name = (
        "v100-32gb" if precision is Precision.FP16 else "cpu"
    )  # a CPU computes in fp16, but has no peak in the catalog
    cluster = with_gpus(load_cluster(name), pp * dp * tp, pp * dp * tp)
    return estimate_plan(
        model, cluster, training, layout, recompute=recompute, offload=offload, chunks=request
    )


def smallest(request: ChunkRequest, **choices: Any) -> int:
    """The least device bytes of the plan, of the pipeline rank that needs most."""
    plan = chunked_plan(replace(request, device_bytes=AMPLE), **choices)
    assert plan.chunks is not None
    return max(rank.smallest_bytes for rank in plan.chunks.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Results of one rank and step.

    They are its share of the loss, whole gradients by name, bytes (counted, predicted) by kind of
    op, the most that chunks and that all tensors held of the device, and its budget.
    """

    loss: float
    gradients: dict[str, Tensor]
    moved: dict[str, tuple[int, int]]
    chunk_bytes: int
    device_bytes: int
    budget_bytes: int


def run(plans: list[Plan]) -> list[list[Found]]:
    """By plan and rank; all plans have as many ranks."""
    return run_ranks(plans, first_step, Found)


def first_step(plan: Plan) -> Found:
    """The first step, and the memory of the second, by which time the optimizer has its states."""
    ranks = ranks_of(plan, torch.device("cpu"))
    pipeline = build_pipeline(plan, ranks, seed=SEED, after_backward=lambda: None)
    batch = synthetic_batches(plan, ranks.coordinate("dp"), SEED)(0)
    torch.manual_seed(ranks.coordinate("dp"))
    loss = pipeline.step(batch).item()
    gradients = {name: whole(tensor) for name, tensor in _gradients(pipeline).items()}
    if pipeline.chunks is None:
        return Found(
            loss=loss, gradients=gradients, moved={}, chunk_bytes=0, device_bytes=0, budget_bytes=0
        )
    chunks, predicted = pipeline.chunks, rank_chunks_of(plan, ranks.coordinate("pp"))
    chunks.end_update()
    counts = chunks.counts
    moved = {
        "in": (counts.in_bytes, predicted.in_bytes),
        "out": (counts.out_bytes, predicted.out_bytes),
        "gather": (counts.gathered_bytes, predicted.moved(ChunkAction.GATHER)),
        "reduce": (counts.reduced_bytes, predicted.moved(ChunkAction.REDUCE)),
    }
    return Found(
        loss=loss,
        gradients=gradients,
        moved=moved,
        chunk_bytes=chunks.ledger.most_bytes,
        device_bytes=_second_step(pipeline, batch),
        budget_bytes=predicted.device_bytes,
    )


def _second_step(pipeline: RankPipeline, batch: tuple[Tensor, Tensor]) -> int:
    """The most that tensors held in a step but for what chunks hold of the host."""
    assert pipeline.chunks is not None
    optimizer = build_optimizer(pipeline.parameters, Options()) if pipeline.parameters else None
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    gc.collect()
    peak = PeakBytes()
    with peak.counted():
        pipeline.step(batch)
    assert peak.num_bytes is not None
    return peak.num_bytes - pipeline.chunks.host_bytes


def _gradients(pipeline: RankPipeline) -> dict[str, Tensor]:
    """This rank's: of chunks those of parameters that it owns."""
    actual = dict(pipeline.chunks.gradients()) if pipeline.chunks is not None else {}
    for stage in pipeline.stages:
        for name, parameter in stage.body.named_parameters(remove_duplicate=False):
            if parameter.grad is not None:
                actual[name] = parameter.grad
    return {
        name.replace("_checkpoint_wrapped_module.", ""): gradient
        for name, gradient in actual.items()
    }


def whole(tensor: Tensor) -> Tensor:
    """A copy, in memory that is not counted: what numpy has seen cannot be resized."""
    actual = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return torch.from_numpy(actual.detach().float().clone().numpy())


def joined(ranks: list[Found]) -> tuple[float, dict[str, Tensor]]:
    """The loss of all ranks, and every gradient."""
    gradients: dict[str, Tensor] = {}
    for rank in ranks:
        gradients |= rank.gradients
    return sum(rank.loss for rank in ranks), gradients
