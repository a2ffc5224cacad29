"""Functions that save their inputs alone, and run again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Run = Callable[..., Tensor]


def run_again(run: Run, *inputs: Tensor) -> Tensor:
    """Returns `run` of the inputs, of which alone the backward pass makes all else again."""
    out: Tensor = _Again.apply(run, *inputs)
    return out


class _Again(torch.autograd.Function):
    """A function that saves its inputs alone and runs again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, run: Run, *inputs: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(*inputs)
        return run(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        pairs = zip(ctx.saved_tensors, needed, strict=True)
        leaves = [saved.detach().requires_grad_(is_needed) for saved, is_needed in pairs]
        with torch.enable_grad():
            out = ctx.run(*leaves)
        found = torch.autograd.grad(out, [each for each in leaves if each.requires_grad], gradient)
        gradients = iter(found)
        return (None, *(next(gradients) if is_needed else None for is_needed in needed))
