"""One rank's part of the model: for each of its pipeline stages the layers, placed, recomputed and sharded as planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from executor.divisions import local_shape
from executor.foreign.build import build_foreign
from executor.foreign.cut import ForeignBody
from executor.kept import Recipes
from executor.layout import PlacedLayer, effective_zero, local_stages, stage_layers
from executor.models import build_layer
from executor.place import parse_placement, place_layer
from executor.recompute import recomputed
from executor.sharded import Unit, begin_step, compute_dtype, reduce_gradients, shard_root, shard_unit
from executor.tensors import as_dtensor, local
from planner.plan import Plan
from profiles.model import LayerKind
from profiles.spec import Positions


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Where this process sits: its device, the (pp, dp, tp) mesh of all processes, and its coordinates in it."""

    device: torch.device
    mesh: DeviceMesh

    def coordinate(self, axis: str) -> int:
        return int(self.mesh.get_local_rank(axis))

    @property
    def tp_mesh(self) -> DeviceMesh | None:
        return self.mesh["tp"] if self.mesh["tp"].size() > 1 else None

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        return tuple(self.mesh.get_all_groups())

    @property
    def dp_mesh(self) -> DeviceMesh:
        return self.mesh["dp"]


class Body(nn.Module):
    """The layers of one stage by name, in order."""

    def __init__(self, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x)
        return x

    def tied_weight(self) -> nn.Parameter | None:
        """This stage's copy of the token embedding, if it holds one."""
        if hasattr(self, "embedding"):
            return self.embedding.tokens.weight
        return self.head.lm_head.weight if hasattr(self, "head") else None


class Stage(nn.Module):
    """A stage with local tensors at its borders: this rank's shard of [micro-batch, sequence, hidden], or ids, or logits.

    It is not an FSDP module itself, its `body` is: torch.distributed.pipelining then leaves gathering and reducing alone.
    """

    def __init__(
        self, body: Body | ForeignBody, units: tuple[Unit, ...], enter: Callable[[Tensor], Tensor], ends_model: bool,
    ) -> None:
        super().__init__()
        self.body = body
        self.units = units
        self.enter = enter
        self.ends_model = ends_model

    def forward(self, x: Tensor, **inputs: Tensor) -> Tensor:
        out = self.body(self.enter(x), **inputs)
        return out if self.ends_model else local(out)

    def begin_step(self) -> None:
        begin_step(self.body, self.units)

    def reduce_gradients(self, dp_mesh: DeviceMesh | None, tp_mesh: DeviceMesh | None) -> None:
        reduce_gradients(self.body, self.units, dp_mesh, tp_mesh)

    def tied_weight(self) -> nn.Parameter | None:
        """This stage's copy of the token embedding, if it holds one."""
        return self.body.tied_weight()


def build_stages(plan: Plan, ranks: Ranks, seed: int) -> tuple[Stage, ...]:
    """The stages that this rank runs; without a pipeline all stages are one. Raises ConfigError."""
    stages = stage_layers(plan)
    if plan.mesh.pp == 1:
        return (_build_stage(plan, ranks, seed, tuple(layer for stage in stages for layer in stage)),)
    return tuple(_build_stage(plan, ranks, seed, stages[k]) for k in local_stages(plan, ranks.coordinate("pp")))


def _build_stage(plan: Plan, ranks: Ranks, seed: int, placed: tuple[PlacedLayer, ...]) -> Stage:
    ends_model = placed[-1].kind is LayerKind.HEAD
    if plan.module is not None:
        return Stage(*build_foreign(plan, ranks, seed, _unit_layers(plan, placed)), lambda x: x, ends_model)
    layers: dict[str, nn.Module] = {}
    units: list[Unit] = []
    for group in _unit_layers(plan, placed):
        recipes = {layer.name: Recipes() if ranks.tp_mesh is not None else None for layer in group}
        built = {layer.name: _build_placed_layer(plan, ranks, seed, layer, recipes[layer.name]) for layer in group}
        if len(built) > 1:
            built["head"].lm_head.weight = built["embedding"].tokens.weight
        whole = {layer.name: recomputed(built[layer.name], layer.plan.recompute, layer.name, recipes[layer.name]) for layer in group}
        unit = Unit(layers=tuple(whole.values()), zero=effective_zero(group[0], plan.mesh))
        shard_unit(unit, ranks.dp_mesh, plan.training.precision)
        units.append(unit)
        layers |= whole
    body = Body({layer.name: layers[layer.name] for layer in placed})
    shard_root(body, units, ranks.dp_mesh)
    return Stage(body, tuple(units), _entry(plan, ranks, placed[0]), ends_model)


def _unit_layers(plan: Plan, placed: tuple[PlacedLayer, ...]) -> list[tuple[PlacedLayer, ...]]:
    """Every layer alone, but embedding and head together where they are one Parameter."""
    ends = tuple(layer for layer in placed if layer.kind is not LayerKind.BLOCK)
    if not plan.model.tied_embeddings or len(ends) < 2:
        return [(layer,) for layer in placed]
    return [ends, *((layer,) for layer in placed if layer.kind is LayerKind.BLOCK)]


def _build_placed_layer(plan: Plan, ranks: Ranks, seed: int, placed: PlacedLayer, recipes: Recipes | None) -> nn.Module:
    layer = build_layer(plan.model, plan.training, placed.kind, placed.index, seed, ranks.device)
    if ranks.tp_mesh is not None:
        place_layer(layer, placed.plan.operators, ranks.tp_mesh, placed.name, recipes)
        if placed.kind is LayerKind.HEAD:
            layer.loss.group = ranks.tp_mesh.get_group()
    return layer


def border(plan: Plan, after: PlacedLayer) -> tuple[str, ...]:
    """The placement of the activation that `after`, the last layer of a stage, hands on."""
    embedding = "positions" if plan.model.positions is Positions.LEARNED else "tokens"
    name = {LayerKind.EMBEDDING: embedding, LayerKind.BLOCK: "residual2", LayerKind.HEAD: "lm_head"}[after.kind]
    return after.plan.operators[name].output if plan.mesh.tp > 1 else ()


def _entry(plan: Plan, ranks: Ranks, first: PlacedLayer) -> Callable[[Tensor], Tensor]:
    """What turns a stage's local input into the tensor its first layer expects."""
    mesh = ranks.tp_mesh
    if mesh is None:
        return lambda x: x
    if first.kind is LayerKind.EMBEDDING:
        return lambda ids: as_dtensor(ids, mesh)
    before = [layer for stage in stage_layers(plan) for layer in stage][first.index - 1]
    placement = parse_placement(border(plan, before), before.name)
    return lambda x: DTensor.from_local(x, mesh, placement, run_check=False)


def border_example(plan: Plan, after: PlacedLayer) -> Tensor:
    """The shape and type, without data, of the local tensor that leaves `after`."""
    whole = (plan.pipeline.micro_batch_size, plan.training.seq_length, plan.model.hidden_size)
    shape = local_shape(whole, border(plan, after), plan.mesh.tp)
    return torch.empty(shape, dtype=compute_dtype(plan.training.precision), device="meta", requires_grad=True)
