"""Other tensors in the places of a module's parameters, for one run.

torch.func.functional_call does so by name, and of a submodule that is registered under two names it
puts the stand-in back as if it had been the parameter. Here every place is visited once, whatever
its names, and gets back what it had.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def stand_ins(module: nn.Module, found: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, each parameter of `module` is the tensor that `found` has under its first name, in
    all of its places; after it, parameters and buffers are those from before, whatever the code
    inside assigned.
    """
    parts = list(module.modules())
    by_id = {id(parameter): found[name] for name, parameter in module.named_parameters()}
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
    if isinstance(part, nn.RNNBase):  # it holds them in a list besides
        part._flat_weights = [getattr(part, name) for name in part._flat_weights_names]
