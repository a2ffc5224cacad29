"""The values that the parameters of a layer start from, a function of a seed and their names."""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor, nn

from parplan.executor.models.adapters import B
from parplan.executor.models.expert_exchange import EP, ETP, ExpertRanks
from parplan.executor.models.mixture_of_experts import Grouped

INIT_STD = 0.02  # GPT-2, Radford et al. 2019
ZERO_AT_START = (f"{B}.weight", "sinks")  # the second matrix of an adapter, and sinks
OF_STATES = ("steps.A_log", "steps.dt_bias", "conv.weight")  # of state-space mixers
STEP_SIZES = (0.001, 0.1)  # least and most at the start: Mamba-2, arXiv 2405.21060
CLASS_TOKEN = "class_token"  # of a tower, a row of its table


@torch.no_grad()
def init_experts(module: Grouped, key: str, ranks: ExpertRanks | None) -> None:
    """Fills this rank's part of the matrix of each expert, and biases with zeros."""
    held = range(module.num_experts)
    parts, part = 1, 0
    if ranks is not None:
        held = ranks.held(module.num_experts * ranks.degree(EP))
        if module.has_width:
            parts, part = ranks.degree(ETP), ranks.rank(ETP)
    for expert, matrix in zip(held, module.weight.chunk(module.num_experts), strict=True):
        hidden, width = matrix.shape[0], matrix.shape[1] * parts
        whole = matrix.new_empty((width, hidden) if module.widens else (hidden, width))
        init(whole, f"{key}.weight/{expert}")  # of [features, contracted], as any product
        if f"{key}.weight".endswith(ZERO_AT_START):
            whole.zero_()
        by_width = whole.t() if module.widens else whole
        matrix.copy_(by_width.chunk(parts, dim=1)[part])
    if module.bias is not None:
        module.bias.zero_()


def materialize(layer: nn.Module, device: torch.device) -> None:
    """Gives every parameter memory on `device`.

    `to_empty` cannot do so for fake tensors (executor/checking/dry_run.py).
    """
    for module in layer.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            memory = torch.empty_like(parameter, device=device)
            module.register_parameter(name, nn.Parameter(memory))


@torch.no_grad()
def init(parameter: Tensor, key: str) -> None:
    """Fills matrices and tables with normal values, norm weights with ones, biases with zeros.

    A class token is a row of a table. The second matrix of an adapter is zero, so that training
    starts at the base model, and so are sinks.
    """
    if key.endswith(ZERO_AT_START):
        parameter.zero_()
        return
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    if key.endswith(OF_STATES):
        _init_state_space(parameter, key, generator)
        return
    if parameter.ndim == 1 and not key.endswith(CLASS_TOKEN):
        parameter.fill_(0.0 if key.endswith("bias") else 1.0)
        return
    parameter.copy_(torch.empty(parameter.shape).normal_(0.0, INIT_STD, generator=generator))


def _init_state_space(parameter: Tensor, key: str, generator: torch.Generator) -> None:
    """Fills parameters of a state-space mixer as the authors' Mamba-2 does.

    Decays are 1, 2, 3, .. by head, step sizes are distributed evenly by their logarithm, and
    weights of the convolution evenly.
    """
    if key.endswith("A_log"):
        parameter.copy_(torch.arange(1, len(parameter) + 1).log())
        return
    share = torch.rand(parameter.shape, generator=generator)
    if key.endswith("dt_bias"):
        least, most = map(math.log, STEP_SIZES)
        step = (least + share * (most - least)).exp()
        parameter.copy_(step + (-(-step).expm1()).log())  # the inverse of softplus
    else:
        parameter.copy_((2 * share - 1) * parameter.shape[1] ** -0.5)
