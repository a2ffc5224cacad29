from __future__ import annotations

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional

from parplan.executor.models.loss import Loss

B, S, V = 2, 8, 512


def _loss_and_gradient(
    function, logits: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = logits.clone().requires_grad_()
    loss = function(leaf, targets)
    (3.0 * loss).backward()
    return loss.detach(), leaf.grad


def _torchs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), reduction="sum"
    )


@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_the_loss_and_its_gradient_are_those_of_torchs_cross_entropy(dtype, tolerance, scale):
    generator = torch.Generator().manual_seed(0)
    logits = (scale * torch.randn(B, S, V, generator=generator)).to(dtype)
    targets = torch.randint(V, (B, S), generator=generator)

    loss, gradient = _loss_and_gradient(Loss(), logits, targets)
    expected, expected_gradient = _loss_and_gradient(_torchs, logits, targets)

    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=tolerance, atol=1e-6)
    assert gradient.dtype is dtype


def test_forward_and_backward_hold_the_probabilities_and_one_gradient():
    """The loss holds 4 + 2 bytes a logit beside the bf16 logits (EQUATIONS M5).

    Torch's cross entropy holds 12.
    """
    logits, targets = (
        torch.randn(B, S, 64 * V, dtype=torch.bfloat16, requires_grad=True),
        torch.randint(V, (B, S)),
    )
    tracker = MemTracker()
    tracker.track_external(logits, targets)
    module = Loss()
    with tracker:
        module(logits, targets).backward()
        peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    beside = sum(
        n_bytes for kind, n_bytes in peak.items() if str(kind).endswith(("ACT", "TEMP", "GRAD"))
    )

    assert beside == pytest.approx((4 + 2) * logits.numel(), rel=0.02)
