"""Recompute of a layer ahead of the gradient.

Tensors that the backward pass would recompute on demand are recomputed before it begins. torch's
checkpoint recomputes all saved tensors of a layer at the first access to one of them, once in a
GraphExecGroup. The layer therefore saves a mark before anything else, which no backward pass needs;
reading the mark triggers the recompute. Inside the same group the backward pass takes the rest,
each tensor at its last use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

Rerun = Callable[[], object]
Each = Callable[[nn.Module], Callable[..., Any]]


def _unchanged(layer: nn.Module) -> Callable[..., Any]:
    return layer


class EarlyRecompute:
    """The reruns of one layer's forward passes; its module has it as `ahead`."""

    def __init__(self, each: Each = _unchanged) -> None:
        self._each = each
        self._reruns: list[Rerun] | None = None

    @contextmanager
    def collected(self) -> Iterator[list[Rerun]]:
        """Surrounds a forward pass and collects its reruns.

        Calling them in order recomputes all tensors for its backward pass.
        """
        reruns: list[Rerun] = []
        self._reruns = reruns
        try:
            yield reruns
        finally:
            self._reruns = None

    def add(self, rerun: Rerun) -> None:
        """Adds a rerun; it has no effect outside `collected`."""
        if self._reruns is not None:
            self._reruns.append(rerun)

    def checkpoint(self, layer: nn.Module, *inputs: Any, **named: Any) -> Any:
        """Returns `layer(*inputs)`, which saves only its inputs."""
        run = self._each(layer)
        if self._reruns is None:
            return checkpoint(run, *inputs, use_reentrant=False, **named)
        return checkpoint(partial(self._marked, run), *inputs, use_reentrant=False, **named)

    def _marked(self, layer: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
        mark = torch.ones((), requires_grad=True).square().grad_fn
        self.add(lambda: mark._saved_self)
        return layer(*inputs, **named)


def checkpointed(layer: nn.Module, each: Each = _unchanged) -> nn.Module:
    """Wraps `layer` so that all of it is recomputed, in its backward pass or ahead of it.

    `each` returns the callable for one forward pass and its rerun.
    """
    ahead = EarlyRecompute(each)
    wrapped = checkpoint_wrapper(layer, checkpoint_fn=ahead.checkpoint)
    wrapped.ahead = ahead
    return wrapped
