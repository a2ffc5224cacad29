"""The dynamic scale of an fp16 run's loss, as in torch.amp.GradScaler.

Without it small gradients are zero in 16 bits (Micikevicius et al. 2018, arXiv 1710.03740, section
3.2). The loss of every micro-batch is multiplied before its backward pass, and the gradients are
divided after their reduction, in fp32. The norm of the whole model's gradients, which every rank
has, tells whether all are finite: all ranks leave out the update, or none. torch's class looks only
at the gradients of one optimizer on one rank. The scale is a power of two, so dividing restores
every gradient that is neither too small nor too large to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from parplan.executor.tensors import local
from parplan.profiles.errors import RunError
from parplan.profiles.models.spec import Precision

INITIAL = 2.0**16
LEAST = 1.0
# torch.amp.GradScaler's defaults
GROWTH = 2.0
GROWS_AFTER = 2000
BACKOFF = 0.5


class LossScale:
    """The factor of the loss; its tensors can be loaded from a checkpoint."""

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
        """Adjusts the scale after a step.

        It shrinks after a gradient that is not finite, and grows after `grows_after` finite steps
        in a row. Raises RunError.
        """
        if not finite and self.value <= LEAST:
            raise RunError(
                f"gradients are not finite at a loss scale of {self.value:g}",
                hint="use bf16 or fp32, or a smaller --learning-rate",
            )
        good = self.states["good_steps"].item() + 1 if finite else 0
        grows = good == self.grows_after
        self.states["good_steps"].fill_(0 if grows else good)
        if not finite:
            self.states["value"].mul_(BACKOFF)
        elif grows:
            self.states["value"].mul_(GROWTH)


def loss_scale(precision: Precision) -> LossScale | None:
    """Returns a scale for fp16 only: bf16 has the exponents of fp32."""
    return LossScale() if precision is Precision.FP16 else None


@torch.no_grad()
def unscale(parameters: Iterable[nn.Parameter], scale: LossScale) -> None:
    """Divides the gradients by the loss scale."""
    gradients: list[Tensor] = [
        local(parameter.grad) for parameter in parameters if parameter.grad is not None
    ]
    if gradients:
        torch._foreach_mul_(gradients, 1 / scale.value)
