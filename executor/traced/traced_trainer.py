"""The training loop of a traced module, with the module's batches, values and parameter names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parplan.costmodels.chunks.chunk_operations import RankChunks
from parplan.costmodels.layers.model_states import StateBytes
from parplan.costmodels.operators.optimizers import WholeTensor
from parplan.executor.chunks.chunk_adam import ChunkAdam
from parplan.executor.rules.traced_rules import validate_traced_plan
from parplan.executor.run_options import Options, derived_seed
from parplan.executor.sharding.rank_place import RankPlace, rank_mesh
from parplan.executor.sharding.tensor_boxes import Strips
from parplan.executor.tensors import local, to_device
from parplan.executor.traced.module_batches import module_batches
from parplan.executor.traced.stage_values import OpenedModule, open_module
from parplan.executor.traced.traced_pipeline import TracedPipeline, build_traced_pipeline
from parplan.executor.traced.traced_stages import zero_of
from parplan.executor.training.optimizer import (
    build_optimizer,
    moment_type,
    num_copies,
    squared_norm,
)
from parplan.executor.training.train import Trainer
from parplan.executor.training.training_states import RankTensors
from parplan.executor.watch.rank_progress import RankProgress
from parplan.executor.watch.run_recorder import RunRecorder
from parplan.executor.watch.state_bytes import (
    Meter,
    Row,
    chunk_state_bytes,
    frozen_states,
    shard_states,
)
from parplan.planner.plan.traced_plan import TracedPlan
from parplan.profiles.tracing.record import record


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedTrainer(Trainer):
    """One rank of a training run of a traced module."""

    plan: TracedPlan  # type: ignore[assignment]
    pipeline: TracedPipeline  # type: ignore[assignment]

    def batch(self, step: int) -> dict[str, Tensor]:
        """Returns the values of the batch that this rank's stages read, on the device."""
        batch: Mapping[str, Tensor] = self.batches(step)  # type: ignore[assignment]
        return {
            key: to_device(batch[key], self.ranks.device) for key in sorted(self.pipeline.reads)
        }

    @property
    def scale(self) -> None:
        """None, because plans in fp16 are refused."""

    @torch.no_grad()
    def norm(self) -> Tensor:
        """The 2-norm of the whole model's gradients, the same on every rank; collective.

        Each parameter is counted once. No other data-parallel rank has the gradients in this rank's
        chunks.
        """
        by_copies: dict[int, list[Tensor]] = {}
        in_chunks = self.adam.gradients() if self.adam is not None else {}
        ranks = self.plan.mesh.ranks_per_stage
        for parameter, gradient in in_chunks.items():
            copies = num_copies(ranks // self.plan.mesh.dp, parameter)
            by_copies.setdefault(copies, []).append(gradient)
        for parameter in self.pipeline.own.values():
            if parameter.grad is not None:
                copies = num_copies(ranks, parameter)
                by_copies.setdefault(copies, []).append(local(parameter.grad))
        return self.shares.sum_norm(squared_norm(by_copies, self.ranks.device))

    def _on_host(self) -> tuple[nn.Parameter, ...]:
        return ()  # chunks exclude states of whole stages on the host

    def held(self) -> RankTensors:
        """The parameters that this rank saves, and its copies of those that another rank saves."""
        saved = self.pipeline.own
        copies = {
            name: p
            for stage in self.pipeline.stages
            for name, p in stage.named()
            if name not in saved and not self.pipeline.in_chunks(p)
        }
        return RankTensors(own=_learning(saved), copies=_learning(copies))

    @property
    def has_copies(self) -> bool:
        return bool(self.pipeline.copies)

    @property
    def strips(self) -> Mapping[str, Strips]:
        return self.pipeline.strips

    def buffers(self) -> dict[str, Tensor]:
        """The buffers that the module's calls write, as the first data-parallel rank has them."""
        return dict(pair for stage in self.pipeline.stages for pair in stage.counted())

    def settle_copies(self) -> None:
        """Sets this rank's further copies of a parameter to the values loaded into the first."""
        for shared in self.pipeline.shared:
            for first, *rest in shared.copies.values():
                for copy in rest:
                    _copy(first, copy, self.optimizer)

    def state_bytes(self) -> Row:
        """This rank's coordinates, and its predicted and measured bytes."""
        pp = self.ranks.coordinate("pp")
        dp = self.ranks.coordinate("dp")
        in_chunks = self.adam.state_bytes() if self.adam is not None else StateBytes()
        return (
            (pp, dp, self.ranks.coordinate("tp")),
            predicted_states(self.plan, self.pipeline, dp) + chunk_state_bytes(self.plan, pp),
            self.meter.measured(self.optimizer) + in_chunks,
        )


def _learning(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}


@torch.no_grad()
def _copy(source: nn.Parameter, target: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    target.copy_(source)
    for key, value in optimizer.state[source].items():
        optimizer.state[target][key].copy_(value)


def predicted_states(plan: TracedPlan, pipeline: TracedPipeline, dp_rank: int) -> StateBytes:
    """Bytes that the memory model predicts for a rank's states outside of chunks (EQUATIONS M2)."""
    total = StateBytes()
    for stage in pipeline.stages:
        zero = zero_of(plan, stage.index)
        for _, parameter in stage.named():
            if pipeline.in_chunks(parameter):
                continue
            shape, shard = divided_shape(parameter), (dp_rank, plan.mesh.dp)
            if not parameter.requires_grad:
                total += frozen_states(shape, shard, zero, plan.training)
            else:
                total += shard_states(
                    shape,
                    shard,
                    zero,
                    plan.training,
                    WholeTensor(
                        num_elements=parameter.numel(),
                        matrix=tuple(parameter.shape) if parameter.ndim > 1 else (),
                    ),
                    on_host=plan.states_on_host,
                )
    return total


def divided_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """The shape of the part of a parameter that a tensor-parallel rank has."""
    shape = list(parameter.shape)
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for name, placement in zip(mesh.mesh_dim_names or (), parameter.placements, strict=True):
            if name == "tp" and not placement.is_replicate():
                shape[placement.dim] //= mesh["tp"].size()  # type: ignore[attr-defined]
    return tuple(shape)


def build_traced_trainer(
    plan: TracedPlan,
    options: Options,
    device: torch.device,
    progress: RankProgress | None = None,
    opened: OpenedModule | None = None,
    schedules: Sequence[RankChunks] = (),
) -> TracedTrainer:
    """Builds this rank's trainer; collective, in a group of `plan.mesh.num_ranks` ranks.

    `schedules` are those of the chunks of each pipeline rank, in a plan with chunks. Raises
    ConfigError.
    """
    validate_traced_plan(plan, options)
    progress = progress or RankProgress()
    opened = opened or open_plan_module(plan, options.seed)
    program = record(opened.workload, plan.pipeline.micro_batch_size, plan.training.precision)
    ranks = RankPlace(device=device, mesh=rank_mesh(plan.mesh, device))
    dp_rank = ranks.coordinate("dp")
    dropout_stream = ranks.coordinate("pp") * plan.mesh.dp + dp_rank
    torch.manual_seed(derived_seed(options.seed, dropout_stream))
    recorder = RunRecorder(device, options.steps if options.record else 0)
    meter = Meter(masters=plan.training.has_masters)

    def after_backward() -> None:
        progress.end_micro_batch()
        meter.sample()

    def span(work: str, stage: int, micro_batch: int) -> AbstractContextManager[Any]:
        progress.moves += 1
        return recorder.span(work, stage, micro_batch)

    pipeline = build_traced_pipeline(
        plan,
        program,
        opened,
        ranks,
        after_backward=after_backward,
        span=span,
        schedule=schedules[ranks.coordinate("pp")] if plan.chunks is not None else None,
    )
    chunks = pipeline.chunks
    meter.watch(
        pipeline.stages, pipeline.parameters, apart=chunks.parameters if chunks is not None else ()
    )
    batches = module_batches(plan, opened.workload, dp_rank, options.seed)
    return TracedTrainer(
        plan=plan,
        options=options,
        ranks=ranks,
        pipeline=pipeline,
        optimizer=build_optimizer(
            pipeline.parameters,
            options,
            plan.training.optimizer,
            moments=moment_type(plan.training),
        ),
        batches=batches,  # type: ignore[arg-type]
        meter=meter,
        recorder=recorder,
        progress=progress,
        adam=ChunkAdam(chunks, options, pipeline.strips) if chunks is not None else None,
    )


def open_plan_module(plan: TracedPlan, seed: int) -> OpenedModule:
    """Opens the plan's module without the memory of its parameters. Raises ConfigError."""
    return open_module(
        plan.module,
        seq_length=plan.training.seq_length,
        seed=seed,
        attention=plan.training.attention,
    )
