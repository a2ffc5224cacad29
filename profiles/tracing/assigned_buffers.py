"""Buffers that a forward pass assigns instead of writing into them.

The assigned value is written into the old buffer, from which the next micro-batch starts.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from parplan.profiles.errors import ConfigError
from parplan.profiles.tracing.recorder import CallRecorder

Held = tuple[nn.Module, str, Tensor]  # a module, a buffer's name, its tensor before the forward


def keep_assigned(recorder: CallRecorder, before: Iterable[Held]) -> None:
    """Records, inside the recording, a copy of each newly assigned buffer into the old buffer.

    Raises ConfigError.
    """
    for part, key, old in before:
        new = part._buffers.get(key)
        if new is old or not isinstance(new, Tensor):
            continue
        name = recorder.attributes[id(old)][0]
        if id(new) in recorder.nodes:
            _check_live(name, old, new)
            with torch.no_grad():
                old.copy_(new)
        elif new.shape != old.shape or not torch.equal(new, old):
            raise ConfigError(
                f"module: buffer {name} gets another value in every forward pass, and nothing of "
                "the batch is in it",
                hint="write into it in place, as batch norms count: self.count.add_(1)",
            )


def _check_live(name: str, old: Tensor, new: Tensor) -> None:
    if new.requires_grad:
        raise ConfigError(
            f"module: buffer {name} is assigned a value with gradient, which would last for all "
            "micro-batches",
            hint="assign value.detach()",
        )
    if new.shape != old.shape or new.dtype != old.dtype:
        raise ConfigError(
            f"module: buffer {name} is {list(old.shape)} {old.dtype} and is assigned "
            f"{list(new.shape)} {new.dtype}",
            hint="make it in the shape and type that it has later",
        )
