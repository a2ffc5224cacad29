"""One stage of an external module on this rank.

Its parts get their values and are divided, recomputed and sharded as planned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from parplan.executor.external.external_body import ExternalBody, cut_model, replace_submodule
from parplan.executor.external.external_source import ExternalSource, open_source
from parplan.executor.external.parallel_styles import (
    place_block,
    place_embedding,
    place_head,
    split_sequence,
)
from parplan.executor.external.structure import Structure, find_structure
from parplan.executor.memory.early_recompute import checkpointed
from parplan.executor.placed_layers import PlacedLayer
from parplan.executor.sharding.rank_place import RankPlace
from parplan.executor.sharding.zero_units import Unit, compute_dtype, shard_root
from parplan.planner.plan.plan import Plan
from parplan.profiles.models.operator_graph import LayerKind


@dataclass(frozen=True, slots=True, kw_only=True)
class _Site:
    """The shared inputs for building the layers of one stage."""

    plan: Plan
    ranks: RankPlace
    source: ExternalSource
    structure: Structure

    @property
    def model(self) -> nn.Module:
        return self.source.model

    def part(self, name: str) -> nn.Module:
        return self.model.get_submodule(name)


def build_external(
    plan: Plan, ranks: RankPlace, seed: int, groups: Sequence[tuple[PlacedLayer, ...]]
) -> tuple[ExternalBody, tuple[Unit, ...]]:
    """Builds the body of a stage with the layers of `groups`, each of which is one unit.

    Raises ConfigError.
    """
    source = open_source(plan, seed)
    structure = find_structure(source.model, plan)
    site = _Site(plan=plan, ranks=ranks, source=source, structure=structure)
    layers = [layer for group in groups for layer in group]
    units = [_build_unit(site, group) for group in groups]
    held = {name for layer in layers for name in site.structure.names(layer.kind, layer.index)}
    ends_model = any(layer.kind is LayerKind.HEAD for layer in layers)
    body = ExternalBody(source.model, _tied_here(site, held), ends_model)
    divided = ranks.tp_mesh is not None and layers[0].plan.sequence_parallel
    split = partial(split_sequence, ranks.tp_mesh) if divided else None
    cut_model(body, site.structure, held, compute_dtype(plan.training.precision), split)
    _move_buffers(source.model, ranks.device)
    if ranks.tp_mesh is not None and hasattr(body, "head"):
        body.head.loss.group = ranks.tp_mesh.get_group()
    shard_root(body, units, ranks.dp_mesh)
    return body, tuple(units)


def _build_unit(site: _Site, group: tuple[PlacedLayer, ...]) -> Unit:
    modules: list[nn.Module] = []
    for layer in group:
        names = site.structure.names(layer.kind, layer.index)
        for name in names:
            site.source.fill(name, site.part(name))
        if layer.kind is LayerKind.HEAD:
            _tie(site, fill=len(group) == 1)
        for name in names:
            _move(site.part(name), site.ranks.device)
        _divide(site, layer, [site.part(name) for name in names])
        if layer.plan.recompute:
            replace_submodule(site.model, names[0], checkpointed(site.part(names[0])))
        modules += [site.part(name) for name in names]
    if len(group) > 1:
        _tie(site, fill=False)
    return site.ranks.unit(site.plan, group[0], tuple(modules))


def _tie(site: _Site, *, fill: bool) -> None:
    """Gives the head the token table's Parameter.

    With `fill` it also gives the table its values, where the table is on another stage.
    """
    if site.structure.tied is None:
        return
    table, weight = site.structure.tied
    if fill:
        site.source.fill(table[0], site.part(table[0]))
    site.part(weight[0]).register_parameter(weight[1], getattr(site.part(table[0]), table[1]))


def _divide(site: _Site, layer: PlacedLayer, parts: list[nn.Module]) -> None:
    mesh = site.ranks.tp_mesh
    if mesh is None:
        return
    sequence = layer.plan.sequence_parallel
    if layer.kind is LayerKind.EMBEDDING:
        place_embedding(parts, mesh)
    elif layer.kind is LayerKind.HEAD:
        place_head(parts, mesh, sequence=sequence)
    else:
        inputs = site.structure.trace.inputs
        place_block(parts[0], site.source.styles, inputs, mesh, sequence=sequence)


def _tied_here(site: _Site, held: set[str]) -> tuple[nn.Module, str] | None:
    """Returns the module of this stage that holds a tied weight, and the weight's name in it.

    The token table comes first if it is here.
    """
    for name, key in site.structure.tied or ():
        if any(f"{name}.".startswith(f"{part}.") for part in held):
            return site.part(name), key
    return None


def _move(module: nn.Module, device: torch.device) -> None:
    """Moves a module that is not on the device; the dry run's tensors cannot be swapped for it."""
    if any(each.device != device for each in (*module.parameters(), *module.buffers())):
        module.to(device)


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
