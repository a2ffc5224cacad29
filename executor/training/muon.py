"""Muon over matrices that ranks divide, and AdamW on tables and vectors.

torch.optim.Muon orthogonalizes each tensor as it is. Here a rank's part of the momentum is first
gathered in bf16, every rank orthogonalizes the whole matrix, and each keeps its own part (Liu et
al. 2025, arXiv 2502.16982, algorithm 1): that is written by hand, the Newton-Schulz steps and the
rates are torch's. The momentum stays divided. Several matrices in one tensor, as experts have
them, are orthogonalized one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim._muon import (
    DEFAULT_A,
    DEFAULT_B,
    DEFAULT_C,
    DEFAULT_NS_STEPS,
    EPS,
    _adjust_lr,
    _zeropower_via_newtonschulz,
)

from parplan.executor.tensors import local

COEFFICIENTS = (DEFAULT_A, DEFAULT_B, DEFAULT_C)
MOMENTUM = 0.95  # torch.optim.Muon's default
# The update has the size of AdamW's, so the learning rate and decay of AdamW serve both.
RATE = "match_rms_adamw"


class Muon(torch.optim.Optimizer):
    """Muon on `matrices`, AdamW on the groups of `adam`.

    stacked    number of matrices that lie one under the other, of tensors with several
    """

    def __init__(
        self,
        matrices: Sequence[dict[str, Any]],
        adam: torch.optim.AdamW,
        *,
        lr: float,
        stacked: Mapping[nn.Parameter, int],
    ) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": 0.0})
        self._matrices = tuple(self.param_groups)
        self._adam, self._stacked = adam, stacked
        adam.state = self.state
        self.param_groups += adam.param_groups

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self._matrices:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["lr"], group["weight_decay"])
        self._adam.step()

    def _update(self, parameter: nn.Parameter, rate: float, decay: float) -> None:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None, "it has a gradient"
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"]
        local(momentum).lerp_(local(gradient), 1 - MOMENTUM)
        ahead = local(gradient).lerp(local(momentum), MOMENTUM).bfloat16()
        whole = _whole(ahead, parameter)
        matrices = whole.unflatten(0, (self._stacked.get(parameter, 1), -1))
        update = torch.cat(
            [
                _zeropower_via_newtonschulz(matrix, COEFFICIENTS, DEFAULT_NS_STEPS, EPS)
                for matrix in matrices
            ]
        )
        values = local(parameter)
        values.mul_(1 - rate * decay)
        adjusted = _adjust_lr(rate, RATE, matrices.shape[1:])
        values.add_(_part(update, parameter), alpha=-adjusted)


def _whole(part: Tensor, like: nn.Parameter) -> Tensor:
    """Returns the matrices of which this rank has a `part`, but no other rank's experts."""
    if not isinstance(like, DTensor):
        return part
    placed = DTensor.from_local(
        part,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    return placed.redistribute(placements=_gathered(like)).to_local()


def _part(whole: Tensor, like: nn.Parameter) -> Tensor:
    """Returns this rank's part of the matrices that `_whole` returned."""
    if not isinstance(like, DTensor):
        return whole
    placed = DTensor.from_local(
        whole,
        like.device_mesh,
        _gathered(like),
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    return placed.redistribute(placements=like.placements).to_local()


def _gathered(like: DTensor) -> list[Any]:
    """Returns the placements of whole matrices: ranks of the expert axis keep their experts."""
    names = like.device_mesh.mesh_dim_names or ()
    return [
        placement if name == "ep" else Replicate()
        for name, placement in zip(names, like.placements, strict=True)
    ]
