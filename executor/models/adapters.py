"""Adapters of low rank in a block, and frozen parameters (LoRA, Hu et al. 2021, arXiv 2106.09685).

An adapter is three submodules with the names of its operators in the graph
(profiles/models/fine_tuned_graph.py): the products A and B and the sum. B starts at zero, so that
the first step is that of the base model. Inside a mixture of experts the sum is none of them: the
module of the mixture adds (executor/models/mixture_of_experts.py).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from parplan.executor.models.eight_bits import QUANTISED, quantise_frozen
from parplan.executor.models.operators import operator_module
from parplan.profiles.models.operator_graph import LayerClass

# ends of the names of an adapter's operators
A = "_lora_a"
B = "_lora_b"
SUM = "_lora_sum"
# alpha over rank, the factor of an adapter's output: alpha = 2 rank is usual, as in torchtune's
# recipes (rank 8, alpha 16)
SCALE = 2.0


class AdapterSum(nn.Module):
    """Adds the scaled output of an adapter to that of its frozen product."""

    on_shards = True

    def forward(self, base: Tensor, added: Tensor) -> Tensor:
        return torch.add(base, added, alpha=SCALE)


def freeze(layer: nn.Module, described: LayerClass) -> None:
    """Marks the frozen parameters of a layer, whose modules have the names of operators."""
    for operator in described.operators:
        for parameter in operator.parameters:
            if not parameter.trained:
                module = operator_module(layer, operator.name)
                assert module is not None, "every operator with parameters has a module"
                module.get_parameter(parameter.name).requires_grad_(False)


def frozen_parameters(layers: tuple[nn.Module, ...]) -> dict[nn.Parameter, None]:
    """Returns the frozen parameters of `layers`, each once, in their order."""
    return {
        parameter: None
        for layer in layers
        for parameter in layer.parameters()
        if not parameter.requires_grad
    }


def in_precision(layers: tuple[nn.Module, ...], dtype: torch.dtype) -> None:
    """Holds the frozen parameters of `layers` in `dtype`, as they compute.

    Layers that share one share it afterwards. Products that the plan holds in 8 bits become codes
    and scales, which stay as they are.
    """
    for layer in layers:
        quantise_frozen(layer)
    cast_parameters(layers, dtype, trained=False)


def cast_parameters(
    layers: tuple[nn.Module, ...], dtype: torch.dtype, *, trained: bool = True
) -> None:
    """Casts the parameters that are trained, or those that are not, to `dtype`.

    `nn.Module.to` cannot do so for fake tensors (executor/checking/dry_run.py).
    """
    cast: dict[nn.Parameter, nn.Parameter] = {}
    for module in (module for layer in layers for module in layer.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.requires_grad != trained or parameter.dtype == dtype or name in QUANTISED:
                continue
            if parameter not in cast:
                cast[parameter] = nn.Parameter(parameter.detach().to(dtype), requires_grad=trained)
            module.register_parameter(name, cast[parameter])
