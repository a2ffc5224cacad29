"""Layers on a grid of tensor-parallel ranks: their parameters, and the operators that send.

Operators that are in no table here run on their rank's part alone: attention has the heads of its
column and whole sequences, activations and residuals are pointwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor, nn
from torch.distributed.tensor import Replicate, distribute_tensor

from parplan.executor.models.loss import Loss
from parplan.executor.models.operators import LayerNorm, Linear, RMSNorm, Tokens
from parplan.executor.sharding.place import parse_placement
from parplan.executor.sharding.summa import (
    COLUMNS,
    ROWS,
    Grid,
    GridLookup,
    GridNorm,
    GridProduct,
)
from parplan.executor.tensors import local
from parplan.planner.plan.plan import OperatorPlacement

GRID_AXES = (ROWS, COLUMNS)


def place_on_grid(
    layer: nn.Module, operators: Mapping[str, OperatorPlacement], grid: Grid, where: str
) -> None:
    """Divides the parameters of a layer over a grid, and lets its operators run there.

    Raises ConfigError for a placement that is none over `GRID_AXES`.
    """
    for name, module in layer.named_children():
        widths = {key: each.shape for key, each in module.named_parameters(recurse=False)}
        _divide(module, operators[name], grid, f"{where}.operators.{name}")
        run = _RUNS.get(type(module))
        if run is not None:
            module.forward = partial(run, module, grid, widths)  # type: ignore[assignment]
        if isinstance(module, Loss):
            module.group = grid.row
            module.register_forward_pre_hook(partial(_of_row, grid))
    layer.register_forward_pre_hook(partial(_of_row, grid))


def _of_row(grid: Grid, _: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Returns the row's part of the inputs behind the first: targets, or places in documents."""
    return args[0], *map(grid.of_row, args[1:])


def _divide(module: nn.Module, placement: OperatorPlacement, grid: Grid, where: str) -> None:
    """Divides the parameters of an operator; rows have summands of gradients of those they share.

    These are added at the end of the step, as those over tensor-parallel ranks in one row are.
    """
    summed = []
    for name, parameter in list(module.named_parameters(recurse=False)):
        over = parse_placement(placement.parameters.get(name, ()), where, GRID_AXES)
        divided = distribute_tensor(parameter.data, grid.mesh, over, src_data_rank=None)
        module.register_parameter(name, nn.Parameter(divided))
        if over[0] == Replicate():
            summed.append(name)
    module.summed_over_tp = tuple(summed)


Shapes = Mapping[str, tuple[int, ...]]  # of the whole parameters of a module


def _product(module: Linear, grid: Grid, _: Shapes, x: Tensor) -> Tensor:
    bias = None if module.bias is None else local(module.bias)
    return GridProduct.apply(x, local(module.weight), bias, grid)


def _layer_norm(module: LayerNorm, grid: Grid, shapes: Shapes, x: Tensor) -> Tensor:
    weight, bias = local(module.weight), local(module.bias)
    return GridNorm.apply(x, weight, bias, module.eps, *shapes["weight"], grid, True)


def _rms_norm(module: RMSNorm, grid: Grid, shapes: Shapes, x: Tensor) -> Tensor:
    return GridNorm.apply(x, local(module.weight), None, module.eps, *shapes["weight"], grid, False)


def _lookup(module: Tokens, grid: Grid, _: Shapes, ids: Tensor) -> Tensor:
    return GridLookup.apply(grid.of_row(ids), local(module.weight), grid)


_RUNS: dict[type[nn.Module], Callable[..., Tensor]] = {
    Linear: _product,
    LayerNorm: _layer_norm,
    RMSNorm: _rms_norm,
    Tokens: _lookup,
}
