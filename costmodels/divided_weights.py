"""Weights over two axes: the layouts that can have them over data-parallel ranks or a grid."""

from __future__ import annotations

from parplan.costmodels.communication.mesh import MeshOrder
from parplan.costmodels.strategy import ParallelLayout
from parplan.profiles.models.blocks import QkNorm
from parplan.profiles.models.spec import ModelSpec, TrainingSpec


def illegal_over_data(layout: ParallelLayout, model: ModelSpec) -> str | None:
    """Returns why blocks of a layout cannot divide weights over data-parallel ranks, or None."""
    if layout.mesh.dp == 1:
        return "there is one data-parallel rank"
    if model.num_experts:
        return "experts are divided over data-parallel ranks by expert parallelism"
    if layout.mesh.cp > 1:
        return "context-parallel ranks hold the same weights as data-parallel ranks"
    sizes = [size for name, size in model.tensor_parallel_sizes if size and name != "vocabulary"]
    if all(size % layout.mesh.dp for size in sizes):
        return f"dp {layout.mesh.dp} divides no heads and no width of the model's weights"
    if layout.mesh.tp_rows > 1:
        return "the rows of a grid of tensor-parallel ranks divide the batch already"
    if layout.tp_overlap:
        return "sub-pipelined tensor parallelism divides every operator as Megatron does"
    if layout.chunked or layout.states_on_host:
        return "chunks and states on the host are gathered over all data-parallel ranks"
    if layout.splits_backward:
        return f"{layout.schedule} defers the gradients of weights, which is not priced for it"
    if layout.mesh.order is not MeshOrder.PP_DP_TP:
        return f"data-parallel ranks are no neighbours in the order {layout.mesh.order}"
    return None


def illegal_grid(layout: ParallelLayout, model: ModelSpec, training: TrainingSpec) -> str | None:
    """Returns why a grid of tensor-parallel ranks cannot divide a model, or None (EQUATIONS T7)."""
    rows, columns = layout.mesh.tp_rows, layout.mesh.tp_columns
    if rows == 1:
        return None
    grid = f"a grid of {rows} x {columns} tensor-parallel ranks"
    if layout.sequence_parallel or layout.tp_overlap or layout.weights_over_data:
        return f"{grid} divides activations by batch and features alone"
    if layout.chunked or layout.states_on_host or layout.splits_backward:
        return f"{grid} is not priced with chunks, states on the host or split backward passes"
    if training.fine_tuning is not None or _has_further_parts(model):
        return f"{grid} divides dense transformers without further parts, trained as a whole"
    if layout.micro_batch_size % rows:
        return f"{rows} rows do not divide the micro-batch of {layout.micro_batch_size}"
    features = model.num_heads * model.head_dim
    for parts, sizes in (
        (rows, (model.hidden_size, features, model.ffn_hidden_size)),
        (columns, (model.hidden_size, model.num_kv_heads, model.ffn_hidden_size)),
    ):
        for size in sizes:
            if size % parts:
                return f"{grid} does not divide {size} features or heads by {parts}"
    return None


def _has_further_parts(model: ModelSpec) -> bool:
    parts = model.latent, model.state_space, model.delta_rule, model.tower, model.shared_experts
    further = model.num_experts or model.mtp_layers or model.qk_norm is not QkNorm.NONE
    return bool(further) or any(part is not None for part in parts)
