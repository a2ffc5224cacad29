"""The schedule: its action lists through torch.distributed.pipelining's runtime, or a plain loop
with one pipeline rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from parplan.executor.chunks.chunk_manager import ChunkManager
from parplan.executor.pipeline.loss_scale import LossScale, unscale
from parplan.executor.pipeline.runtime import (
    After,
    PipelineStep,
    Span,
    build_runtime,
    no_span,
    nothing,
)
from parplan.executor.pipeline.stages import Stage, border_example, build_stages
from parplan.executor.placed_layers import action_rows, local_stages, stage_layers
from parplan.executor.sharding.rank_place import RankPlace
from parplan.executor.sharding.zero_units import all_reduce
from parplan.executor.tensors import local
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.plan_chunks import rank_chunks_of

Run = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPipeline:
    """This rank's stages and what runs them: `run` does all forward and backward passes of (ids,
    targets).

    scale: of the loss, which `run` returns scaled
    chunks: what holds the states of the blocks, if they are held in chunks; their gradients stay
    scaled
    """

    stages: tuple[Stage, ...]
    run: Run
    tp_mesh: DeviceMesh | None
    tied: bool
    tied_group: dist.ProcessGroup | None
    span: Span = no_span
    piped: tuple[PipelineStep, ...] = ()
    scale: LossScale | None = None
    chunks: ChunkManager | None = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that this rank updates: shards between steps, and none that lies in
        chunks.
        """
        apart = set(self.chunks.parameters) if self.chunks is not None else set()
        return [
            p
            for p in dict.fromkeys(
                parameter for stage in self.stages for parameter in stage.parameters()
            )
            if p not in apart
        ]

    @property
    def in_flight(self) -> dict[int, int]:
        """By pipeline stage, the most micro-batches of which it has held at once what a backward
        pass needs.
        """
        return {stage.stage_index: stage.in_flight for stage in self.piped}

    def step(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Gradients of one batch of [sequences, sequence length] ids; returns this rank's share of
        the mean loss.
        """
        for stage in self.stages:
            stage.begin_step()
        if self.chunks is not None:
            self.chunks.begin_step()
        loss = self.run(ids, targets)
        with self.span("reduce", -1, -1):
            for stage in self.stages:
                stage.reduce_gradients(self.tp_mesh)
            if self.chunks is not None:
                self.chunks.end_step(self.tp_mesh.get_group() if self.tp_mesh is not None else None)
        with self.span("tied", -1, -1) if self.tied else nullcontext():
            self._sum_tied_gradients()
        if self.scale is None:
            return loss
        unscale(self.parameters, self.scale)
        return loss / self.scale.value

    def _sum_tied_gradients(self) -> None:
        """Add the gradients of the two copies of a tied embedding, in the model's first and its
        last stage.
        """
        copies = [
            local(weight.grad)
            for stage in self.stages
            if self.tied and (weight := stage.tied_weight()) is not None
        ]
        if len(copies) == 2:
            copies[0].add_(copies[1])
            copies[1].copy_(copies[0])
        elif copies and self.tied_group is not None:
            all_reduce(copies, self.tied_group)


def build_pipeline(
    plan: Plan,
    ranks: RankPlace,
    *,
    seed: int,
    after_backward: After,
    span: Span = no_span,
    after_recompute: After = nothing,
    scale: LossScale | None = None,
) -> RankPipeline:
    """This rank's part of the plan, ready to step; collective. Raises ConfigError."""
    chunks = _chunk_manager(plan, ranks) if plan.chunks is not None else None
    stages = build_stages(plan, ranks, seed, chunks)
    if chunks is not None:
        chunks.built()
        span = _also(span, chunks)
    piped: tuple[PipelineStep, ...] = ()
    if plan.mesh.pp == 1:
        run = partial(
            _loop,
            stages[0],
            partial(_mean_loss, stages[0], plan, scale),
            plan,
            after_backward,
            span,
        )
    else:
        schedule, piped = _schedule(plan, ranks, stages, scale)
        for stage in piped:
            stage.after_backward, stage.after_recompute, stage.span = (
                after_backward,
                after_recompute,
                span,
            )
        run = partial(_scheduled, schedule, stages, plan.module is not None)
    return RankPipeline(
        stages=stages,
        run=run,
        tp_mesh=ranks.tp_mesh,
        tied=plan.model.tied_embeddings and plan.mesh.pp > 1,
        tied_group=_tied_group(plan, ranks),
        span=span,
        piped=piped,
        scale=scale,
        chunks=chunks,
    )


def _chunk_manager(plan: Plan, ranks: RankPlace) -> ChunkManager:
    """Of this pipeline rank. Raises ConfigError, and BudgetError where what stays on the device is
    too much.
    """
    group = ranks.dp_mesh.get_group() if plan.mesh.dp > 1 else None
    return ChunkManager(
        rank_chunks_of(plan, ranks.coordinate("pp")), plan.training, ranks.device, group
    )


def _also(span: Span, chunks: ChunkManager) -> Span:
    """Around each computation what `span` is, and inside what `chunks` must know of it."""

    @contextmanager
    def around(work: str, stage: int, micro_batch: int) -> Iterator[None]:
        with span(work, stage, micro_batch), chunks.action(work, stage, micro_batch):
            yield

    return around


def _mean_loss(
    stage: Stage, plan: Plan, scale: LossScale | None, logits: Tensor, targets: Tensor
) -> Tensor:
    """The micro-batch's share of the mean loss over all tokens of the global batch, so that every
    reduction is a sum; scaled.
    """
    loss = local(stage.body.head.loss(logits, targets)) / plan.training.tokens_per_step
    return loss if scale is None else loss * scale.value


def _loop(
    stage: Stage,
    mean_loss: Run,
    plan: Plan,
    after_backward: After,
    span: Span,
    ids: Tensor,
    targets: Tensor,
) -> Tensor:
    """The schedule of one pipeline rank: forward and backward of one micro-batch after the
    other.
    """
    total = torch.zeros((), device=ids.device)
    micro_batches = zip(
        *(x.split(plan.pipeline.micro_batch_size) for x in (ids, targets)), strict=True
    )
    for index, (micro_ids, micro_targets) in enumerate(micro_batches):
        with span("F", 0, index):
            loss = mean_loss(stage(micro_ids), micro_targets)
        with span("B", 0, index):
            loss.backward()
        after_backward()
        total += loss.detach()
    return total


def _scheduled(
    schedule: _PipelineScheduleRuntime,
    stages: Sequence[Stage],
    ids_everywhere: bool,
    ids: Tensor,
    targets: Tensor,
) -> Tensor:
    """`ids_everywhere`: every stage of a foreign module runs the module's own forward pass, which
    starts from the ids.
    """
    losses: list[Tensor] = []
    ends_model = any(stage.ends_model for stage in stages)
    first = (ids,) if any(stage.begins_model for stage in stages) else ()
    inputs = {"ids": ids} if ids_everywhere else {}
    schedule.step(
        *first,
        target=targets if ends_model else None,
        losses=losses,
        return_outputs=False,
        **inputs,
    )
    return torch.stack(losses).sum().detach() if ends_model else torch.zeros((), device=ids.device)


def _schedule(
    plan: Plan,
    ranks: RankPlace,
    modules: Sequence[Stage],
    scale: LossScale | None,
) -> tuple[_PipelineScheduleRuntime, tuple[PipelineStep, ...]]:
    """The runtime with the plan's action lists, which it completes with sends and receives, and
    this rank's stages in it.
    """
    indices, rank = local_stages(plan, ranks.coordinate("pp")), ranks.coordinate("pp")
    stages = [
        _pipeline_stage(plan, ranks, k, module) for k, module in zip(indices, modules, strict=True)
    ]
    loss = partial(_spanned_loss, stages[-1], partial(_mean_loss, stages[-1].submod, plan, scale))
    schedule = build_runtime(action_rows(plan), rank, stages, plan.pipeline.num_micro_batches, loss)
    return schedule, tuple(stages)


def _spanned_loss(stage: PipelineStep, mean_loss: Run, logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of the micro-batch that `stage`, which ends the model, has forwarded last."""
    with stage.span("F", stage.stage_index, stage.forwarded):
        return mean_loss(logits, targets)


def _pipeline_stage(plan: Plan, ranks: RankPlace, index: int, module: Stage) -> PipelineStep:
    """Shapes are given, so that torch runs no extra forward pass to find them."""
    layers = stage_layers(plan)
    ids = torch.empty(
        (plan.pipeline.micro_batch_size, plan.training.seq_length), dtype=torch.int64, device="meta"
    )
    return PipelineStep(
        module,
        index,
        len(layers),
        ranks.device,
        input_args=border_example(plan, layers[index - 1][-1]) if index else ids,
        output_args=border_example(plan, layers[index][-1]),
        group=ranks.mesh["pp"].get_group(),
    )


def _tied_group(plan: Plan, ranks: RankPlace) -> dist.ProcessGroup | None:
    """The pipeline ranks of the first and the last stage, in this rank's dp and tp coordinates,
    where each holds a copy of a tied weight; None where one rank holds both.
    """
    ends = [plan.stages[index].rank for index in (0, -1)]
    if not plan.model.tied_embeddings or ends[0] == ends[1]:
        return None
    own, count = None, plan.mesh.ranks_per_stage
    for place in range(count):
        pair = [end * count + place for end in ends]
        group = dist.new_group(pair)  # collective: every rank makes every group
        own = group if dist.get_rank() in pair else own
    return own
