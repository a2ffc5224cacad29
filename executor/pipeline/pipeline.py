"""One rank's schedule of a step.

Several pipeline ranks run their action lists through torch.distributed.pipelining's runtime; one
pipeline rank runs a plain loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parplan.executor.chunks.chunk_manager import ChunkManager
from parplan.executor.data.seen_images import num_targets
from parplan.executor.models.expert_exchange import COPIES
from parplan.executor.pipeline.borders import border_examples
from parplan.executor.pipeline.loss_scale import LossScale, unscale
from parplan.executor.pipeline.passage import TARGETS, Inputs
from parplan.executor.pipeline.runtime import (
    After,
    PipelineStep,
    Runtime,
    Span,
    build_runtime,
    do_nothing,
    no_span,
)
from parplan.executor.pipeline.shares import RankShare, rank_share
from parplan.executor.pipeline.stages import Stage, build_stages
from parplan.executor.placed_layers import (
    action_rows,
    local_stages,
    rank_tokens,
    reads_batches,
    reads_images,
    stage_layers,
)
from parplan.executor.sharding.rank_place import RankPlace
from parplan.executor.sharding.zero_units import all_reduce
from parplan.executor.tensors import local
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.plan_chunks import rank_chunks_of

Run = Callable[[Tensor, Tensor], Tensor]
Batch = tuple[Tensor, Tensor]  # ids and targets


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPipeline:
    """This rank's stages; `run` does all forward and backward passes of a batch.

    reads   whether the rank reads batches; the first and the last stage do
    reads_images   whether a layer of the rank reads images or their places
    scale   of the loss; `run` returns the scaled loss
    chunks  holds the states of the blocks, if they lie in chunks; their gradients stay scaled
    """

    stages: tuple[Stage, ...]
    run: Callable[[Batch | None, Inputs], Tensor]
    reads: bool
    tp_mesh: DeviceMesh | None
    tied: bool
    tied_group: dist.ProcessGroup | None
    span: Span = no_span
    steps: tuple[PipelineStep, ...] = ()
    scale: LossScale | None = None
    chunks: ChunkManager | None = None
    reads_images: bool = False

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Returns the parameters that this rank updates outside of chunks: shards between steps."""
        apart = set(self.chunks.parameters) if self.chunks is not None else set()
        in_order = dict.fromkeys(p for stage in self.stages for p in stage.parameters())
        return [each for each in in_order if each.requires_grad and each not in apart]

    @property
    def in_flight(self) -> dict[int, int]:
        """Returns by pipeline stage the most micro-batches in flight at once."""
        return {stage.stage_index: stage.in_flight for stage in self.steps}

    def step(self, batch: Batch | None, **inputs: Tensor) -> Tensor:
        """Computes the gradients of one batch: ids and targets of [sequences, sequence length].

        A rank that reads no batches has None. Every rank has the further inputs of its layers: the
        places of tokens in documents where sequences are packed, and images. Returns this rank's
        share of the mean loss.
        """
        for stage in self.stages:
            stage.begin_step()
        if self.chunks is not None:
            self.chunks.begin_step()
        loss = self.run(batch, inputs)
        with self.span("reduce", -1, -1):
            for stage in self.stages:
                stage.reduce_gradients(self.tp_mesh)
            if self.chunks is not None:
                tp_group = self.tp_mesh.get_group() if self.tp_mesh is not None else None
                self.chunks.end_step(tp_group)
        with self.span("tied", -1, -1) if self.tied else nullcontext():
            self._sum_tied_gradients()
        if self.scale is None:
            return loss
        unscale(self.parameters, self.scale)
        return loss / self.scale.value

    def _sum_tied_gradients(self) -> None:
        """Adds the gradients of a tied embedding's copies in the model's first and last stage."""
        copies = [
            local(weight.grad)
            for stage in self.stages
            if self.tied and (weight := stage.tied_weight()) is not None and weight.requires_grad
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
    after_recompute: After = do_nothing,
    scale: LossScale | None = None,
) -> RankPipeline:
    """Builds this rank's part of the plan, ready to step. Collective. Raises ConfigError."""
    chunks = _chunk_manager(plan, ranks) if plan.chunks is not None else None
    stages = build_stages(plan, ranks, seed, chunks)
    if chunks is not None:
        chunks.built()
        span = chunks.around(span)
    steps: tuple[PipelineStep, ...] = ()
    share = rank_share(plan, ranks.coordinate("dp") // plan.mesh.cp)
    if plan.mesh.pp == 1:
        mean_loss = partial(_mean_loss, stages[0], plan, scale)
        run = partial(_loop, stages[0], mean_loss, plan, share, after_backward, span)
    else:
        schedule, steps = _schedule(plan, ranks, stages, share, scale)
        for stage in steps:
            stage.after_backward = after_backward
            stage.after_recompute = after_recompute
            stage.span = span
        run = partial(_scheduled, schedule, stages, ranks.device, plan, share)
    return RankPipeline(
        stages=stages,
        run=run,
        reads=reads_batches(plan, ranks.coordinate("pp")),
        reads_images=reads_images(plan, ranks.coordinate("pp")),
        tp_mesh=ranks.summed_mesh,
        tied=plan.model.shares_table and plan.mesh.pp > 1,
        tied_group=_tied_group(plan, ranks),
        span=span,
        steps=steps,
        scale=scale,
        chunks=chunks,
    )


def _chunk_manager(plan: Plan, ranks: RankPlace) -> ChunkManager:
    """Builds the chunk manager of this pipeline rank.

    Raises ConfigError, and BudgetError where the chunks on the device exceed the budget.
    """
    group = ranks.dp_mesh.get_group() if plan.mesh.dp > 1 else None
    schedule = rank_chunks_of(plan, ranks.coordinate("pp"))
    copies = ranks.expert_mesh[COPIES] if ranks.expert_mesh is not None else None
    experts = copies.get_group() if copies is not None and copies.size() > 1 else None
    return ChunkManager(schedule, plan.training, ranks.device, group, experts)


def _mean_loss(
    stage: Stage, plan: Plan, scale: LossScale | None, logits: Tensor, targets: Tensor
) -> Tensor:
    """Returns the micro-batch's share of the mean loss over all tokens of the global batch, scaled.

    Every reduction of gradients is therefore a sum.
    """
    loss = local(stage.body.head.loss(logits, targets)) / num_targets(plan)
    return loss if scale is None else loss * scale.value


def _loop(
    stage: Stage,
    mean_loss: Run,
    plan: Plan,
    share: RankShare,
    after_backward: After,
    span: Span,
    batch: Batch | None,
    further: Inputs,
) -> Tensor:
    """Runs forward and backward of one micro-batch after the other, on one pipeline rank."""
    assert batch is not None, "one pipeline rank has the first stage"
    ids, targets = batch
    total = torch.zeros((), device=ids.device)
    if plan.model.mtp_layers:
        further = {**further, TARGETS: targets}
    micro_batches = zip(
        share.split(ids), share.split(targets), _inputs_of_each(share, further), strict=True
    )
    for index, (micro_ids, micro_targets, inputs) in enumerate(micro_batches):
        of_own = span if index < share.own else no_span
        with of_own("F", 0, index):
            loss = mean_loss(stage(micro_ids, **inputs), micro_targets)
        with of_own("B", 0, index):
            loss.backward()
        after_backward()
        total += loss.detach()
    return total


def _inputs_of_each(share: RankShare, inputs: Inputs) -> list[dict[str, Tensor]]:
    """Returns further inputs by micro-batch."""
    parts = {name: share.split(each) for name, each in inputs.items()}
    return [{name: each[k] for name, each in parts.items()} for k in range(share.listed)]


def _scheduled(
    schedule: Runtime,
    stages: Sequence[Stage],
    device: torch.device,
    plan: Plan,
    share: RankShare,
    batch: Batch | None,
    further: Inputs,
) -> Tensor:
    """Runs one step of the runtime.

    Every stage of an external module gets the ids, because it runs the module's own forward pass.
    The last stage of a model that predicts further tokens gets the targets as inputs too.
    """
    losses: list[Tensor] = []
    ends_model = any(stage.ends_model for stage in stages)
    first: list[tuple[Tensor, ...]] = [()] * share.listed
    micro_targets = None
    if batch is not None:
        ids, targets = batch
        if any(stage.begins_model for stage in stages):
            first = [(each,) for each in share.split(ids)]
        if plan.module is not None:
            further = {**further, "ids": ids}
        if plan.model.mtp_layers and plan.module is None and ends_model:
            further = {**further, TARGETS: targets}
        micro_targets = share.split(targets) if ends_model else None
    schedule.step_split(first, _inputs_of_each(share, further), micro_targets, losses)
    return torch.stack(losses).sum().detach() if ends_model else torch.zeros((), device=device)


def _schedule(
    plan: Plan,
    ranks: RankPlace,
    modules: Sequence[Stage],
    share: RankShare,
    scale: LossScale | None,
) -> tuple[Runtime, tuple[PipelineStep, ...]]:
    """Returns the runtime with the plan's action lists, and this rank's stages in it."""
    rank = ranks.coordinate("pp")
    indices = local_stages(plan, rank)
    stages = [
        _pipeline_stage(plan, ranks, k, module) for k, module in zip(indices, modules, strict=True)
    ]
    loss = partial(_spanned_loss, stages[-1], partial(_mean_loss, stages[-1].submod, plan, scale))
    rows = action_rows(plan, share.listed)
    schedule = build_runtime(rows, rank, stages, share.listed, loss, share.own)
    return schedule, tuple(stages)


def _spanned_loss(stage: PipelineStep, mean_loss: Run, logits: Tensor, targets: Tensor) -> Tensor:
    """Computes the loss of the micro-batch that `stage` forwarded last, in a span."""
    with stage.span_of("F", stage.forwarded):
        return mean_loss(logits, targets)


def _pipeline_stage(plan: Plan, ranks: RankPlace, index: int, module: Stage) -> PipelineStep:
    """Builds a stage with given shapes, so that torch runs no extra forward pass."""
    layers = stage_layers(plan)
    ids = torch.empty(
        (plan.pipeline.micro_batch_size, rank_tokens(plan)), dtype=torch.int64, device="meta"
    )
    return PipelineStep(
        module,
        index,
        len(layers),
        ranks.device,
        input_args=border_examples(plan, layers[index - 1][-1]) if index else ids,
        output_args=border_examples(plan, layers[index][-1]),
        group=ranks.mesh["pp"].get_group(),
    )


def _tied_group(plan: Plan, ranks: RankPlace) -> dist.ProcessGroup | None:
    """Returns the ranks of the first and the last stage that hold a tied weight with this rank.

    They have this rank's coordinates on the other axes. Returns None where one rank holds both
    copies.
    """
    ends = [plan.stages[index].rank for index in (0, -1)]
    if not plan.model.shares_table or ends[0] == ends[1]:
        return None
    tied, mesh = None, plan.mesh
    for dp, cp, tp in product(range(mesh.dp), range(mesh.cp), range(mesh.tp)):
        pair = [mesh.rank(pp=end, dp=dp, cp=cp, tp=tp) for end in ends]
        group = dist.new_group(pair)  # collective: every rank makes every group
        tied = group if dist.get_rank() in pair else tied
    return tied
