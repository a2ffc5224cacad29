"""Per-operator placements over the tensor-parallel mesh, or over data-parallel ranks as well.

Every parameter becomes a DTensor on the mesh, and every activation gets the placement of the plan.
A module is placed by name with two hooks: its inputs are redistributed before it runs, and its
output gets its placement afterwards. Modules marked `on_shards` compute on local shards; this file
declares the placements of their outputs and gradients:

- a weight divided by rows (`Shard(0)`) reads whole inputs, whose gradients on the ranks are partial
  sums;
- a weight divided by columns (`Shard(1)`) gives partial sums, which are reduced to the output's
  placement before the bias is added;
- a whole weight over divided sequences or tokens has partial sums as gradients. They are declared
  whole until the end of the step, where `parplan.executor.sharding.zero_units.reduce_gradients`
  adds them over the tensor-parallel ranks, once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
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
from parplan.executor.models.loss import Loss
from parplan.executor.models.mixture_of_experts import MixtureOfExperts
from parplan.executor.models.operators import Linear, Tokens
from parplan.executor.sharding.moves import moved
from parplan.executor.sharding.overlap import linear_in_halves
from parplan.executor.tensors import as_dtensor, local
from parplan.planner.plan.plan import OperatorPlacement
from parplan.profiles.errors import ConfigError

_PLACEMENT = re.compile(r"Shard\((\d+)\)@(\w+)")

Over = tuple[Placement, ...]  # one entry for each axis
SEQUENCE = Shard(1)
TOKENS = (Shard(0), SEQUENCE)  # of activations by batch or by sequence
TP_AXES = ("tp",)
BOTH_AXES = ("dp", "tp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The meshes that the operators of a layer are divided over.

    tp     the tensor-parallel ranks, None for one
    both   the data-parallel and the tensor-parallel ranks, where operators are divided over both
    """

    tp: DeviceMesh | None
    both: DeviceMesh | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return TP_AXES if self.both is None else BOTH_AXES

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of activations inside the layer."""
        mesh = self.tp if self.both is None else self.both
        assert mesh is not None, "one rank divides nothing"
        return mesh


def parse_placement(entries: tuple[str, ...], where: str, axes: tuple[str, ...] = TP_AXES) -> Over:
    """Returns the plan's `("Shard(0)@tp",)` as DTensor placements over `axes`.

    No entry of an axis means Replicate. Raises ConfigError.
    """
    found: dict[str, Placement] = {}
    for entry in entries:
        match = _PLACEMENT.fullmatch(entry)
        if match is None or match[2] not in axes or match[2] in found:
            raise ConfigError(
                f"{where}: placement {list(entries)} is not one Shard(d) on each of "
                f"{', '.join(axes)}, or fewer",
                hint="make the plan again, or see plan explain",
            )
        found[match[2]] = Shard(int(match[1]))
    return tuple(found.get(axis, Replicate()) for axis in axes)


def of_axis(entries: tuple[str, ...], axis: str) -> tuple[str, ...]:
    """Returns the entries of a placement that are of one axis."""
    return tuple(entry for entry in entries if entry.endswith(f"@{axis}"))


def place_layer(
    layer: nn.Module,
    operators: Mapping[str, OperatorPlacement],
    axes: Axes,
    where: str,
    recipes: Recipes | None = None,
    *,
    in_halves: bool = False,
) -> None:
    """Gives every operator of `layer` its placements over `axes`.

    With `in_halves` a product that is divided by rows or columns sums one half of a micro-batch
    under the product of the other.

    With `recipes` a gathered input is saved as this rank's part and gathered again in the backward
    pass, as Megatron-LM does under sequence parallelism (Korthikanti et al. 2022, section 4.2.2).
    Any other input is saved as the operator reads it, unless it is recomputed: then its
    redistribution is recomputed too. Raises ConfigError for a placement that the operator cannot
    have.
    """
    for name, module in layer.named_children():
        inside = of_module(operators, name)
        if inside:
            place_layer(module, inside, axes, f"{where}.{name}", recipes)
            continue
        placement = (
            module.placement(operators) if isinstance(module, MixtureOfExperts) else operators[name]
        )
        if not getattr(module, "is_placed", False):  # modules ahead share a table
            module.is_placed = True
            _place_operator(
                module,
                placement,
                axes,
                f"{where}.operators.{name}",
                recipes or Recipes(),
                in_halves,
            )
    if axes.both is not None:
        _enter_and_leave(layer, axes)


def of_module(
    operators: Mapping[str, OperatorPlacement], name: str
) -> dict[str, OperatorPlacement]:
    """Returns the operators of a module of multi-token prediction, by their names inside it."""
    begins = f"{name}."
    return {
        each.removeprefix(begins): placement
        for each, placement in operators.items()
        if each.startswith(begins)
    }


def place_parameters(
    layer: nn.Module, operators: Mapping[str, OperatorPlacement], mesh: DeviceMesh, where: str
) -> None:
    """Places only the parameters of `layer`.

    Its operators compute on this rank's shards, and nothing is sent.
    """
    for name, module in layer.named_children():
        weights = _place_parameters(
            module, operators[name], Axes(tp=mesh), f"{where}.operators.{name}"
        )
        if isinstance(module, Linear) and weights["weight"] == (Shard(1),):
            module.adds_bias = False


def parameters_summed_over_tp(module: nn.Module) -> tuple[nn.Parameter, ...]:
    """Returns the parameters of a placed operator that need a sum over tensor-parallel ranks.

    Their gradients are this rank's summands until the end of the step.
    """
    return tuple(getattr(module, name) for name in getattr(module, "summed_over_tp", ()))


def parameters_over_data(module: nn.Module) -> tuple[str, ...]:
    """Returns the names of a module's own parameters that data-parallel ranks divide."""
    return getattr(module, "divided_over_data", ())


