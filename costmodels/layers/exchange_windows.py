"""The compute of another micro-batch that hides the exchanges of a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from parplan.costmodels.operators.compute import OperatorTime
from parplan.profiles.elementwise import Number
from parplan.profiles.models.operator_graph import Operator, OperatorKind


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeWindows:
    """Seconds of compute of another micro-batch that hide the exchanges of a mixture.

    As Megatron-Core overlaps the forward pass of one micro-batch with the backward pass of another
    (megatron/core/models/common/model_chunk_schedule_plan.py): the dispatches of both passes share
    the experts of both, a combination runs under what comes before the dispatch in the other pass.
    """

    dispatch: Number = 0.0
    combine_forward: Number = 0.0
    combine_backward: Number = 0.0


def exchange_windows(times: Iterable[tuple[Operator, OperatorTime]]) -> ExchangeWindows:
    """Returns the windows of a block whose operators, in their order, have these times."""
    before_forward_s: Number = 0.0
    before_backward_s: Number = 0.0
    experts_s: Number = 0.0
    dispatched = False
    for operator, time in times:
        dispatched = dispatched or operator.kind is OperatorKind.DISPATCH
        if dispatched:
            experts_s = experts_s + time.forward.value_s + time.backward.value_s
        else:
            before_forward_s = before_forward_s + time.forward.value_s
            before_backward_s = before_backward_s + time.backward.value_s
    return ExchangeWindows(
        dispatch=experts_s / 2,
        combine_forward=before_backward_s,
        combine_backward=before_forward_s,
    )
