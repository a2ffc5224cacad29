"""The training loop: batches through the pipeline, the update, loss and speed of every step."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parplan.costmodels.chunks.measured_bytes import ChunkScheduler
from parplan.costmodels.layers.model_states import StateBytes
from parplan.executor.chunks.chunk_adam import ChunkAdam
from parplan.executor.chunks.memory_tracing import MemoryTracing, TraceRequest
from parplan.executor.data.batches import Batches, build_batches
from parplan.executor.data.document_places import Places, build_places
from parplan.executor.data.seen_images import IMAGE_PLACES, Images, build_images, of_text
from parplan.executor.models.expert_exchange import COPIES
from parplan.executor.pipeline.loss_scale import LossScale, loss_scale
from parplan.executor.pipeline.passage import PLACES
from parplan.executor.pipeline.pipeline import RankPipeline, build_pipeline
from parplan.executor.pipeline.stages import parameters_on_host
from parplan.executor.placed_layers import expert_shards
from parplan.executor.pools.gradient_exchange import GradientExchange
from parplan.executor.pools.joined_ranks import JoinedRanks
from parplan.executor.rules.divisions import loses_by_tokens
from parplan.executor.run_options import Options, derived_seed
from parplan.executor.sharding.rank_place import (
    RankPlace,
    expert_mesh,
    rank_context,
    rank_grid,
    rank_mesh,
    stage_mesh,
)
from parplan.executor.sharding.tensor_boxes import Strips
from parplan.executor.tensors import memory_of, part, to_device
from parplan.executor.training.compiled import compile_blocks
from parplan.executor.training.finite import RankLosses
from parplan.executor.training.optimizer import (
    build_optimizer,
    clip_factor,
    clip_gradients,
    layout_of,
    learning_rate,
    moment_type,
    own_squared_norm,
    set_learning_rate,
)
from parplan.executor.training.training_states import RankTensors, held
from parplan.executor.watch.rank_progress import RankProgress
from parplan.executor.watch.run_recorder import RunRecorder
from parplan.executor.watch.state_bytes import (
    Meter,
    Row,
    optimizer_states,
    predicted_state_bytes,
)
from parplan.planner.plan.plan import Plan
from parplan.planner.runs.run_file import ChunkMoved

METERED_STEPS = 2  # later steps hold the same bytes, and metering takes host time


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of one step, the same on every rank.

    loss           mean over all tokens of the global batch
    gradient_norm  norm before clipping
    loss_scale     scale of an fp16 run for the next step
    skipped        True if a gradient was not finite and nothing was updated
    """

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    seconds: float
    loss_scale: float | None = None
    skipped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """One rank of a training run.

    `optimizer` updates the parameters outside of chunks, `adam` those in chunks. `tracing` measures
    the first steps of a run with chunks, if that is asked for. `places` has the documents of packed
    sequences, `images` those of a model with a tower. `exchange` adds the gradients of pools that
    divide the batch.
    """

    plan: Plan
    options: Options
    ranks: RankPlace
    pipeline: RankPipeline
    optimizer: torch.optim.Optimizer
    batches: Batches
    meter: Meter
    recorder: RunRecorder
    progress: RankProgress = field(default_factory=RankProgress)
    adam: ChunkAdam | None = None
    shares: RankLosses = field(default_factory=RankLosses)
    tracing: MemoryTracing | None = None
    places: Places | None = None
    images: Images | None = None
    exchange: GradientExchange | None = None

    def gradients(self, step: int) -> Tensor:
        """Run forward, backward and reduction of the batch of `step`.

        Returns the mean loss of the global batch.
        """
        self.progress.begin_step(step)
        with self.recorder.span("data", -1, -1):
            batch = self.batch(step) if self.pipeline.reads else None
        self.progress.at("runs forward and backward passes")
        loss = self.pipeline.step(batch, **self.inputs(step))
        if self.exchange is not None:
            self.progress.at("adds its gradients to those of other pools")
            with self.recorder.span("pools", -1, -1):
                self.exchange.add()
        # Every tensor-parallel rank of the last stage has the loss of its data-parallel rank, of
        # the row of a grid, or of its part of the tokens.
        column = self.ranks.coordinate("tp") % self.plan.mesh.tp_columns
        counts = column == 0 or loses_by_tokens(self.plan)
        return self.shares.sum_loss(loss if counts else torch.zeros_like(loss))

    def batch(self, step: int) -> Any:
        """Return this replica's part of a batch, on the device."""
        ids, targets = self.batches(step)
        return to_device(ids, self.ranks.device), to_device(targets, self.ranks.device)

    def inputs(self, step: int) -> dict[str, Tensor]:
        """Return what this replica's layers read beside the token ids; pixels stay on the host."""
        inputs: dict[str, Tensor] = {}
        if self.places is not None:
            inputs[PLACES] = to_device(self.places(step), self.ranks.device)
        if self.images is not None and self.pipeline.reads_images:
            images = self.images(step)
            inputs |= images | {IMAGE_PLACES: to_device(images[IMAGE_PLACES], self.ranks.device)}
        return inputs

    def run(self, first: int = 0) -> Iterator[StepResult]:
        """Train from step `first` to `options.steps` and yield each result. Raises RunError."""
        if self.options.record:
            self.recorder.expect(self.options.steps - first, traced=self.options.trace_memory)
        for step in range(first, self.options.steps):
            started = time.perf_counter()
            self.meter.active = step - first < METERED_STEPS
            self.recorder.start()
            traced = self.tracing.step() if self.tracing is not None else nullcontext()
            with self.recorder.counted(), traced:
                loss, norm = self._step(step)
            if not self.options.allow_non_finite:
                self.shares.require_finite(step, loss, norm if self.scale is None else None)
            self.shares.forget()
            result = StepResult(
                step=step,
                loss=loss,
                gradient_norm=norm,
                learning_rate=learning_rate(self.options, step),
                seconds=time.perf_counter() - started,
                loss_scale=self.scale.value if self.scale else None,
                skipped=self.scale is not None and not math.isfinite(norm),
            )
            self.recorder.finish(result.seconds, result.loss, skipped=result.skipped)
            if self.tracing is not None:
                self.tracing.end_step(skipped=result.skipped)
            yield result

    def _step(self, step: int) -> tuple[float, float]:
        """Run one step; return loss and gradient norm, and leave no tensor but the states."""
        loss = self.gradients(step)
        self.progress.at("updates its parameters")
        with self.recorder.span("optimizer", -1, -1):
            norm = self.update(step)
        return loss.item(), norm.item()

    def update(self, step: int) -> Tensor:
        """Update the parameters if the gradients are finite.

        Returns the gradient norm over the whole model.
        """
        norm = self.norm()
        set_learning_rate(self.optimizer, self.options, step)
        # `_goes_on` changes the scale, so the factor is taken with that of these gradients.
        factor = clip_factor(self.options.clip_gradients, norm, self.scale)
        if self._goes_on(norm):
            clip_gradients(self.optimizer, self.options.clip_gradients, norm)
            self.optimizer.step()
            self._update_chunks(step, factor)
            self._end_update()
        else:
            self.leave_out()
        return norm

    def leave_out(self) -> None:
        """Drop the gradients instead of an update."""
        if self.adam is not None:
            self.adam.skip()
        self._end_update()

    def _end_update(self) -> None:
        if self.adam is not None:
            self.adam.manager.end_update()
        self.optimizer.zero_grad()

    def _update_chunks(self, step: int, factor: Tensor | None) -> None:
        if self.adam is not None:
            self.adam.step(learning_rate(self.options, step), factor)

    def _goes_on(self, norm: Tensor) -> bool:
        """Return True if the parameters are updated; all ranks agree, since they share the norm.

        Raises RunError if no loss scale helps.
        """
        if self.scale is None:
            return True
        finite = math.isfinite(norm.item())
        self.scale.settle(finite=finite)
        return finite

    @property
    def scale(self) -> LossScale | None:
        """The loss scale of an fp16 run."""
        return self.pipeline.scale

    def norm(self) -> Tensor:
        """Return the gradient 2-norm of the whole model, the same on every rank. Collective."""
        in_chunks = self.adam.gradients() if self.adam is not None else None
        return self.shares.sum_norm(
            own_squared_norm(
                self.plan, self.pipeline.stages, self.ranks.device, in_chunks, self.scale
            )
        )

    def held(self) -> RankTensors:
        """Return the parameters of this rank that a checkpoint contains."""
        apart = self.pipeline.chunks.parameters if self.pipeline.chunks is not None else ()
        return held(self.pipeline.stages, tied=self.plan.model.shares_table, apart=apart)

    @property
    def has_copies(self) -> bool:
        """True if some rank holds a copy of a parameter that another rank saves."""
        return self.plan.model.shares_table and self.plan.mesh.pp > 1

    @property
    def strips(self) -> Mapping[str, Strips]:
        """Return, by name, the strips of parameters that are several matrices each."""
        return {}

    def settle_copies(self) -> None:
        """Do nothing after a load: a rank holds at most one copy of a parameter."""

    def buffers(self) -> dict[str, Tensor]:
        """Return tensors that training changes beside parameters, by name."""
        return {}

    def moved(self) -> ChunkMoved | None:
        """Return the transfers of this rank's chunks in the last step, beside the planned ones."""
        return self.adam.manager.moved if self.adam is not None else None

    def traced(self, schedulers: tuple[ChunkScheduler, ...]) -> Trainer:
        """Return a trainer whose first steps trace the memory, if its options ask for it.

        `schedulers` are those of the chunks of all pipeline ranks. Raises InfeasibleError.
        """
        if self.adam is None or not self.options.trace_memory:
            return self
        request = TraceRequest(
            steps=self.options.trace_memory, schedulers=schedulers, share=self.options.trace_share
        )
        tracing = MemoryTracing(
            self.adam.manager,
            request,
            self.ranks.coordinate("pp"),
            self.ranks.device,
            self._outside_bytes,
        )
        return replace(self, tracing=tracing)

    def _on_host(self) -> Iterable[nn.Parameter]:
        return parameters_on_host(self.pipeline.stages)

    def _outside_bytes(self) -> int:
        """Bytes that the device holds between two steps outside of chunks.

        They are parameters, buffers and optimizer states that are not on the host.
        """
        stages = self.pipeline.stages
        apart = {*self.meter.apart, *self._on_host()}
        tensors = (
            *(p for stage in stages for p in stage.parameters() if p not in apart),
            *(buffer for stage in stages for buffer in stage.buffers()),
            *optimizer_states(self.optimizer, apart),
        )
        sizes = {memory_of(each): part(each).untyped_storage().nbytes() for each in tensors}
        return sum(sizes.values())

    @property
    def on_host_bytes(self) -> int:
        """Host bytes of chunks."""
        return self.adam.host_bytes if self.adam is not None else 0

    @property
    def copied_bytes(self) -> tuple[int, int]:
        """Bytes of activations copied to the host, and back, since the start."""
        host = self.pipeline.stages[0].host
        return (0, 0) if host is None else (host.out_bytes, host.back_bytes)

    def state_bytes(self) -> Row:
        """Return this rank's coordinates with its predicted and measured bytes."""
        pp, replica = self.ranks.coordinate("pp"), self.ranks.coordinate("dp")
        in_chunks = self.adam.state_bytes() if self.adam is not None else StateBytes()
        return (
            (pp, replica, self.ranks.coordinate("tp")),
            predicted_state_bytes(self.plan, pp, replica, self.ranks.coordinate("tp")),
            self.meter.measured(self.optimizer) + in_chunks,
        )


