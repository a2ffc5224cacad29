"""Replaces a module's parameters by other tensors for one run.

torch.func.functional_call does this by name; for a submodule registered under two names it puts the
replacement back as if it had been the parameter. This file visits every place once, whatever its
names, and restores its contents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def replaced_parameters(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Replaces parameters of `module`, in all their places, by `tensors` while entered.

    The keys of `tensors` are first names. On exit the parameters and buffers are those from before,
    whatever the code inside assigned.
    """
    parts = list(module.modules())
    by_id = {id(parameter): tensors[name] for name, parameter in module.named_parameters()}
    before = [(dict(part._parameters), dict(part._buffers)) for part in parts]
    try:
        for part in parts:
            _put(
                part, {key: p if p is None else by_id[id(p)] for key, p in part._parameters.items()}
            )
        yield
    finally:
        for part, (parameters, buffers) in zip(parts, before, strict=True):
            _put(part, parameters)
            part._buffers.clear()
            part._buffers.update(buffers)


def _put(part: nn.Module, parameters: Mapping[str, Tensor | None]) -> None:
    part._parameters.clear()
    part._parameters.update(parameters)  # type: ignore[arg-type]
    if isinstance(part, nn.RNNBase):  # it also holds them in a list
        part._flat_weights = [getattr(part, name) for name in part._flat_weights_names]
