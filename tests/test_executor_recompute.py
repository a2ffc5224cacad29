from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from executor.models import build_layer
from executor.recompute import recomputed
from profiles.errors import ConfigError
from profiles.model import LayerKind
from profiles.spec import TrainingSpec
from tests.executor_plans import GPT, SEQ_LENGTH

ALL = ("norm1", "qkv", "attention", "attention_out", "residual1", "norm2", "fc1", "activation", "fc2", "residual2")


class _Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def _calls_and_gradient(operators: tuple[str, ...], dropout: float = 0.0) -> tuple[Counter, torch.Tensor]:
    training = TrainingSpec(global_batch_size=2, seq_length=SEQ_LENGTH)
    model = dataclasses.replace(GPT, dropout=dropout)
    block = recomputed(build_layer(model, training, LayerKind.BLOCK, 1, 0, torch.device("cpu")), operators, "block0")
    torch.manual_seed(0)
    x = torch.randn(2, SEQ_LENGTH, GPT.hidden_size, generator=torch.Generator().manual_seed(1), requires_grad=True)
    with _Count() as counted:
        block(x).square().sum().backward()
    return counted.calls, x.grad


@pytest.mark.parametrize(("operators", "norms", "activations", "attentions", "matmuls"), [
    pytest.param((), 2, 1, 1, 4, id="none"),
    pytest.param(("attention",), 2, 1, 2, 4, id="one-operator"),
    pytest.param(("norm1", "activation", "norm2"), 4, 2, 1, 4, id="a-list"),
    # torch stops a recompute as soon as the backward pass has what it needs: the last product and sum do not run again
    pytest.param(ALL, 4, 2, 2, 7, id="full"),
])
def test_exactly_the_named_operators_run_again(operators, norms, activations, attentions, matmuls):
    calls, _ = _calls_and_gradient(operators)

    assert calls["native_layer_norm"] == norms
    assert calls["gelu"] == activations
    assert calls["_scaled_dot_product_flash_attention_for_cpu"] == attentions
    assert calls["addmm"] == matmuls


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("operators", [
    pytest.param(("attention",), id="one-operator"),
    pytest.param(("norm1", "activation", "norm2"), id="a-list"),
    pytest.param(("norm1", "attention", "residual1"), id="a-list-with-the-first-random-operators"),
    pytest.param(ALL, id="full"),
])
def test_recompute_changes_no_gradient(operators, dropout):
    _, expected = _calls_and_gradient((), dropout)

    assert torch.equal(_calls_and_gradient(operators, dropout)[1], expected)


def test_a_list_that_would_draw_another_dropout_mask_is_an_error():
    with pytest.raises(ConfigError, match=r"residual1 can only be recomputed together with .* \(attention, residual1, residual2\)"):
        _calls_and_gradient(("residual1", "norm2"), dropout=0.5)


def test_an_operator_that_the_layer_lacks_is_an_error():
    with pytest.raises(ConfigError, match="recompute names norm3, the layer has norm1, qkv"):
        _calls_and_gradient(("norm3",))