def build_trainer(
    plan: Plan,
    options: Options,
    device: torch.device,
    progress: RankProgress | None = None,
    joined: JoinedRanks | None = None,
) -> Trainer:
    """Return this rank's trainer, in a process group of `plan.mesh.num_ranks` ranks.

    joined   the ranks of all pools, where pools divide the batch
    Collective. Raises ConfigError.
    """
    trainer = trainer_of(
        plan,
        options,
        ranks_of(plan, device),
        Meter(masters=plan.training.has_masters),
        progress,
        ranks_before=0 if joined is None else joined.place.first,
    )
    if joined is None:
        return trainer
    held = trainer.held()
    exchange = GradientExchange(joined, (*held.own.items(), *held.copies.items()))
    return replace(trainer, exchange=exchange, shares=RankLosses(joined=joined))


def ranks_of(plan: Plan, device: torch.device) -> RankPlace:
    """Return this rank's place in the mesh of the plan. Collective."""
    mesh, of_experts = rank_mesh(plan.mesh, device), expert_mesh(plan, device)
    replicas = {each.zero_ranks for each in plan.layer_plans.values() if each.zero} - {None}
    near = {expert_shards(n, plan.mesh) for n in replicas} if of_experts is not None else set()
    return RankPlace(
        device=device,
        mesh=mesh,
        sharded=_sharded(mesh, "dp", "copies", replicas),
        expert_mesh=of_experts,
        expert_sharded=_sharded(of_experts, COPIES, "apart", near),
        data_mesh=_data_mesh(plan, device),
        context=rank_context(plan),
        grid=rank_grid(plan.mesh, mesh),
    )


