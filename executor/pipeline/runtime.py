"""torch.distributed.pipelining's runtime for the action lists of a plan, and its stages.

Where backwards are split, the runtime computes the gradient of a stage's input first and those of
its weights later. A stage must then not end in a view, because the runtime could not free its part
of the graph. The runtime knows no recompute ahead of a gradient and no exchange of two messages;
this file adds them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.schedules import (
    _Action,
    _batch_p2p,
    _ComputationType,
    _PipelineScheduleRuntime,
    _wait_batch_p2p,
)

from parplan.costmodels.schedules.actions import ActionKind
from parplan.costmodels.schedules.instructions import (
    Exchange,
    Instruction,
    Message,
    StagePass,
    instruction_lists,
)
from parplan.executor.pipeline.messages import LeanStage
from parplan.executor.pipeline.recompute_action import StageRecompute
from parplan.executor.sharding.zero_units import settle_weight_gradients, weight_gradients
from parplan.profiles.profiler.gpus import is_gpu

After = Callable[[], None]
Span = Callable[[str, int, int], AbstractContextManager[Any]]
_MESSAGES = {  # by whether this rank sends, and whether it is a gradient
    (True, False): _ComputationType.SEND_F,
    (False, False): _ComputationType.RECV_F,
    (True, True): _ComputationType.SEND_B,
    (False, True): _ComputationType.RECV_B,
}


class _Added(StrEnum):
    """The kinds of instructions that torch's runtime lacks."""

    RECOMPUTE = "R"
    EXCHANGE = "EXCHANGE"


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

    `after_backward` is called when the gradients of a micro-batch's weights are there. `in_flight`
    is the most micro-batches that the stage held at once, `in_flight_on_rank` the most of all
    stages in `on_rank` after a forward pass of this one. Micro-batches from number `own` on are
    empty.
    """

    after_backward: After
    after_recompute: After
    span: Span
    early: StageRecompute
    on_rank: Sequence[PipelineStep]
    own: int
    forwarded = -1
    in_flight = 0
    in_flight_on_rank = 0

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.forwarded = fwd_chunk_id
        with self.span_of("F", fwd_chunk_id), self.early.forward(fwd_chunk_id):
            out = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self.in_flight = max(self.in_flight, self.num_held)
        held = sum(stage.num_held for stage in self.on_rank)
        self.in_flight_on_rank = max(self.in_flight_on_rank, held)
        return out

    def span_of(self, work: str, micro_batch: int) -> AbstractContextManager[Any]:
        """Returns the span of a computation; that of an empty micro-batch is not reported."""
        if micro_batch >= self.own:
            return nullcontext()
        return self.span(work, self.stage_index, micro_batch)

    @property
    def num_held(self) -> int:
        """The micro-batches between their forward pass and the end of their backward pass."""
        held = (*self.fwd_cache, *self.backward_state)
        return sum(micro_batch < self.own for micro_batch in held)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward_maybe_with_nosync(*args, **kwargs)
        return tuple(map(_own, out)) if isinstance(out, tuple) else _own(out)

    def recompute_one_chunk(self, chunk_id: int) -> None:
        """Recomputes unsaved tensors of the micro-batch ahead of its backward pass."""
        with self.span_of("R", chunk_id):
            self.early.recompute(chunk_id)
        self.after_recompute()

    def backward_one_chunk(
        self, bwd_chunk_id: int, *args: Any, full_backward: bool = True, **kwargs: Any
    ) -> None:
        with (
            self.span_of("B" if full_backward else "I", bwd_chunk_id),
            self.early.backward(bwd_chunk_id),
        ):
            super().backward_one_chunk(bwd_chunk_id, *args, full_backward=full_backward, **kwargs)
        if full_backward:
            self.after_backward()

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        if backward_type != "weight":
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        weight_gradients(self.submod.body, self.submod.parameters(), bwd_kwargs["param_groups"])
        return (), None

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with self.span_of("W", bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
            settle_weight_gradients(self.submod.body)
        self.after_backward()


def _own(out: Tensor) -> Tensor:
    """Returns an output of a stage that is neither a view nor an input that only passes through."""
    return out.clone() if out._is_view() or (out.is_leaf and out.requires_grad) else out


class Runtime(_PipelineScheduleRuntime):
    """torch's runtime with recompute ahead of a gradient, and with messages as one operation each.

    All tensors of a message, or of both messages of an exchange, are posted together. An exchange
    is over before its receiver computes; other messages are held until the end of the step.
    """

    def __init__(self, stages: list[PipelineStep], *args: Any, **kwargs: Any) -> None:
        super().__init__(stages, *args, **kwargs)
        self._by_index = {stage.stage_index: stage for stage in stages}
        self._sent: list[list[dist.Work]] = []
        # torch looks up a kind of action here before it uses its own
        self._comp_type_to_function_map[_Added.RECOMPUTE] = self._recompute
        for kind in (_Added.EXCHANGE, *_MESSAGES.values()):
            self._comp_type_to_function_map[kind] = self._post

    def step_split(
        self,
        args: list[tuple[Tensor, ...]],
        inputs: list[dict[str, Tensor]],
        targets: Sequence[Tensor] | None,
        losses: list[Tensor],
    ) -> None:
        """Runs a step as torch's `step`, whose micro-batches may have different sizes."""
        for stage in self._stages:
            stage.has_backward = True
            stage.clear_runtime_states()
        self._step_microbatches(args, inputs, targets and list(targets), losses, False)

    def _step_microbatches(self, *args: Any, **kwargs: Any) -> Any:
        out = super()._step_microbatches(*args, **kwargs)
        while self._sent:
            _wait_batch_p2p(self._sent.pop())
        return out

    def _recompute(self, action: Any, _: object) -> None:
        self._by_index[action.stage_index].recompute_one_chunk(action.microbatch_index)

    def _post(self, action: Any, _: object) -> None:
        """Posts a message, or both messages of an exchange."""
        messages = action.sub_actions or (action,)
        operations = [
            operation
            for each in messages
            for operation in _sent_or_received(self._by_index[each.stage_index], each)
        ]
        together = dist.batch_isend_irecv if len(operations) > 1 else _batch_p2p
        works = together(operations)
        last = messages[-1]  # the one that is received, if any
        if last.computation_type is _ComputationType.RECV_F:
            self.fwd_recv_ops[last.stage_index, last.microbatch_index] = works
        elif last.computation_type is _ComputationType.RECV_B:
            self.bwd_recv_ops[last.stage_index, last.microbatch_index] = works
        else:
            self._sent.append(works)


