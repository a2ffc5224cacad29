"""Recompute of a layer ahead of the gradient: what the backward pass would make again when it asks
is made before it begins.

torch's checkpoint makes all that a layer saved when the first of it is asked for, once in a
GraphExecGroup. A tensor that the layer saves before anything else and no backward pass needs is
what is asked for ahead; inside the same group the backward pass takes the rest, each tensor the
last time it is needed.
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


def _as_it_is(layer: nn.Module) -> Callable[..., Any]:
    return layer


class EarlyRecompute:
    """What one layer can run again of a forward pass; its module has it as `ahead`."""

    def __init__(self, each: Each = _as_it_is) -> None:
        self._each = each
        self._found: list[Rerun] | None = None

    @contextmanager
    def collected(self) -> Iterator[list[Rerun]]:
        """Around a forward pass: what to call, in this order, to have all that its backward pass
        makes again.
        """
        self._found = found = []
        try:
            yield found
        finally:
            self._found = None

    def add(self, rerun: Rerun) -> None:
        """Of no effect but inside `collected`."""
        if self._found is not None:
            self._found.append(rerun)

    def checkpoint(self, layer: nn.Module, *inputs: Any, **named: Any) -> Any:
        """`layer(*inputs)`, of which nothing is kept but the inputs."""
        run = self._each(layer)
        if self._found is None:
            return checkpoint(run, *inputs, use_reentrant=False, **named)
        return checkpoint(partial(self._marked, run), *inputs, use_reentrant=False, **named)

    def _marked(self, layer: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
        mark = torch.ones((), requires_grad=True).square().grad_fn
        self.add(lambda: mark._saved_self)
        return layer(*inputs, **named)


def checkpointed(layer: nn.Module, each: Each = _as_it_is) -> nn.Module:
    """`layer` run again as a whole in its backward pass, or ahead of it; `each` gives what is
    called for one forward pass and its rerun.
    """
    ahead = EarlyRecompute(each)
    wrapped = checkpoint_wrapper(layer, checkpoint_fn=ahead.checkpoint)
    wrapped.ahead = ahead
    return wrapped