def _enter_and_leave(layer: nn.Module, axes: Axes) -> None:
    """Places the input of a layer on both axes, and its output on those of its neighbours.

    Neighbours know the batch of a data-parallel rank alone; nothing is sent.
    """
    both = axes.mesh

    def enter(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, *others = args
        over_tp = x.placements if isinstance(x, DTensor) else (Replicate(),)
        placed = DTensor.from_local(local(x), both, (Shard(0), *over_tp), run_check=False)
        return placed, *others

    def leave(_: nn.Module, args: Any, out: DTensor) -> Tensor:
        part = out.to_local()
        if axes.tp is None:
            return part
        return DTensor.from_local(part, axes.tp, out.placements[1:], run_check=False)

    layer.register_forward_pre_hook(enter)
    layer.register_forward_hook(leave)


def _place_operator(
    module: nn.Module,
    placement: OperatorPlacement,
    axes: Axes,
    where: str,
    recipes: Recipes,
    in_halves: bool,
) -> None:
    mesh = axes.mesh
    inputs = parse_placement(placement.input, where, axes.names)
    output = parse_placement(placement.output, where, axes.names)
    weights = _place_parameters(module, placement, axes, where)
    if isinstance(module, Tokens):
        by_rows = weights.get("weight") or module.weight.placements
        module.on_shards = by_rows != (Shard(0),)
        if module.on_shards and output[-1] in TOKENS:
            inputs = output  # the ids of the tokens that it gives; a part of a table reads all ids
    if not getattr(module, "on_shards", False):
        _place_whole(module, mesh, inputs, output)
        return
    if isinstance(module, Loss) and inputs[-1] in TOKENS:
        module.register_forward_pre_hook(lambda _, args: _tokens_of(args, mesh, inputs))
        return
    if axes.tp is not None and output[-1] != Replicate():
        module.summed_over_tp = tuple(
            name
            for name, over in weights.items()
            if over[-1] == Replicate() and module.get_parameter(name).requires_grad
        )
        if isinstance(module, MixtureOfExperts):
            module.sum_over_tensor_parallel()
            module.remember = recipes.remember
    weight = weights["weight"] if isinstance(module, Linear) else ()
    rows, columns = Shard(0) in weight, Shard(1) in weight
    sums = output
    if weight and not in_halves:
        sums = tuple(
            Partial() if over == Shard(1) else gives
            for over, gives in zip(weight, output, strict=True)
        )
    gradients = inputs
    if weight and not in_halves:
        gradients = tuple(
            Partial() if over == Shard(0) and read == Replicate() else read
            for over, read in zip(weight, inputs, strict=True)
        )

    shared = getattr(module, "shared_inputs", {})  # they have no such dim that ranks could divide
    if inputs[-1] == SEQUENCE and hasattr(module, "ranks_of_tokens"):
        module.ranks_of_tokens = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)

    def over(place: int) -> tuple[Over, Over]:
        return _of_all(inputs, shared[place]) if place in shared else (inputs, gradients)

    def before(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        # a plain tensor is targets, or the local inputs of a recomputed operator
        return tuple(
            _part(arg, mesh, *over(place), recipes) if isinstance(arg, DTensor) else arg
            for place, arg in enumerate(args)
        )

    def after(_: nn.Module, args: Any, out: Tensor) -> DTensor:
        if columns:
            summed = DTensor.from_local(out, mesh, sums, run_check=False)
            return _with_bias(_ended(summed, mesh, output), module.bias)
        return DTensor.from_local(out, mesh, output, run_check=False)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)
    if columns:
        module.adds_bias = False
    if in_halves and (rows or columns):
        linear_in_halves(module, mesh.get_group(), rows=rows)


