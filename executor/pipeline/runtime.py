"""torch.distributed.pipelining's runtime with the action lists of a plan, and the stages that it
runs.

Where backwards are split, the runtime computes the gradient of a stage's input first and those of
its weights later. A stage must not end in a view then, whose part of the graph it could not let go.
It knows no recompute ahead of a gradient: that is put in.
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
from parplan.executor.pipeline.recompute_action import Early
from parplan.executor.sharding.zero_units import settle_weight_gradients

After = Callable[[], None]
Span = Callable[[str, int, int], AbstractContextManager[Any]]
_Entry = tuple[int, ActionKind, int]  # virtual stage, work, micro-batch


def nothing() -> None:
    """What is called, by default, after what nobody asked about."""


def no_span(work: str, stage: int, micro_batch: int) -> AbstractContextManager[Any]:
    """What surrounds each computation ("F", "R", "B", "I" or "W" of a stage and micro-batch) by
    default: nothing.

    A forward that ends in the loss has two spans: the stage's and the loss's.
    """
    return nullcontext()


class PipelineStep(LeanStage):
    """A pipeline stage that says what it computes, and when the gradients of a micro-batch's
    weights are there.
    """

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
        """What the backward pass of the micro-batch needs and the forward pass did not keep, ahead
        of it.
        """
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
    """The runtime of pipeline rank `rank`, which has `stages`, with all ranks' lists; it completes
    them with sends and receives.
    """
    lists = [parse_row(row, index) for index, row in enumerate(rows)]
    for stage in stages:
        stage.early = _early(stage, lists[rank])
    schedule = _PipelineScheduleRuntime(list(stages), num_micro_batches, loss, scale_grads=False)
    schedule._prepare_schedule_with_comms(  # what `_load_csv` does with a file
        {index: list(map(_action, filter(_is_of_torch, each))) for index, each in enumerate(lists)}
    )
    _add_recompute(schedule, stages, lists[rank])
    return schedule


def _early(stage: PipelineStep, own: Sequence[_Entry]) -> Early:
    return Early(
        stage.submod.units,
        frozenset(
            i for k, work, i in own if k == stage.stage_index and work is ActionKind.RECOMPUTE
        ),
    )


def _action(entry: _Entry) -> _Action:
    """In torch's words."""
    stage, work, micro_batch = entry
    return _Action(stage, _ComputationType(work.value), micro_batch)


def _is_of_torch(entry: _Entry) -> bool:
    return entry[1] is not ActionKind.RECOMPUTE


def _add_recompute(
    schedule: _PipelineScheduleRuntime, stages: Sequence[PipelineStep], own: Sequence[_Entry]
) -> None:
    """Put the recomputes of this rank's list where they are in it, before what the next computation
    waits for.

    torch's runtime has none; what it does not know it looks up by its type, and its own receives
    only start there.
    """
    by_index, rest, completed = (
        {stage.stage_index: stage for stage in stages},
        iter(own),
        list[_Action](),
    )
    for action in schedule.pipeline_order_with_comms[schedule.rank]:
        while action.is_compute_op and not _is_of_torch(entry := next(rest)):
            completed.append(_Action(entry[0], entry[1], entry[2]))
        completed.append(action)
    schedule.pipeline_order_with_comms[schedule.rank] = completed
    schedule._comp_type_to_function_map[ActionKind.RECOMPUTE] = lambda action, _: by_index[
        action.stage_index
    ].recompute_one_chunk(action.microbatch_index)
