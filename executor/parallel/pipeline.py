"""The schedule: its action lists through torch.distributed.pipelining's runtime, or a plain loop with one pipeline rank.

Where backwards are split, the runtime computes the gradient of a stage's input first and those of its weights later. A stage
must not end in a view then, whose part of the graph it could not let go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

from executor.layout import action_rows, local_stages, stage_layers
from executor.parallel.messages import LeanStage
from executor.parallel.sharded import all_reduce, settle_weight_gradients
from executor.parallel.stages import Ranks, Stage, border_example, build_stages
from executor.tensors import local
from planner.plan import Plan

AfterBackward = Callable[[], None]
Span = Callable[[str, int, int], AbstractContextManager[Any]]


def no_span(work: str, stage: int, micro_batch: int) -> AbstractContextManager[Any]:
    """What surrounds each computation ("F", "B", "I" or "W" of a stage and micro-batch) by default: nothing.

    A forward that ends in the loss has two spans: the stage's and the loss's.
    """
    return nullcontext()


class PipelineStep(LeanStage):
    """A pipeline stage that says what it computes, and when the gradients of a micro-batch's weights are there."""

    after_backward: AfterBackward
    span: Span
    forwarded = -1

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.forwarded = fwd_chunk_id
        with self.span("F", self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Tensor:
        out = super().forward_maybe_with_nosync(*args, **kwargs)
        return out.clone() if out._is_view() else out

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, full_backward: bool = True, **kwargs: Any) -> None:
        with self.span("B" if full_backward else "I", self.stage_index, bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, *args, full_backward=full_backward, **kwargs)
        if full_backward:
            self.after_backward()

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with self.span("W", self.stage_index, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
            settle_weight_gradients(self.submod.body)
        self.after_backward()


Run = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """This rank's stages and what runs them: `run` does all forward and backward passes of (ids, targets)."""

    stages: tuple[Stage, ...]
    run: Run
    tp_mesh: DeviceMesh | None
    tied: bool
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
                stage.reduce_gradients(self.tp_mesh)
        with self.span("tied", -1, -1) if self.tied else nullcontext():
            self._sum_tied_gradients()
        return loss

    def _sum_tied_gradients(self) -> None:
        """Add the gradients of the two copies of a tied embedding, in the model's first and its last stage."""
        copies = [local(weight.grad) for stage in self.stages if self.tied and (weight := stage.tied_weight()) is not None]
        if len(copies) == 2:
            copies[0].add_(copies[1])
            copies[1].copy_(copies[0])
        elif copies and self.tied_group is not None:
            all_reduce(copies, self.tied_group)


def build_pipeline(plan: Plan, ranks: Ranks, *, seed: int, after_backward: AfterBackward, span: Span = no_span) -> Pipeline:
    """This rank's part of the plan, ready to step; collective. Raises ConfigError."""
    stages = build_stages(plan, ranks, seed)
    if plan.mesh.pp == 1:
        run = partial(_loop, stages[0], plan, after_backward, span)
    else:
        schedule = _schedule(plan, ranks, stages, after_backward, span)
        run = partial(_scheduled, schedule, stages, plan.module is not None)
    return Pipeline(
        stages=stages, run=run, tp_mesh=ranks.tp_mesh, tied=plan.model.tied_embeddings and plan.mesh.pp > 1,
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


def _scheduled(
    schedule: _PipelineScheduleRuntime, stages: Sequence[Stage], ids_everywhere: bool, ids: Tensor, targets: Tensor,
) -> Tensor:
    """`ids_everywhere`: every stage of a foreign module runs the module's own forward pass, which starts from the ids."""
    losses: list[Tensor] = []
    ends_model = any(stage.ends_model for stage in stages)
    first = (ids,) if any(stage.begins_model for stage in stages) else ()
    inputs = {"ids": ids} if ids_everywhere else {}
    schedule.step(*first, target=targets if ends_model else None, losses=losses, return_outputs=False, **inputs)
    return torch.stack(losses).sum().detach() if ends_model else torch.zeros((), device=ids.device)


def _schedule(
    plan: Plan, ranks: Ranks, modules: Sequence[Stage], after_backward: AfterBackward, span: Span,
) -> _PipelineScheduleRuntime:
    """The runtime with the plan's action lists, which it completes with sends and receives."""
    indices = local_stages(plan, ranks.coordinate("pp"))
    stages = [_pipeline_stage(plan, ranks, k, module, after_backward, span) for k, module in zip(indices, modules, strict=True)]
    schedule = _PipelineScheduleRuntime(
        stages, plan.pipeline.num_micro_batches, partial(_spanned_loss, stages[-1], plan), scale_grads=False)
    lists = {rank: [_Action.from_str(text) for text in row.split(",")] for rank, row in enumerate(action_rows(plan))}
    schedule._prepare_schedule_with_comms(lists)  # what `_load_csv` does with a file
    return schedule


def _spanned_loss(stage: PipelineStep, plan: Plan, logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of the micro-batch that `stage`, which ends the model, has forwarded last."""
    with stage.span("F", stage.stage_index, stage.forwarded):
        return _mean_loss(stage.submod, plan, logits, targets)


def _pipeline_stage(plan: Plan, ranks: Ranks, index: int, module: Stage, after_backward: AfterBackward, span: Span) -> PipelineStep:
    """Shapes are given, so that torch runs no extra forward pass to find them."""
    layers = stage_layers(plan)
    ids = torch.empty((plan.pipeline.micro_batch_size, plan.training.seq_length), dtype=torch.int64, device="meta")
    stage = PipelineStep(
        module, index, len(layers), ranks.device,
        input_args=border_example(plan, layers[index - 1][-1]) if index else ids,
        output_args=border_example(plan, layers[index][-1]),
        group=ranks.mesh["pp"].get_group())
    stage.after_backward, stage.span = after_backward, span
    return stage


def _tied_group(plan: Plan, ranks: Ranks) -> dist.ProcessGroup | None:
    """The pipeline ranks of the first and the last stage, in this rank's dp and tp coordinates, where each holds a copy of a tied
    weight; None where one rank holds both."""
    ends = [plan.stages[index].rank for index in (0, -1)]
    if not plan.model.tied_embeddings or ends[0] == ends[1]:
        return None
    own, count = None, plan.mesh.ranks_per_stage
    for place in range(count):
        pair = [end * count + place for end in ends]
        group = dist.new_group(pair)  # collective: every rank makes every group
        own = group if dist.get_rank() in pair else own
    return own
