"""The schedule: torch.distributed.pipelining's own schedule classes, or a plain loop when there is one pipeline rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from costmodels.schedules import Schedule
from executor.layout import local_stages, stage_layers
from executor.stages import Ranks, Stage, border_example, build_stages
from executor.tensors import local
from planner.plan import Plan

AfterBackward = Callable[[], None]
Span = Callable[[str, int, int], AbstractContextManager[Any]]  # around one piece of work: its name, stage and micro-batch


def no_span(work: str, stage: int, micro_batch: int) -> AbstractContextManager[Any]:
    """Notes nothing."""
    return nullcontext()


class _ReportingStage(PipelineStage):
    """A pipeline stage that says what it works on, and when the backward pass of a micro-batch is over."""

    after_backward: AfterBackward
    span: Span

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.span("F", self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False) -> Any:
        with self.span("B" if full_backward else "I", self.stage_index, bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> Any:
        with self.span("W", self.stage_index, bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def backward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        result = super().backward_maybe_with_nosync(*args, **kwargs)
        self.after_backward()
        return result


Run = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """This rank's stages and what runs them: `run` does all forward and backward passes of (ids, targets)."""

    stages: tuple[Stage, ...]
    run: Run
    dp_mesh: DeviceMesh | None
    tp_mesh: DeviceMesh | None
    tied_group: dist.ProcessGroup | None
    span: Span = no_span

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that this rank updates: shards between steps."""
        return list(dict.fromkeys(parameter for stage in self.stages for parameter in stage.parameters()))

    def step(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Gradients of one batch of [sequences, sequence length] ids; returns this rank's share of the mean loss."""
        for stage in self.stages:
            stage.begin_step()
        loss = self.run(ids, targets)
        with self.span("reduce", -1, -1):
            for stage in self.stages:
                stage.reduce_gradients(self.dp_mesh, self.tp_mesh)
        with self.span("tied", -1, -1) if self.tied_group is not None else nullcontext():
            self._sum_tied_gradients()
        return loss

    def _sum_tied_gradients(self) -> None:
        """Add the gradients of the two copies of a tied embedding on the first and the last pipeline rank."""
        if self.tied_group is None:
            return
        for stage in self.stages:
            if (weight := stage.tied_weight()) is not None:
                dist.all_reduce(local(weight.grad), group=self.tied_group)


def build_pipeline(plan: Plan, ranks: Ranks, *, seed: int, after_backward: AfterBackward, span: Span = no_span) -> Pipeline:
    """This rank's part of the plan, ready to step; collective. Raises ConfigError."""
    stages = build_stages(plan, ranks, seed)
    if plan.mesh.pp == 1:
        run = partial(_loop, stages[0], plan, after_backward, span)
    else:
        run = partial(_scheduled, _schedule(plan, ranks, stages, after_backward, span), ranks, stages[-1].ends_model)
    return Pipeline(
        stages=stages, run=run, dp_mesh=ranks.dp_mesh if plan.mesh.dp > 1 else None, tp_mesh=ranks.tp_mesh,
        tied_group=_tied_group(plan, ranks), span=span)


def _mean_loss(stage: Stage, plan: Plan, logits: Tensor, targets: Tensor) -> Tensor:
    """The micro-batch's share of the mean loss over all tokens of the global batch, so that every reduction is a sum."""
    return local(stage.body.head.loss(logits, targets)) / plan.training.tokens_per_step


def _loop(stage: Stage, plan: Plan, after_backward: AfterBackward, span: Span, ids: Tensor, targets: Tensor) -> Tensor:
    """The schedule of one pipeline rank: forward and backward of one micro-batch after the other."""
    total = torch.zeros((), device=ids.device)
    micro_batches = zip(*(x.split(plan.pipeline.micro_batch_size) for x in (ids, targets)), strict=True)
    for index, (micro_ids, micro_targets) in enumerate(micro_batches):
        with span("F", 0, index):
            loss = _mean_loss(stage, plan, stage(micro_ids), micro_targets)
        with span("B", 0, index):
            loss.backward()
        after_backward()
        total += loss.detach()
    return total


def _scheduled(schedule: Any, ranks: Ranks, ends_model: bool, ids: Tensor, targets: Tensor) -> Tensor:
    losses: list[Tensor] = []
    first = (ids,) if ranks.coordinate("pp") == 0 else ()
    schedule.step(*first, target=targets if ends_model else None, losses=losses, return_outputs=False)
    return torch.stack(losses).sum().detach() if ends_model else torch.zeros((), device=ids.device)


def _schedule(plan: Plan, ranks: Ranks, modules: Sequence[Stage], after_backward: AfterBackward, span: Span) -> Any:
    indices = local_stages(plan, ranks.coordinate("pp"))
    stages = [_pipeline_stage(plan, ranks, k, module, after_backward, span) for k, module in zip(indices, modules, strict=True)]
    num_micro_batches = plan.pipeline.num_micro_batches
    loss = _spanned_loss(partial(_mean_loss, modules[-1], plan), span, indices[-1], num_micro_batches)
    if plan.pipeline.schedule is Schedule.INTERLEAVED:
        return ScheduleInterleaved1F1B(stages, num_micro_batches, loss, scale_grads=False)
    kind = Schedule1F1B if plan.pipeline.schedule is Schedule.ONE_F_ONE_B else ScheduleGPipe
    return kind(stages[0], num_micro_batches, loss, scale_grads=False)


def _spanned_loss(loss: Run, span: Span, stage: int, num_micro_batches: int) -> Run:
    """The loss of one micro-batch after the other, which torch's schedules compute outside the stage: the end of its forward."""
    turn = count()

    def spanned(logits: Tensor, targets: Tensor) -> Tensor:
        with span("F", stage, next(turn) % num_micro_batches):
            return loss(logits, targets)

    return spanned


def _pipeline_stage(plan: Plan, ranks: Ranks, index: int, module: Stage, after_backward: AfterBackward, span: Span) -> PipelineStage:
    """Shapes are given, so that torch runs no extra forward pass to find them."""
    layers = stage_layers(plan)
    ids = torch.empty((plan.pipeline.micro_batch_size, plan.training.seq_length), dtype=torch.int64, device="meta")
    stage = _ReportingStage(
        module, index, len(layers), ranks.device,
        input_args=border_example(plan, layers[index - 1][-1]) if index else ids,
        output_args=border_example(plan, layers[index][-1]),
        group=ranks.mesh["pp"].get_group())
    stage.after_backward, stage.span = after_backward, span
    return stage


def _tied_group(plan: Plan, ranks: Ranks) -> dist.ProcessGroup | None:
    """The first and last pipeline ranks of this rank's dp and tp coordinates, where each holds a copy of a tied weight."""
    if not plan.model.tied_embeddings or plan.mesh.pp == 1:
        return None
    own = None
    for first, last in zip(ranks.mesh.mesh[0].flatten().tolist(), ranks.mesh.mesh[-1].flatten().tolist(), strict=True):
        group = dist.new_group([first, last])  # collective: every rank makes every group
        own = group if dist.get_rank() in (first, last) else own
    return own
