"""Per-operator placements: every parameter a DTensor on the tensor-parallel mesh, every activation
where the plan puts it.

A module is placed by name with two hooks: inputs are redistributed before it runs, its output is
given its placement after. Modules marked `on_shards` compute on local shards, and what that makes
of their outputs and gradients is said here:

- a weight divided by rows (`Shard(0)`) reads whole inputs, and their gradients on the ranks are
partial sums;
- a weight divided by columns (`Shard(1)`) gives partial sums, reduced to the output's placement
before the bias is added;
- a whole weight over divided sequences or tokens has partial sums as gradients. They are called
whole until the end of
  the step, where `parplan.executor.sharding.zero_units.reduce_gradients` adds them over the
  tensor-parallel ranks, once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from parplan.executor.memory.saved_tensors import Recipes
from parplan.executor.models.mixture_of_experts import MixtureOfExperts
from parplan.executor.models.transformer_layers import Linear
from parplan.executor.sharding.overlap import linear_in_halves
from parplan.executor.tensors import as_dtensor, local
from parplan.planner.plan.plan import OperatorPlacement
from parplan.profiles.errors import ConfigError

_PLACEMENT = re.compile(r"Shard\((\d+)\)@(\w+)")

Over = tuple[Placement, ...]  # one entry, for the tp axis


def parse_placement(entries: tuple[str, ...], where: str) -> Over:
    """The plan's `("Shard(0)@tp",)` as DTensor placements over the tp mesh; nothing is Replicate.
    Raises ConfigError.
    """
    if not entries:
        return (Replicate(),)
    match = _PLACEMENT.fullmatch(entries[0])
    if len(entries) > 1 or match is None or match[2] != "tp":
        raise ConfigError(
            f"{where}: placement {list(entries)} is not one Shard(d)@tp",
            hint="operators are divided over the tp axis only",
        )
    return (Shard(int(match[1])),)


def place_layer(
    layer: nn.Module,
    operators: Mapping[str, OperatorPlacement],
    mesh: DeviceMesh,
    where: str,
    recipes: Recipes | None = None,
    *,
    in_halves: bool = False,
) -> None:
    """Give every operator of `layer` its placements over `mesh`. Raises ConfigError for a placement
    it cannot have.

    `in_halves`: a product that is divided by rows or columns sums one half of a micro-batch under
    the product of the other.

    With `recipes` an input that is gathered is kept as this rank's part and gathered again in the
    backward pass, as Megatron-LM does under sequence parallelism (Korthikanti et al. 2022, section
    4.2.2). Any other input is kept as the operator reads it, unless it is made again: then what
    brought it there runs again too.
    """
    for name, module in layer.named_children():
        placement = (
            module.placement(operators) if isinstance(module, MixtureOfExperts) else operators[name]
        )
        _place_operator(
            module, placement, mesh, f"{where}.operators.{name}", recipes or Recipes(), in_halves
        )


def place_parameters(
    layer: nn.Module, operators: Mapping[str, OperatorPlacement], mesh: DeviceMesh, where: str
) -> None:
    """The same for the parameters alone: the operators of `layer` compute on what this rank holds,
    and nothing is sent.
    """
    for name, module in layer.named_children():
        weights = _place_parameters(module, operators[name], mesh, f"{where}.operators.{name}")
        if isinstance(module, Linear) and weights["weight"] == (Shard(1),):
            module.adds_bias = False


def parameters_summed_over_tp(module: nn.Module) -> tuple[nn.Parameter, ...]:
    """The parameters of a placed operator whose gradients are this rank's summands until the end of
    the step.
    """
    return tuple(getattr(module, name) for name in getattr(module, "summed_over_tp", ()))


def _place_operator(
    module: nn.Module,
    placement: OperatorPlacement,
    mesh: DeviceMesh,
    where: str,
    recipes: Recipes,
    in_halves: bool,
) -> None:
    inputs, output = (
        parse_placement(placement.input, where),
        parse_placement(placement.output, where),
    )
    weights = _place_parameters(module, placement, mesh, where)
    if not getattr(module, "on_shards", False):
        _place_whole(module, mesh, inputs, output)
        return
    if output in ((Shard(0),), (Shard(1),)):
        module.summed_over_tp = tuple(
            name for name, over in weights.items() if over == (Replicate(),)
        )
        if isinstance(module, MixtureOfExperts):
            module.sum_over_tensor_parallel()
    rows = isinstance(module, Linear) and weights["weight"] == (Shard(0),)
    columns = isinstance(module, Linear) and weights["weight"] == (Shard(1),)
    gradients = (Partial(),) if rows and inputs == (Replicate(),) and not in_halves else inputs

    def before(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        # a plain tensor is targets, or an operator's own inputs when it runs again
        return tuple(
            _part(arg, mesh, inputs, gradients, recipes) if isinstance(arg, DTensor) else arg
            for arg in args
        )

    def after(_: nn.Module, args: Any, out: Tensor) -> DTensor:
        if columns:
            sums = DTensor.from_local(
                out, mesh, output if in_halves else (Partial(),), run_check=False
            )
            return _with_bias(sums.redistribute(mesh, output), module.bias)
        return DTensor.from_local(out, mesh, output, run_check=False)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)
    if columns:
        module.adds_bias = False
    if in_halves and (rows or columns):
        linear_in_halves(module, mesh.get_group(), rows=rows)


def _place_parameters(
    module: nn.Module, placement: OperatorPlacement, mesh: DeviceMesh, where: str
) -> dict[str, Over]:
    found = {}
    for name, parameter in list(module.named_parameters(recurse=False)):
        found[name] = parse_placement(placement.parameters.get(name, ()), where)
        # src_data_rank=None: every rank made the same values, so nothing is broadcast
        shard = distribute_tensor(parameter.data, mesh, found[name], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(shard))
    return found


def _place_whole(module: nn.Module, mesh: DeviceMesh, inputs: Over, output: Over) -> None:
    """An operator on DTensors, which insert what their rules need: the token and position
    tables.
    """

    def before(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        # a plain tensor is token ids, which no plan divides
        return tuple(
            arg.redistribute(mesh, inputs) if isinstance(arg, DTensor) else as_dtensor(arg, mesh)
            for arg in args
        )

    module.register_forward_pre_hook(before)
    module.register_forward_hook(lambda _, args, out: out.redistribute(mesh, output))


def _part(
    tensor: DTensor, mesh: DeviceMesh, wanted: Over, gradients: Over, recipes: Recipes
) -> Tensor:
    """This rank's part of `tensor` where it is wanted, with a recipe if that gathered it or if
    `tensor` has one.
    """
    had = tensor.placements
    part = _moved(tensor, mesh, wanted, gradients)
    if recipes.active and had != wanted and (wanted == (Replicate(),) or recipes.knows(tensor)):
        recipes.remember(
            (part,),
            lambda again: (
                _moved(
                    DTensor.from_local(local(again), mesh, had, run_check=False),
                    mesh,
                    wanted,
                    gradients,
                ),
            ),
            tensor,
            ahead=False,
        )
    return part


def _moved(tensor: DTensor, mesh: DeviceMesh, wanted: Over, gradients: Over) -> Tensor:
    part = tensor.redistribute(mesh, wanted).to_local(grad_placements=gradients)
    # Shard -> Shard(0) between CPUs gives a view of a gathered copy, which would be kept whole
    return (
        part.clone()
        if tensor.placements != wanted and part.untyped_storage().nbytes() > part.nbytes
        else part
    )


def _with_bias(x: DTensor, bias: Tensor | None) -> DTensor:
    if bias is None:
        return x
    return DTensor.from_local(
        x.to_local() + local(bias), x.device_mesh, x.placements, run_check=False
    )
