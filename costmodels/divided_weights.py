"""Weights of blocks over the data-parallel ranks: the layouts that can have them."""

from __future__ import annotations

from parplan.costmodels.communication.mesh import MeshOrder
from parplan.costmodels.strategy import ParallelLayout
from parplan.profiles.models.spec import ModelSpec


def illegal_over_data(layout: ParallelLayout, model: ModelSpec) -> str | None:
    """Returns why blocks of a layout cannot divide weights over data-parallel ranks, or None."""
    if layout.mesh.dp == 1:
        return "there is one data-parallel rank"
    if model.num_experts:
        return "experts are divided over data-parallel ranks by expert parallelism"
    if layout.mesh.cp > 1:
        return "context-parallel ranks hold the same weights as data-parallel ranks"
    if layout.tp_overlap:
        return "sub-pipelined tensor parallelism divides every operator as Megatron does"
    if layout.chunked or layout.states_on_host:
        return "chunks and states on the host are gathered over all data-parallel ranks"
    if layout.splits_backward:
        return f"{layout.schedule} defers the gradients of weights, which is not priced for it"
    if layout.mesh.order is not MeshOrder.PP_DP_TP:
        return f"data-parallel ranks are no neighbours in the order {layout.mesh.order}"
    return None
