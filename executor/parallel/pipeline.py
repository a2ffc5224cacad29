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
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from costmodels.actions import Work, parse_row
from executor.layout import action_rows, local_stages, stage_layers
from executor.parallel.early import Early
from executor.parallel.messages import LeanStage
from executor.parallel.sharded import all_reduce, settle_weight_gradients
from executor.parallel.stages import Ranks, Stage, border_example, build_stages
from executor.tensors import local
from planner.plan import Plan

After = Callable[[], None]
Span = Callable[[str, int, int], AbstractContextManager[Any]]
_Entry = tuple[int, Work, int]  # virtual stage, work, micro-batch


def _nothing() -> None:
    """What is called, by default, after what nobody asked about."""


def no_span(work: str, stage: int, micro_batch: int) -> AbstractContextManager[Any]:
    """What surrounds each computation ("F", "R", "B", "I" or "W" of a stage and micro-batch) by default: nothing.

    A forward that ends in the loss has two spans: the stage's and the loss's.
    """
    return nullcontext()


class _Stage(LeanStage):
    """A pipeline stage that says what it computes, and when the gradients of a micro-batch's weights are there."""

    after_backward: After
    after_recompute: After
    span: Span
    early: Early
    forwarded = -1
    in_flight = 0

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.forwarded = fwd_chunk_id
        with self.span("F", self.stage_index, fwd_chunk_id), self.early.forward(fwd_chunk_id):
            out = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self.in_flight = max(self.in_flight, len(self.fwd_cache) + len(self.backward_state))
        return out

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Tensor:
        out = super().forward_maybe_with_nosync(*args, **kwargs)
        return out.clone() if out._is_view() else out

    def recompute_one_chunk(self, chunk_id: int) -> None:
        """What the backward pass of the micro-batch needs and the forward pass did not keep, ahead of it."""
        with self.span("R", self.stage_index, chunk_id):
            self.early.recompute(chunk_id)
        self.after_recompute()

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, full_backward: bool = True, **kwargs: Any) -> None:
        with self.span("B" if full_backward else "I", self.stage_index, bwd_chunk_id), self.early.backward(bwd_chunk_id):
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
    piped: tuple[_Stage, ...] = ()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that this rank updates: shards between steps."""
        return list(dict.fromkeys(parameter for stage in self.stages for parameter in stage.parameters()))

    @property
    def in_flight(self) -> dict[int, int]:
        """By pipeline stage, the most micro-batches of which it has held at once what a backward pass needs."""
        return {stage.stage_index: stage.in_flight for stage in self.piped}

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


def build_pipeline(
    plan: Plan, ranks: Ranks, *, seed: int, after_backward: After, span: Span = no_span, after_recompute: After = _nothing,
) -> Pipeline:
    """This rank's part of the plan, ready to step; collective. Raises ConfigError."""
    stages = build_stages(plan, ranks, seed)
    piped: tuple[_Stage, ...] = ()
    if plan.mesh.pp == 1:
        run = partial(_loop, stages[0], plan, after_backward, span)
    else:
        schedule, piped = _schedule(plan, ranks, stages)
        for stage in piped:
            stage.after_backward, stage.after_recompute, stage.span = after_backward, after_recompute, span
        run = partial(_scheduled, schedule, stages, plan.module is not None)
    return Pipeline(
        stages=stages, run=run, tp_mesh=ranks.tp_mesh, tied=plan.model.tied_embeddings and plan.mesh.pp > 1,
        tied_group=_tied_group(plan, ranks), span=span, piped=piped)


def _mean_loss(stage: Stage, plan: Plan, logits: Tensor, targets: Tensor) -> Tensor:
    """The micro-batch's share of the mean loss over all tokens of the global batch, so that every reduction is a sum."""
    return local(stage.body.head.loss(logits, targets)) / plan.training.tokens_per_step


def _loop(stage: Stage, plan: Plan, after_backward: After, span: Span, ids: Tensor, targets: Tensor) -> Tensor:
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


def _schedule(plan: Plan, ranks: Ranks, modules: Sequence[Stage]) -> tuple[_PipelineScheduleRuntime, tuple[_Stage, ...]]:
    """The runtime with the plan's action lists, which it completes with sends and receives, and this rank's stages in it."""
    indices = local_stages(plan, ranks.coordinate("pp"))
    lists = [parse_row(row, rank) for rank, row in enumerate(action_rows(plan))]
    own = lists[ranks.coordinate("pp")]
    stages = [_pipeline_stage(plan, ranks, k, module) for k, module in zip(indices, modules, strict=True)]
    for stage in stages:
        stage.early = _early(stage, own)
    schedule = _PipelineScheduleRuntime(
        stages, plan.pipeline.num_micro_batches, partial(_spanned_loss, stages[-1], plan), scale_grads=False)
    schedule._prepare_schedule_with_comms({rank: list(map(_action, filter(_is_of_torch, each))) for rank, each in enumerate(lists)})
    _add_recompute(schedule, stages, own)
    return schedule, tuple(stages)


def _early(stage: _Stage, own: Sequence[_Entry]) -> Early:
    return Early(stage.submod.units, frozenset(i for k, work, i in own if k == stage.stage_index and work is Work.RECOMPUTE))


def _action(entry: _Entry) -> _Action:
    """In torch's words."""
    stage, work, micro_batch = entry
    return _Action(stage, _ComputationType(work.value), micro_batch)


def _is_of_torch(entry: _Entry) -> bool:
    return entry[1] is not Work.RECOMPUTE


def _add_recompute(schedule: _PipelineScheduleRuntime, stages: Sequence[_Stage], own: Sequence[_Entry]) -> None:
    """Put the recomputes of this rank's list where they are in it, before what the next computation waits for.

    torch's runtime has none; what it does not know it looks up by its type, and its own receives only start there.
    """
    by_index, rest, completed = {stage.stage_index: stage for stage in stages}, iter(own), list[_Action]()
    for action in schedule.pipeline_order_with_comms[schedule.rank]:
        while action.is_compute_op and not _is_of_torch(entry := next(rest)):
            completed.append(_Action(entry[0], entry[1], entry[2]))
        completed.append(action)
    schedule.pipeline_order_with_comms[schedule.rank] = completed
    schedule._comp_type_to_function_map[Work.RECOMPUTE] = lambda action, _: by_index[action.stage_index].recompute_one_chunk(
        action.microbatch_index)


def _spanned_loss(stage: _Stage, plan: Plan, logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of the micro-batch that `stage`, which ends the model, has forwarded last."""
    with stage.span("F", stage.stage_index, stage.forwarded):
        return _mean_loss(stage.submod, plan, logits, targets)


def _pipeline_stage(plan: Plan, ranks: Ranks, index: int, module: Stage) -> _Stage:
    """Shapes are given, so that torch runs no extra forward pass to find them."""
    layers = stage_layers(plan)
    ids = torch.empty((plan.pipeline.micro_batch_size, plan.training.seq_length), dtype=torch.int64, device="meta")
    return _Stage(
        module, index, len(layers), ranks.device,
        input_args=border_example(plan, layers[index - 1][-1]) if index else ids,
        output_args=border_example(plan, layers[index][-1]),
        group=ranks.mesh["pp"].get_group())


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