def trainer_of(
    plan: Plan,
    options: Options,
    ranks: RankPlace,
    meter: Meter,
    progress: RankProgress | None = None,
    ranks_before: int = 0,
) -> Trainer:
    """Return the trainer of the rank at `ranks`. Collective. Raises ConfigError.

    ranks_before   ranks of the pools before that of this rank
    """
    progress = progress or RankProgress()
    replica = ranks.coordinate("dp")
    dp_rank = replica // plan.mesh.cp
    # Tensor-parallel ranks hold the same residual stream, so they draw the same dropout masks.
    torch.manual_seed(
        derived_seed(
            options.seed, ranks_before + ranks.coordinate("pp") * plan.mesh.replicas + replica
        )
    )
    recorder = RunRecorder(ranks.device, options.steps if options.record else 0)

    def after_backward() -> None:
        progress.end_micro_batch()
        meter.sample()

    def span(work: str, stage: int, micro_batch: int) -> AbstractContextManager[Any]:
        progress.moves += 1
        return recorder.span(work, stage, micro_batch)

    pipeline = build_pipeline(
        plan,
        ranks,
        seed=options.seed,
        after_backward=after_backward,
        span=span,
        after_recompute=meter.recomputed,
        scale=loss_scale(plan.training.precision),
    )
    if options.compile:
        compile_blocks(pipeline.stages)
    chunks = pipeline.chunks
    meter.watch(
        pipeline.stages, pipeline.parameters, apart=chunks.parameters if chunks is not None else ()
    )
    return Trainer(
        plan=plan,
        options=options,
        ranks=ranks,
        pipeline=pipeline,
        optimizer=build_optimizer(
            pipeline.parameters,
            options,
            plan.training.optimizer,
            layout_of(*(stage.body for stage in pipeline.stages)),
            moment_type(plan.training),
        ),
        batches=of_text(build_batches(plan, replica, options), plan, dp_rank, options.seed),
        places=build_places(plan, replica, options),
        images=build_images(plan, dp_rank, options),
        meter=meter,
        recorder=recorder,
        progress=progress,
        adam=ChunkAdam(chunks, options, {}) if chunks is not None else None,
    )


def _sharded(
    mesh: DeviceMesh | None, axis: str, outer: str, shards: Collection[int]
) -> dict[int, DeviceMesh]:
    """Return meshes with `axis` as (`outer`, shards), by number of ranks that hold one copy.

    They are the `shards` that are fewer than all ranks of the axis. Collective.
    """
    if mesh is None or not shards:
        return {}
    degree = mesh[axis].size()
    return {
        n: mesh._unflatten(axis, (degree // n, n), (outer, "shards"))
        for n in sorted({*shards} - {degree})
    }


def _data_mesh(plan: Plan, device: torch.device) -> DeviceMesh | None:
    """Return the mesh of weights that data-parallel ranks divide: each has one holder."""
    if not any(layer_plan.divides_over_data for layer_plan in plan.layer_plans.values()):
        return None
    return stage_mesh(plan.mesh, device, copies=1, data=plan.mesh.dp, tp=plan.mesh.tp)
