"""Activation recompute of one layer: nothing, a list of operators, or everything.

What a list frees is what `costmodels.recompute.kept_tensors` says: the outputs of the named operators are not kept for
the operators that read them, but made again from the named operators' own inputs when the backward pass asks for them.
torch's selective checkpointing keeps the outputs of all other operators instead, views and sums included: more than no
recompute at all. The attention core runs again as a whole and its output stays, as in Korthikanti's selective recompute.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor

from executor.place import local
from profiles.errors import ConfigError

ATTENTION = "attention"


def recomputed(layer: nn.Module, operators: tuple[str, ...], where: str) -> nn.Module:
    """`layer` so that the named operators run again in its backward pass. Raises ConfigError where that cannot be."""
    names = [name for name, _ in layer.named_children()]
    unknown = [name for name in operators if name not in names]
    if unknown:
        raise ConfigError(f"{where}: recompute names {unknown[0]}, the layer has {', '.join(names)}", hint="make the plan again")
    if not operators:
        return layer
    if set(operators) == set(names):
        return checkpoint_wrapper(layer)
    discarded = [name for name in operators if name != ATTENTION]
    _check_random(layer, discarded, where)
    if discarded:
        _discard_outputs(layer, discarded)
    if ATTENTION in operators:
        layer.register_module(ATTENTION, checkpoint_wrapper(layer.get_submodule(ATTENTION)))
    return layer


def _check_random(layer: nn.Module, operators: list[str], where: str) -> None:
    """An output that is made again must be the same: an operator that draws a dropout mask would draw another."""
    random = [name for name in operators if getattr(layer.get_submodule(name), "dropout", 0.0)]
    if random:
        raise ConfigError(
            f"{where}: {random[0]} draws a dropout mask, it cannot be recomputed by itself", hint="recompute the whole layer, or not this")


@dataclass(frozen=True, slots=True)
class _Made:
    """An output of a recomputed operator: how to make it again, and whether it still is the tensor at its address."""

    output: weakref.ref[Tensor]
    module: nn.Module
    inputs: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class _Again:
    """What autograd keeps instead of (a view of) an output: its maker, the view of this rank's part, and its wrapping."""

    made: _Made
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    wrapped: Callable[[Tensor], Tensor]


def _discard_outputs(layer: nn.Module, operators: list[str]) -> None:
    """Let the operators of `layer` keep a recipe where they would keep an output of one of `operators`."""
    made: dict[int, _Made] = {}

    def remember(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if torch.is_grad_enabled():  # not while an output is made again
            made[_address(output)] = _Made(weakref.ref(output), module, inputs)

    for name in operators:
        layer.get_submodule(name).register_forward_hook(remember)
    layer.forward = partial(_run, layer.forward, made)


def _run(forward: Callable[..., Tensor], made: dict[int, _Made], *inputs: Tensor) -> Tensor:
    made.clear()
    with saved_tensors_hooks(partial(_pack, made), _unpack):
        return forward(*inputs)


def _address(tensor: Tensor) -> int:
    return local(tensor.detach()).untyped_storage().data_ptr()


def _pack(made: dict[int, _Made], tensor: Tensor) -> Tensor | _Again:
    found = made.get(_address(tensor))
    if found is None or found.output() is None:  # an output that is gone left its address to another tensor
        return tensor
    part = local(tensor.detach())
    return _Again(found, part.size(), part.stride(), int(part.storage_offset()), _wrapping(tensor))


def _wrapping(tensor: Tensor) -> Callable[[Tensor], Tensor]:
    """What makes a tensor like `tensor` of this rank's part of it."""
    if not isinstance(tensor, DTensor):
        return lambda part: part
    return partial(
        DTensor.from_local, device_mesh=tensor.device_mesh, placements=tensor.placements, run_check=False, shape=tensor.shape,
        stride=tensor.stride())


def _unpack(kept: Any) -> Tensor:
    if not isinstance(kept, _Again):
        return kept
    with torch.no_grad():
        output = local(kept.made.module(*kept.made.inputs))
    return kept.wrapped(output.as_strided(kept.size, kept.stride, kept.offset))
