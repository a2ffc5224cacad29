"""The schedule of a traced module: the plan's action lists, or a plain loop without a pipeline.

The action lists run through torch.distributed.pipelining. Stages send each other tuples of tensors;
every stage gets the values of the batch that its operators read, by key, and most read none. The
loss of a micro-batch is the mean over its samples, as the module computes it; it is divided by the
number of micro-batches of the global batch, so that all reductions are sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from parplan.costmodels.chunks.chunk_operations import RankChunks
from parplan.executor.chunks.chunk_manager import ChunkManager
from parplan.executor.pipeline.runtime import (
    After,
    PipelineStep,
    Span,
    build_runtime,
    do_nothing,
    no_span,
)
from parplan.executor.placed_layers import action_rows
from parplan.executor.sharding.rank_place import RankPlace
from parplan.executor.sharding.tensor_boxes import Strips
from parplan.executor.traced.division import Division
from parplan.executor.traced.program_cut import StageCut, cut_program
from parplan.executor.traced.shared_parameters import (
    SharedParameters,
    build_shared,
    check_shared,
    shared_names,
)
from parplan.executor.traced.stage_values import OpenedModule
from parplan.executor.traced.traced_stages import (
    StageSetting,
    TracedStage,
    argument_names,
    build_stage,
)
from parplan.planner.plan.traced_plan import TracedPlan
from parplan.profiles.tracing.program import Program

Batch = Mapping[str, Tensor]


class _TracedStep(PipelineStep):
    """A pipeline stage whose output is a tuple of contiguous tensors, which need no copy."""

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        return self.submod(*args, **kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedPipeline:
    """This rank's stages and the function that runs them.

    reads    the keys of the batch that the stages read
    copies   the names of parameters that several stages hold, with the indices of those stages
    shared   this rank's copies of such parameters
    chunks   hold the states of shards, if they lie in chunks
    strips   by name, of parameters that are several matrices each
    """

    stages: tuple[TracedStage, ...]
    run: Callable[[Batch], Tensor]
    reads: frozenset[str]
    copies: Mapping[str, tuple[int, ...]]
    shared: tuple[SharedParameters, ...]
    span: Span = no_span
    steps: tuple[PipelineStep, ...] = ()
    chunks: ChunkManager | None = None
    strips: Mapping[str, Strips] = field(default_factory=dict)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """This rank's parameters outside of chunks; they are sharded between steps."""
        return [
            parameter
            for stage in self.stages
            for _, parameter in stage.named()
            if parameter.requires_grad and not self.in_chunks(parameter)
        ]

    def in_chunks(self, parameter: nn.Parameter) -> bool:
        """True if a parameter lies in a chunk."""
        return self.chunks is not None and any(parameter is each for each in self.chunks.parameters)

    @property
    def own(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by name, without those in chunks and copies of earlier stages."""
        return {
            name: p
            for stage in self.stages
            for name, p in stage.named()
            if self.copies.get(name, (stage.index,))[0] == stage.index and not self.in_chunks(p)
        }

    @property
    def in_flight(self) -> dict[int, int]:
        """The peak in-flight micro-batches by stage of this rank; empty without a pipeline."""
        return {step.stage_index: step.in_flight for step in self.steps}

    def step(self, batch: Batch | None) -> Tensor:
        """Computes the gradients of this rank's samples and returns its share of the mean loss.

        A rank whose stages read nothing of the batch has None.
        """
        for stage in self.stages:
            stage.begin_step()
        if self.chunks is not None:
            self.chunks.begin_step()
        loss = self.run(batch or {})
        with self.span("reduce", -1, -1):
            for stage in self.stages:
                stage.reduce_gradients()
            if self.chunks is not None:
                self.chunks.end_step(None)
        for shared in self.shared:
            with self.span("tied", -1, -1):
                shared.sum_gradients()
        return loss


def build_traced_pipeline(
    plan: TracedPlan,
    program: Program,
    opened: OpenedModule,
    ranks: RankPlace,
    *,
    after_backward: After,
    span: Span = no_span,
    schedule: RankChunks | None = None,
) -> TracedPipeline:
    """Builds this rank's part of the plan, ready to step; collective.

    `schedule` is that of the chunks of a plan with chunks. Raises ConfigError, and BudgetError
    where the chunks on the device exceed the budget.
    """
    cuts = cut_program(plan, program)
    check_shared(plan, cuts)
    here = [k for k, stage in enumerate(plan.stages) if stage.rank == ranks.coordinate("pp")]
    tp_mesh = ranks.tp_mesh
    chunks = None if schedule is None else _chunk_manager(plan, schedule, ranks)
    division = None if tp_mesh is None else Division(plan, program, tp_mesh)
    setting = StageSetting(ranks=ranks, division=division, chunks=chunks)
    stages = tuple(build_stage(plan, k, cuts[k], program, opened, setting) for k in here)
    if chunks is not None:
        chunks.built()
        span = chunks.around(span)
    steps = (
        tuple(_step(plan, ranks, stage, cuts, after_backward, span) for stage in stages)
        if len(cuts) > 1
        else ()
    )
    if steps:
        runtime = build_runtime(
            action_rows(plan),
            ranks.coordinate("pp"),
            steps,
            plan.pipeline.num_micro_batches,
            lambda loss, _: loss.float() / _share(plan),
        )
        run = partial(_scheduled, runtime, stages, plan, ranks.device)
    else:
        run = partial(_loop, stages[0], plan, after_backward, span)
    return TracedPipeline(
        stages=stages,
        run=run,
        reads=frozenset(key for k in here for key in cuts[k].batch_keys),
        copies=shared_names(cuts),
        shared=build_shared(plan, cuts, stages),
        span=span,
        steps=steps,
        chunks=chunks,
        strips={} if division is None else division.strips,
    )


def _chunk_manager(plan: TracedPlan, schedule: RankChunks, ranks: RankPlace) -> ChunkManager:
    group = ranks.dp_mesh.get_group() if plan.mesh.dp > 1 else None
    return ChunkManager(schedule, plan.training, ranks.device, group, whole_names=True)


def _share(plan: TracedPlan) -> int:
    """The number of micro-batches of a step over all data-parallel ranks."""
    return plan.pipeline.num_micro_batches * plan.mesh.dp


def _loop(
    stage: TracedStage, plan: TracedPlan, after_backward: After, span: Span, batch: Batch
) -> Tensor:
    """The schedule without a pipeline: forward and backward, one micro-batch after the other."""
    split = {key: value.split(plan.pipeline.micro_batch_size) for key, value in batch.items()}
    losses = []
    for index in range(plan.pipeline.num_micro_batches):
        with span("F", 0, index):
            loss = stage(
                **argument_names({key: parts[index] for key, parts in split.items()})
            ).float() / _share(plan)
        with span("B", 0, index):
            loss.backward()
        after_backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def _scheduled(
    schedule: _PipelineScheduleRuntime,
    stages: Sequence[TracedStage],
    plan: TracedPlan,
    device: torch.device,
    batch: Batch,
) -> Tensor:
    losses: list[Tensor] = []
    ends = any(stage.ends_model for stage in stages)
    # The module computes its loss itself, but the runtime expects a target for each micro-batch.
    no_targets = torch.empty(plan.pipeline.num_micro_batches, device=device)
    schedule.step(
        target=no_targets if ends else None,
        losses=losses,
        return_outputs=False,
        **argument_names(batch),
    )
    return torch.stack(losses).sum().detach() if ends else torch.zeros((), device=device)


def _step(
    plan: TracedPlan,
    ranks: RankPlace,
    stage: TracedStage,
    cuts: Sequence[StageCut],
    after_backward: After,
    span: Span,
) -> _TracedStep:
    """Builds a stage with given shapes, so that torch runs no extra forward pass to infer them."""
    stage_cut = cuts[stage.index]
    step = _TracedStep(
        stage,
        stage.index,
        len(cuts),
        ranks.device,
        input_args=tuple(map(_example, stage_cut.receives)),
        output_args=tuple(map(_example, stage_cut.sends))
        or torch.empty((), device="meta", requires_grad=True),
        group=ranks.mesh["pp"].get_group(),
    )
    step.after_backward = after_backward
    step.after_recompute = do_nothing
    step.span = span
    return step


def _example(node: fx.Node) -> Tensor:
    """The shape and dtype of a sent value, without data."""
    value = node.meta["val"]
    return torch.empty(value.shape, dtype=value.dtype, device="meta", requires_grad=True)