def _of_all(inputs: Over, dim: int) -> tuple[Over, Over]:
    """Returns the placements of an input that all parts along a dim share, and of its gradient."""
    return (
        tuple(Replicate() if over == Shard(dim) else over for over in inputs),
        tuple(Partial() if over == Shard(dim) else over for over in inputs),
    )


def _tokens_of(args: tuple[Tensor, ...], mesh: DeviceMesh, over: Over) -> tuple[Tensor, ...]:
    """Returns this rank's tokens of logits and targets, whose loss is a part of the sum."""
    return tuple(_moved(as_dtensor(arg, mesh), mesh, over, over) for arg in args)


def _place_parameters(
    module: nn.Module, placement: OperatorPlacement, axes: Axes, where: str
) -> dict[str, Over]:
    placements = {}
    over_data = []
    for name, parameter in list(module.named_parameters(recurse=False)):
        entries = placement.parameters.get(name, ())
        over = placements[name] = parse_placement(entries, where, axes.names)
        mesh: DeviceMesh | None = axes.tp
        if axes.both is not None and over[0] != Replicate():
            over_data.append(name)
            mesh = axes.both
        if mesh is not None:
            # src_data_rank=None: every rank made the same values, so nothing is broadcast
            on_mesh = over[-mesh.ndim :]
            shard = distribute_tensor(parameter.data, mesh, on_mesh, src_data_rank=None)
            trained = parameter.requires_grad
            module.register_parameter(name, nn.Parameter(shard, requires_grad=trained))
    if over_data:
        module.divided_over_data = tuple(over_data)
    return placements


def _place_whole(module: nn.Module, mesh: DeviceMesh, inputs: Over, output: Over) -> None:
    """Places an operator that runs on DTensors: the token and position tables."""

    def before(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        # a plain tensor is token ids, which a table divided by rows reads whole
        return tuple(
            arg.redistribute(mesh, inputs) if isinstance(arg, DTensor) else as_dtensor(arg, mesh)
            for arg in args
        )

    module.register_forward_pre_hook(before)
    module.register_forward_hook(lambda _, args, out: out.redistribute(mesh, output))


def _part(
    tensor: DTensor, mesh: DeviceMesh, target: Over, gradients: Over, recipes: Recipes
) -> Tensor:
    """Returns this rank's part of `tensor` at the placement `target`.

    It gets a recipe if the part was gathered or `tensor` has a recipe.
    """
    source = tensor.placements
    part = _moved(tensor, mesh, target, gradients)

    def move_again(saved: Tensor) -> tuple[Tensor]:
        placed = DTensor.from_local(local(saved), mesh, source, run_check=False)
        return (_moved(placed, mesh, target, gradients),)

    gathers = _parts(source, mesh) > _parts(target, mesh)
    if recipes.active and source != target and (gathers or recipes.knows(tensor)):
        recipes.remember((part,), move_again, tensor, ahead=False)
    return part


def _ended(summed: DTensor, mesh: DeviceMesh, output: Over) -> DTensor:
    """Ends the partial sums of a product."""
    if mesh.ndim == 1:
        return summed.redistribute(mesh, output)
    return DTensor.from_local(moved(summed, output, output), mesh, output, run_check=False)


def _parts(placements: Over, mesh: DeviceMesh) -> int:
    """Returns the number of parts that placements divide a tensor into."""
    degrees = zip(placements, mesh.shape, strict=True)
    return math.prod(degree for over, degree in degrees if over.is_shard())


def _moved(tensor: DTensor, mesh: DeviceMesh, target: Over, gradients: Over) -> Tensor:
    if mesh.ndim > 1:
        return moved(tensor, target, gradients)
    part = tensor.redistribute(mesh, target).to_local(grad_placements=gradients)
    # Shard -> Shard(0) between CPUs gives a view of a gathered copy, which would be saved whole
    is_view = tensor.placements != target and part.untyped_storage().nbytes() > part.nbytes
    return part.clone() if is_view else part


def _with_bias(x: DTensor, bias: Tensor | None) -> DTensor:
    if bias is None:
        return x
    with_bias = x.to_local() + local(bias)
    return DTensor.from_local(with_bias, x.device_mesh, x.placements, run_check=False)
