"""The schedule: torch.distributed.pipelining's own schedule classes, or a plain loop when there is one pipeline rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
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


class _ReportingStage(PipelineStage):
    """A pipeline stage that says when the backward pass of a micro-batch is over."""

    after_backward: AfterBackward

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

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that this rank updates: shards between steps."""
        return list(dict.fromkeys(parameter for stage in self.stages for parameter in stage.parameters()))

    def step(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Gradients of one batch of [sequences, sequence length] ids; returns this rank's share of the mean loss."""
        for stage in self.stages:
            stage.begin_step()
        loss = self.run(ids, targets)
        for stage in self.stages:
            stage.reduce_gradients(self.dp_mesh, self.tp_mesh)
        self._sum_tied_gradients()
        return loss

    def _sum_tied_gradients(self) -> None:
        """Add the gradients of the two copies of a tied embedding on the first and the last pipeline rank."""
        if self.tied_group is None:
            return
        for stage in self.stages:
            if (weight := stage.tied_weight()) is not None:
                dist.all_reduce(local(weight.grad), group=self.tied_group)


def build_pipeline(plan: Plan, ranks: Ranks, *, seed: int, after_backward: AfterBackward) -> Pipeline:
    """This rank's part of the plan, ready to step; collective. Raises ConfigError."""
    stages = build_stages(plan, ranks, seed)
    if plan.mesh.pp == 1:
        run = partial(_loop, stages[0], plan, after_backward)
    else:
        run = partial(
            _scheduled, _schedule(plan, ranks, stages, after_backward), ranks, stages[-1].ends_model, plan.module is not None)
    return Pipeline(
        stages=stages, run=run, dp_mesh=ranks.dp_mesh if plan.mesh.dp > 1 else None, tp_mesh=ranks.tp_mesh,
        tied_group=_tied_group(plan, ranks))


def _mean_loss(stage: Stage, plan: Plan, logits: Tensor, targets: Tensor) -> Tensor:
    """The micro-batch's share of the mean loss over all tokens of the global batch, so that every reduction is a sum."""
    return local(stage.body.head.loss(logits, targets)) / plan.training.tokens_per_step


def _loop(stage: Stage, plan: Plan, after_backward: AfterBackward, ids: Tensor, targets: Tensor) -> Tensor:
    """The schedule of one pipeline rank: forward and backward of one micro-batch after the other."""
    total = torch.zeros((), device=ids.device)
    for micro_ids, micro_targets in zip(*(x.split(plan.pipeline.micro_batch_size) for x in (ids, targets)), strict=True):
        loss = _mean_loss(stage, plan, stage(micro_ids), micro_targets)
        loss.backward()
        after_backward()
        total += loss.detach()
    return total


def _scheduled(schedule: Any, ranks: Ranks, ends_model: bool, ids_everywhere: bool, ids: Tensor, targets: Tensor) -> Tensor:
    """`ids_everywhere`: every stage of a foreign module runs the module's own forward pass, which starts from the ids."""
    losses: list[Tensor] = []
    first = (ids,) if ranks.coordinate("pp") == 0 else ()
    inputs = {"ids": ids} if ids_everywhere else {}
    schedule.step(*first, target=targets if ends_model else None, losses=losses, return_outputs=False, **inputs)
    return torch.stack(losses).sum().detach() if ends_model else torch.zeros((), device=ids.device)


def _schedule(plan: Plan, ranks: Ranks, modules: Sequence[Stage], after_backward: AfterBackward) -> Any:
    indices = local_stages(plan, ranks.coordinate("pp"))
    stages = [_pipeline_stage(plan, ranks, k, module, after_backward) for k, module in zip(indices, modules, strict=True)]
    num_micro_batches, loss = plan.pipeline.num_micro_batches, partial(_mean_loss, modules[-1], plan)
    if plan.pipeline.schedule is Schedule.INTERLEAVED:
        return ScheduleInterleaved1F1B(stages, num_micro_batches, loss, scale_grads=False)
    kind = Schedule1F1B if plan.pipeline.schedule is Schedule.ONE_F_ONE_B else ScheduleGPipe
    return kind(stages[0], num_micro_batches, loss, scale_grads=False)


def _pipeline_stage(plan: Plan, ranks: Ranks, index: int, module: Stage, after_backward: AfterBackward) -> PipelineStage:
    """Shapes are given, so that torch runs no extra forward pass to find them."""
    layers = stage_layers(plan)
    ids = torch.empty((plan.pipeline.micro_batch_size, plan.training.seq_length), dtype=torch.int64, device="meta")
    stage = _ReportingStage(
        module, index, len(layers), ranks.device,
        input_args=border_example(plan, layers[index - 1][-1]) if index else ids,
        output_args=border_example(plan, layers[index][-1]),
        group=ranks.mesh["pp"].get_group())
    stage.after_backward = after_backward
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
