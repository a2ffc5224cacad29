"""torch.distributed.pipelining's runtime for the action lists of a plan, and its stages.

Where backwards are split, the runtime computes the gradient of a stage's input first and those of
its weights later. A stage must then not end in a view, because the runtime could not free its part
of the graph. The runtime knows no recompute ahead of a gradient; this file adds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch.distributed.pipelining.schedules import (
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
)

from parplan.costmodels.schedules.actions import ActionKind, parse_row
from parplan.executor.pipeline.messages import LeanStage
from parplan.executor.pipeline.recompute_action import StageRecompute
from parplan.executor.sharding.zero_units import settle_weight_gradients

After = Callable[[], None]
Span = Callable[[str, int, int], AbstractContextManager[Any]]
_Entry = tuple[int, ActionKind, int]  # virtual stage, work, micro-batch


def do_nothing() -> None:
    """Does nothing; the default of a callback."""


def no_span(work: str, stage: int, micro_batch: int) -> AbstractContextManager[Any]:
    """Returns an empty context; the default around each computation of a stage and micro-batch.

    The computations are "F", "R", "B", "I" and "W". A forward pass that ends in the loss has two
    spans: the stage's and the loss's.
    """
    return nullcontext()


class PipelineStep(LeanStage):
    """A pipeline stage that reports its computations.

    `after_backward` is called when the gradients of a micro-batch's weights are there.
    """

    after_backward: After
    after_recompute: After
    span: Span
    early: StageRecompute
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
        """Recomputes unsaved tensors of the micro-batch ahead of its backward pass."""
        with self.span("R", self.stage_index, chunk_id):
            self.early.recompute(chunk_id)
        self.after_recompute()

    def backward_one_chunk(
        self, bwd_chunk_id: int, *args: Any, full_backward: bool = True, **kwargs: Any
    ) -> None:
        with (
            self.span("B" if full_backward else "I", self.stage_index, bwd_chunk_id),
            self.early.backward(bwd_chunk_id),
        ):
            super().backward_one_chunk(bwd_chunk_id, *args, full_backward=full_backward, **kwargs)
        if full_backward:
            self.after_backward()

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with self.span("W", self.stage_index, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
            settle_weight_gradients(self.submod.body)
        self.after_backward()


def build_runtime(
    rows: Sequence[str],
    rank: int,
    stages: Sequence[PipelineStep],
    num_micro_batches: int,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> _PipelineScheduleRuntime:
    """Builds the runtime of pipeline rank `rank`, which has `stages`, from all ranks' lists.

    The runtime completes the lists with sends and receives.
    """
    lists = [parse_row(row, index) for index, row in enumerate(rows)]
    for stage in stages:
        stage.early = _stage_recompute(stage, lists[rank])
    schedule = _PipelineScheduleRuntime(list(stages), num_micro_batches, loss, scale_grads=False)
    schedule._prepare_schedule_with_comms(  # as `_load_csv` does with a file
        {index: list(map(_action, filter(_is_of_torch, each))) for index, each in enumerate(lists)}
    )
    _add_recompute(schedule, stages, lists[rank])
    return schedule


def _stage_recompute(stage: PipelineStep, entries: Sequence[_Entry]) -> StageRecompute:
    here = [entry for entry in entries if entry[0] == stage.stage_index]
    recomputed = (i for _, work, i in here if work is ActionKind.RECOMPUTE)
    return StageRecompute(stage.submod.units, frozenset(recomputed))


def _action(entry: _Entry) -> _Action:
    """Converts an entry to torch's type."""
    stage, work, micro_batch = entry
    return _Action(stage, _ComputationType(work.value), micro_batch)


def _is_of_torch(entry: _Entry) -> bool:
    return entry[1] is not ActionKind.RECOMPUTE


def _add_recompute(
    schedule: _PipelineScheduleRuntime, stages: Sequence[PipelineStep], entries: Sequence[_Entry]
) -> None:
    """Inserts the recomputes of this rank's list, before the receives of the next computation.

    torch's runtime has none; it looks up an unknown action by its type, and starts its receives
    only there.
    """
    by_index = {stage.stage_index: stage for stage in stages}
    rest = iter(entries)
    completed: list[_Action] = []
    for action in schedule.pipeline_order_with_comms[schedule.rank]:
        while action.is_compute_op and not _is_of_torch(entry := next(rest)):
            completed.append(_Action(entry[0], entry[1], entry[2]))
        completed.append(action)
    schedule.pipeline_order_with_comms[schedule.rank] = completed

    def recompute(action: Any, _: object) -> None:
        by_index[action.stage_index].recompute_one_chunk(action.microbatch_index)

    schedule._comp_type_to_function_map[ActionKind.RECOMPUTE] = recompute
