"""The scale of an fp16 run's loss, without which small gradients are zero in 16 bits: dynamic, as
torch.amp.GradScaler keeps it.

Micikevicius et al. 2018, arXiv 1710.03740, section 3.2. The loss of every micro-batch is multiplied
before its backward pass and the gradients are divided when they are reduced, in fp32. Whether all
are finite is seen in the norm of the whole model's, which every rank has: all leave out the update,
or none. torch's class looks at the gradients of one optimizer on one rank, and cannot be asked
about others. The scale is a power of two, so that what it does to a gradient that is neither too
small nor too large is undone to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from parplan.executor.tensors import local
from parplan.profiles.errors import RunError
from parplan.profiles.models.spec import Precision

INITIAL, LEAST = 2.0**16, 1.0
GROWTH, GROWS_AFTER, BACKOFF = 2.0, 2000, 0.5  # torch.amp.GradScaler's defaults


class LossScale:
    """What the loss is multiplied by; held in tensors, which a checkpoint is loaded into."""

    def __init__(self, value: float = INITIAL, *, grows_after: int = GROWS_AFTER) -> None:
        self.grows_after = grows_after
        self.states = {
            "value": torch.tensor(value, dtype=torch.float64),
            "good_steps": torch.tensor(0),
        }

    @property
    def value(self) -> float:
        return self.states["value"].item()

    def settle(self, *, finite: bool) -> None:
        """After a step: back off where a gradient was not finite, grow after `grows_after` steps in
        a row. Raises RunError.
        """
        if not finite and self.value <= LEAST:
            raise RunError(
                f"gradients are not finite at a loss scale of {self.value:g}",
                hint="use bf16 or fp32, or a smaller --learning-rate",
            )
        good = self.states["good_steps"].item() + 1 if finite else 0
        grows = good == self.grows_after
        self.states["good_steps"].fill_(0 if grows else good)
        self.states["value"].mul_(BACKOFF if not finite else GROWTH if grows else 1.0)


def loss_scale(precision: Precision) -> LossScale | None:
    """fp16 alone needs one: bf16 has the exponents of fp32."""
    return LossScale() if precision is Precision.FP16 else None


@torch.no_grad()
def unscale(parameters: Iterable[nn.Parameter], scale: LossScale) -> None:
    """Divide the gradients by what the loss was multiplied by."""
    gradients: list[Tensor] = [
        local(parameter.grad) for parameter in parameters if parameter.grad is not None
    ]
    if gradients:
        torch._foreach_mul_(gradients, 1 / scale.value)
