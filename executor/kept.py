"""What autograd keeps of a layer: for a tensor that can be made again in the backward pass, a recipe instead of the tensor."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from executor.tensors import local

Make = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class _Again:
    """How to make an output again, the view of this rank's part of it that was kept, and that view's wrapping."""

    make: Make
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    wrapped: Callable[[Tensor], Tensor]


Kept = Tensor | _Again


class Recipes:
    """The recipes of one layer. An output is known by the address of its memory for as long as it lives."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[weakref.ref[Tensor], Make]] = {}
        self._watching = False

    def watch(self, layer: nn.Module) -> None:
        """From now on the forward pass of `layer` keeps recipes where it has them."""
        layer.forward = partial(self._run, layer.forward)

    def _run(self, forward: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        self._made.clear()
        self._watching = True
        try:
            with saved_tensors_hooks(self.keep, again):
                return forward(*inputs)
        finally:
            self._watching = False

    def remember(self, output: Tensor, make: Make) -> None:
        """`make()`, without gradients, gives `output` once more. Of no effect outside a watched forward pass."""
        if self._watching and torch.is_grad_enabled():
            self._made[_address(output)] = (weakref.ref(output), make)

    def keep(self, tensor: Tensor) -> Kept:
        """What to keep of `tensor`: itself, or the recipe of the output it is a view of."""
        output, make = self._made.get(_address(tensor), (None, None))
        if output is None or output() is None or make is None:  # an output that is gone left its address to another tensor
            return tensor.detach()
        part = local(tensor.detach())
        return _Again(make, part.size(), part.stride(), int(part.storage_offset()), _wrapping(tensor))


def again(kept: Kept) -> Tensor:
    """The tensor of what was kept."""
    if not isinstance(kept, _Again):
        return kept
    with torch.no_grad():
        output = local(kept.make())
    return kept.wrapped(output.as_strided(kept.size, kept.stride, kept.offset))


def _address(tensor: Tensor) -> int:
    return local(tensor.detach()).untyped_storage().data_ptr()


def _wrapping(tensor: Tensor) -> Callable[[Any], Tensor]:
    """What makes a tensor like `tensor` of this rank's part of it."""
    if not isinstance(tensor, DTensor):
        return lambda part: part
    return partial(
        DTensor.from_local, device_mesh=tensor.device_mesh, placements=tensor.placements, run_check=False, shape=tensor.shape,
        stride=tensor.stride())
