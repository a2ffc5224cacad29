"""The tensors that cross from one stage to the next, with the parts of them that a rank has."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from parplan.executor.placed_layers import (
    PlacedLayer,
    layer_class_of,
    rank_tokens,
    stage_layers,
)
from parplan.executor.rules.divisions import (
    GRID_STREAM,
    SEQUENCE,
    WHOLE,
    Entries,
    local_shape,
    tp_degrees,
)
from parplan.executor.sharding.place import of_axis, parse_placement
from parplan.executor.sharding.rank_place import RankPlace
from parplan.executor.sharding.zero_units import compute_dtype
from parplan.executor.tensors import as_dtensor
from parplan.planner.plan.plan import Plan
from parplan.profiles.models.operator_graph import LayerClass, LayerKind, ModelPart
from parplan.profiles.models.transformer import build_graph

Enter = Callable[[Tensor], Tensor]


def border(plan: Plan, after: PlacedLayer) -> Entries:
    """Returns the placement of the output of the layer `after` where it leaves a stage.

    The embedding leaves it as blocks read it, however its tables are divided.
    """
    if plan.mesh.tp == 1:
        return WHOLE
    if plan.mesh.tp_rows > 1:
        return GRID_STREAM
    if after.kind is LayerKind.EMBEDDING:
        return SEQUENCE if after.plan.sequence_parallel else WHOLE
    last = layer_class_of(plan, after.plan).operators[-1]
    return of_axis(after.plan.operators[last.name].output, "tp")


def entries(plan: Plan, ranks: RankPlace, first: PlacedLayer) -> tuple[Enter, ...]:
    """Returns the conversions of a stage's local inputs to the stack before its first layer."""
    mesh = ranks.tp_mesh
    if mesh is None:
        return (_unchanged,) * len(_makers(plan, first.index - 1))
    if first.kind is LayerKind.EMBEDDING:
        return (lambda ids: as_dtensor(ids, mesh),)

    def enter(maker: PlacedLayer) -> Enter:
        placement = parse_placement(border(plan, maker), maker.name)
        return lambda x: DTensor.from_local(x, mesh, placement, run_check=False)

    return tuple(enter(maker) for maker in _makers(plan, first.index - 1))


def _unchanged(x: Tensor) -> Tensor:
    return x


def border_examples(plan: Plan, after: PlacedLayer) -> tuple[Tensor, ...]:
    """Returns tensors without data of the shapes and types that leave `after` on this rank.

    Nothing leaves the head, whose example has the shape of its states. A frozen tower needs no
    gradient of its tensor.
    """
    dtype = compute_dtype(plan.training.precision)
    return tuple(
        torch.empty(shape, dtype=dtype, device="meta", requires_grad=has_gradient)
        for shape, has_gradient in _shapes(plan, after)
    )


def _shapes(plan: Plan, after: PlacedLayer) -> Iterator[tuple[tuple[int, ...], bool]]:
    graph = build_graph(plan.model, plan.training, plan.pipeline.micro_batch_size)
    text = (plan.pipeline.micro_batch_size, rank_tokens(plan), plan.model.hidden_size)
    if after.kind is LayerKind.HEAD:
        yield text, True
        return
    for maker in _makers(plan, after.index):
        made_by = graph.layer_class(graph.key(maker.index))
        in_tower = made_by.part in (ModelPart.PATCHES, ModelPart.TOWER)
        whole = tuple(dim.size for dim in graph.tower_boundary.dims) if in_tower else text
        if plan.model.tower is not None and plan.model.tower.attended and _ends_tower(made_by):
            whole = tuple(dim.size for dim in graph.attended.dims)
        shape = local_shape(whole, border(plan, maker), **tp_degrees(plan.mesh))
        yield shape, made_by.gradient or not in_tower


def _makers(plan: Plan, after: int) -> tuple[PlacedLayer, ...]:
    """Returns the layers whose outputs are the stack behind the layer of number `after`."""
    layers = [layer for stage in stage_layers(plan) for layer in stage]
    if after < 0:
        return (layers[0],)  # before the embedding there are token ids
    graph = build_graph(plan.model, plan.training, 1)
    tower = plan.model.tower
    if graph.part_behind(after + 1) in (ModelPart.TOWER, ModelPart.PROJECTOR):
        return layers[0], layers[after]
    if tower is None or not tower.attended or after == 0:
        return (layers[after],)
    last = 1 + plan.model.num_blocks - plan.model.num_layers - 1  # of the tower
    return layers[last], layers[0 if after == last else after]


def _ends_tower(layer: LayerClass) -> bool:
    return layer.part is ModelPart.PROJECTOR