def most_in_flight(steps: Sequence[PipelineStep]) -> int | None:
    """Returns the most micro-batches that all stages of a rank held at once; None without any."""
    return max((step.in_flight_on_rank for step in steps), default=None)


def build_runtime(
    rows: Sequence[str],
    rank: int,
    stages: Sequence[PipelineStep],
    num_micro_batches: int,
    loss: Callable[[Tensor, Tensor], Tensor],
    own: int | None = None,
) -> Runtime:
    """Builds the runtime of pipeline rank `rank`, which has `stages`, from all ranks' lists.

    The lists have `num_micro_batches`, of which those from number `own` on are empty. Collective
    over the pipeline ranks.
    """
    lists = instruction_lists(rows)
    _open_communicator(stages[0])
    for stage in stages:
        stage.early = _stage_recompute(stage, lists[rank])
        stage.on_rank = stages
        stage.own = num_micro_batches if own is None else own
    schedule = Runtime(list(stages), num_micro_batches, loss, scale_grads=False)
    schedule._prepare_schedule_with_comms(
        {index: list(map(_action, each)) for index, each in enumerate(lists)},
        format="compute_comms",
    )
    return schedule


def _open_communicator(stage: PipelineStep) -> None:
    """Makes NCCL's communicator of all pipeline ranks, which exchanges use.

    It is made by all of them together, but some may have no exchange. Untested: no two GPUs were at
    hand.
    """
    if is_gpu(stage.device):
        dist.all_reduce(torch.zeros(1, device=stage.device), group=stage.group)


def _stage_recompute(stage: PipelineStep, instructions: Sequence[Instruction]) -> StageRecompute:
    recomputed = (
        each.micro_batch
        for each in instructions
        if isinstance(each, StagePass)
        and each.stage == stage.stage_index
        and each.work is ActionKind.RECOMPUTE
    )
    return StageRecompute(stage.submod.units, frozenset(recomputed))


def _action(instruction: Instruction) -> _Action:
    """Converts an instruction to torch's type; a kind that torch lacks has a name of its own."""
    if isinstance(instruction, Exchange):
        both = (_action(instruction.send), _action(instruction.receive))
        return _Action(instruction.send.stage, _Added.EXCHANGE, instruction.send.micro_batch, both)
    if isinstance(instruction, Message):
        kind = _MESSAGES[instruction.sends, instruction.gradient]
    elif instruction.work is ActionKind.RECOMPUTE:
        kind = _Added.RECOMPUTE
    else:
        kind = _ComputationType(instruction.work.value)
    return _Action(instruction.stage, kind, instruction.micro_batch)


def _sent_or_received(stage: PipelineStep, action: _Action) -> list[dist.P2POp]:
    """Returns the sends or receives of all tensors of one message.

    Nothing is sent of an empty micro-batch, whose receiver makes the tensors itself.
    """
    operations: Callable[[int], list[dist.P2POp]] = {
        _ComputationType.SEND_F: stage.get_fwd_send_ops,
        _ComputationType.RECV_F: stage.get_fwd_recv_ops,
        _ComputationType.SEND_B: stage.get_bwd_send_ops,
        _ComputationType.RECV_B: stage.get_bwd_recv_ops,
    }[action.computation_type]
    posted = operations(action.microbatch_index)
    if action.microbatch_index < stage.own:
        return posted
    stage.empty_buffers(action.microbatch_index)
    return []
