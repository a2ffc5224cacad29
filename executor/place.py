"""Per-operator placements: every parameter a DTensor on the tensor-parallel mesh, every activation where the plan puts it.

A module is placed by name with two hooks: inputs are redistributed before it runs, its output after. Modules marked
`on_shards` (attention, elementwise) run on local shards, the others on DTensors, which insert what their rule needs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from executor.kept import Recipes, again
from executor.tensors import as_dtensor
from planner.plan import OperatorPlacement
from profiles.errors import ConfigError

_PLACEMENT = re.compile(r"Shard\((\d+)\)@(\w+)")


def parse_placement(entries: tuple[str, ...], where: str) -> tuple[Placement, ...]:
    """The plan's `("Shard(0)@tp",)` as DTensor placements over the tp mesh; nothing is Replicate. Raises ConfigError."""
    if not entries:
        return (Replicate(),)
    match = _PLACEMENT.fullmatch(entries[0])
    if len(entries) > 1 or match is None or match[2] != "tp":
        raise ConfigError(f"{where}: placement {list(entries)} is not one Shard(d)@tp", hint="operators are divided over the tp axis only")
    return (Shard(int(match[1])),)


def place_layer(
    layer: nn.Module, operators: Mapping[str, OperatorPlacement], mesh: DeviceMesh, where: str, recipes: Recipes | None = None,
) -> None:
    """Give every operator of `layer` its placements over `mesh`. Raises ConfigError for a placement it cannot have.

    With `recipes` an input that is gathered is kept as this rank's part and gathered again in the backward pass, as
    Megatron-LM does under sequence parallelism (Korthikanti et al. 2022, section 4.2.2).
    """
    for name, module in layer.named_children():
        _place_operator(module, operators[name], mesh, f"{where}.operators.{name}", recipes or Recipes())


def _place_operator(module: nn.Module, placement: OperatorPlacement, mesh: DeviceMesh, where: str, recipes: Recipes) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        wanted = parse_placement(placement.parameters.get(name, ()), where)
        # src_data_rank=None: every rank made the same values, so nothing is broadcast
        shard = distribute_tensor(parameter.data, mesh, wanted, src_data_rank=None)
        module.register_parameter(name, nn.Parameter(shard))
    inputs, output = parse_placement(placement.input, where), parse_placement(placement.output, where)
    on_shards = getattr(module, "on_shards", False)

    def before(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        # a plain tensor is token ids or targets, which no plan divides
        placed = tuple(_placed(arg, mesh, inputs, recipes) if isinstance(arg, DTensor) else as_dtensor(arg, mesh) for arg in args)
        return tuple(arg.to_local() for arg in placed) if on_shards else placed

    def after(_: nn.Module, args: Any, out: Tensor) -> DTensor:
        if on_shards:
            return DTensor.from_local(out, mesh, output, run_check=False)
        return out.redistribute(mesh, output)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


def _placed(tensor: DTensor, mesh: DeviceMesh, wanted: tuple[Placement, ...], recipes: Recipes) -> DTensor:
    """`tensor` where it is wanted, with a recipe if that gathered it."""
    placed = tensor.redistribute(mesh, wanted)
    if tensor.placements != wanted and all(placement.is_replicate() for placement in wanted):
        part = recipes.keep(tensor)
        recipes.remember(placed, lambda: again(part).redistribute(mesh, wanted))
    return placed
