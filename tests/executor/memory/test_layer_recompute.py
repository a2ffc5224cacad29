from __future__ import annotations

import dataclasses
import gc
from collections import Counter
from random import Random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import GraphExecGroup

from parplan.costmodels.layers.recompute import Recompute, recompute_operators, saved_bytes
from parplan.costmodels.operators.sharding import Sharding
from parplan.executor.checking.observed_rank import OTHER, Observed
from parplan.executor.memory.layer_recompute import recomputed
from parplan.executor.memory.saved_tensors import Recipes, _Recipe
from parplan.executor.models.transformer_layers import build_layer
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.stack import NEUTRAL, AttentionKernel
from tests.helpers.executor_plans import GPT, LLAMA, SEQ_LENGTH

ALL = (
    "norm1",
    "qkv",
    "attention",
    "attention_out",
    "residual1",
    "norm2",
    "fc1",
    "activation",
    "fc2",
    "residual2",
)


class _Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def _calls_and_gradient(
    operators: tuple[str, ...],
    dropout: float = 0.0,
    attention: AttentionKernel = AttentionKernel.FLASH,
    *,
    ahead: bool = False,
) -> tuple[Counter, torch.Tensor]:
    """With `ahead`: of the backward pass alone, when the recompute has run before it."""
    training = TrainingSpec(
        global_batch_size=2, seq_length=SEQ_LENGTH, attention=attention, stack=NEUTRAL
    )
    model = dataclasses.replace(GPT, dropout=dropout)
    block = recomputed(
        build_layer(model, training, LayerKind.BLOCK, 1, 0, torch.device("cpu")),
        operators,
        "block0",
    )
    torch.manual_seed(0)
    x = torch.randn(
        2,
        SEQ_LENGTH,
        GPT.hidden_size,
        generator=torch.Generator().manual_seed(1),
        requires_grad=True,
    )
    if not ahead:
        with _Count() as counted:
            block(x).square().sum().backward()
        return counted.calls, x.grad
    with block.ahead.collected() as reruns:
        loss = block(x).square().sum()
    with GraphExecGroup():
        for rerun in reruns:
            rerun()
        with _Count() as counted:
            loss.backward()
    return counted.calls, x.grad


def _peak_bytes(operators: tuple[str, ...]) -> int:
    """The most that MemTracker sees in the forward and backward passes of two blocks in a row."""
    model = dataclasses.replace(
        GPT, hidden_size=64, head_dim=16, ffn_hidden_size=256, max_seq_length=128
    )
    training = TrainingSpec(global_batch_size=4, seq_length=128, stack=NEUTRAL)
    blocks = [
        recomputed(
            build_layer(model, training, LayerKind.BLOCK, i, 0, torch.device("cpu")),
            operators,
            f"block{i}",
        )
        for i in range(3)
    ]
    x = torch.randn(4, 128, 64, requires_grad=True)
    tracker = MemTracker()
    layers = torch.nn.Sequential(*blocks)
    tracker.track_external(layers, x)
    with tracker:
        layers(x).sum().backward()
    return sum(tracker.get_tracker_snapshot("peak")[torch.device("cpu")].values())


@pytest.mark.parametrize(
    ("operators", "norms", "activations", "attentions", "matmuls"),
    [
        pytest.param((), 2, 1, 1, 4, id="none"),
        pytest.param(("attention",), 2, 1, 2, 4, id="one-operator"),
        pytest.param(("norm1", "activation", "norm2"), 4, 2, 1, 4, id="a-list"),
        pytest.param(("norm2", "fc1", "activation"), 3, 2, 1, 5, id="a-chain"),
        pytest.param(
            ("norm1", "qkv", "attention", "attention_out"),
            3,
            1,
            2,
            5,
            id="attention-and-its-neighbours",
        ),
        pytest.param(
            ("norm2", "fc1", "activation", "fc2"),
            3,
            2,
            1,
            5,
            id="an-output-that-nobody-keeps-is-not-made",
        ),
        pytest.param(ALL[:-1], 4, 2, 2, 7, id="all-but-one"),
        # torch stops a recompute as soon as the backward pass has what it needs: the last product
        # and sum do not run again
        pytest.param(ALL, 4, 2, 2, 7, id="full"),
    ],
)
def test_exactly_the_named_operators_run_again(operators, norms, activations, attentions, matmuls):
    calls, _ = _calls_and_gradient(operators)

    assert calls["native_layer_norm"] == norms
    assert calls["gelu"] == activations
    assert calls["_scaled_dot_product_flash_attention_for_cpu"] == attentions
    assert calls["addmm"] == matmuls


@pytest.mark.parametrize("attention", list(AttentionKernel))
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize(
    "operators",
    [
        pytest.param(("attention",), id="one-operator"),
        pytest.param(("qkv", "attention", "attention_out"), id="attention-and-its-neighbours"),
        pytest.param(("norm1", "qkv", "attention"), id="a-chain-into-attention"),
        pytest.param(
            ("attention_out", "norm2", "fc1", "activation", "fc2"), id="a-chain-without-attention"
        ),
        pytest.param(("norm1", "activation", "norm2"), id="a-list"),
        pytest.param(("norm1", "attention", "norm2"), id="a-list-with-attention"),
        pytest.param(ALL, id="full"),
    ],
)
def test_recompute_changes_no_gradient(operators, dropout, attention):
    _, expected = _calls_and_gradient((), dropout, attention)

    assert torch.equal(_calls_and_gradient(operators, dropout, attention)[1], expected)
    calls, early = _calls_and_gradient(operators, dropout, attention, ahead=True)
    assert torch.equal(early, expected)
    assert not calls & Counter(
        ("native_layer_norm", "gelu", "_scaled_dot_product_flash_attention_for_cpu", "addmm")
    )


@pytest.mark.slow
def test_what_was_made_again_is_gone_when_the_backward_pass_is_over():
    """Without the garbage collector's help; MemTracker holds recipes of other tests for ever."""
    gc.collect()
    before = _recipes()
    gc.disable()
    try:
        _calls_and_gradient(
            ("norm1", "qkv", "attention", "attention_out", "norm2", "fc1", "activation")
        )
        after = _recipes()
    finally:
        gc.enable()

    assert len(after) == len(before)


def _recipes() -> list[object]:
    return [get_object for get_object in gc.get_objects() if type(get_object) is _Recipe]


def test_a_chain_holds_what_it_makes_again_only_while_it_is_needed():
    """With few blocks its peak is below that of a full recompute.

    A full recompute makes a whole block again before it uses any of it.
    """
    chain = ("norm1", "qkv", "attention", "attention_out", "norm2", "fc1", "activation")

    assert _peak_bytes(chain) < _peak_bytes(ALL) < _peak_bytes(())


def test_an_operator_that_would_draw_another_dropout_mask_is_an_error():
    with pytest.raises(
        ConfigError, match="residual1 draws a dropout mask, it cannot be recomputed by itself"
    ):
        _calls_and_gradient(("residual1", "norm2"), dropout=0.5)


def test_an_operator_that_the_layer_lacks_is_an_error():
    with pytest.raises(ConfigError, match="recompute names norm3, the layer has norm1, qkv"):
        _calls_and_gradient(("norm3",))


def _lists(operators: tuple[str, ...], number: int) -> list[tuple[str, ...]]:
    """The levels' shapes and random lists.

    The next block saves the output of residual2, so only the full list frees bytes by it.
    """
    random = Random(0)
    actual = [
        tuple(name for name in operators[:-1] if random.random() < share)
        for share in (0.2, 0.4, 0.6, 0.8)
        for _ in range(number)
    ]
    return [(), *dict.fromkeys(actual), operators]


@pytest.mark.parametrize(
    ("model", "attention"),
    [
        pytest.param(GPT, "flash", id="gpt-flash", marks=pytest.mark.slow),
        pytest.param(GPT, "unfused", id="gpt-unfused", marks=pytest.mark.slow),
        # torch has a fused RMS norm on GPUs only; the one on CPUs keeps more
        pytest.param(dataclasses.replace(LLAMA, norm="layer_norm"), "flash", id="llama-flash"),
    ],
)
def test_a_block_keeps_the_bytes_that_the_memory_model_says_whatever_it_recomputes(
    model, attention
):
    """MemTracker counts the activations after the forward pass.

    Statistics, causal masks and rotary tables are left out.
    """
    model = dataclasses.replace(
        model,
        hidden_size=256,
        head_dim=256 // model.num_heads,
        ffn_hidden_size=1024,
        max_seq_length=128,
    )
    training = TrainingSpec(
        global_batch_size=4, seq_length=128, precision="fp32", attention=attention, stack=NEUTRAL
    )
    graph = build_graph(model, training, 4).block
    left_out = 2 * 8 * 4 * 128 + 128 * 128 + 2 * 128 * model.head_dim * 4
    levels = [recompute_operators(graph, level) for level in Recompute]

    for operators in (*levels, *_lists(tuple(operator.name for operator in graph.operators), 6)):
        # the tracker counts the block's input apart and its output as an activation, and the two
        # have one size
        excess = _held_bytes(model, training, operators) - saved_bytes(graph, Sharding(), operators)

        assert 0 <= excess <= left_out, operators


@pytest.mark.parametrize("gathers", [False, True])
def test_after_a_recompute_ahead_a_block_holds_what_it_would_have_kept(gathers):
    """The bytes of fake tensors match exactly, but for 4 bytes that torch's checkpoint reads.

    The case with recipes for gathered inputs is included.
    """
    training = TrainingSpec(global_batch_size=4, seq_length=SEQ_LENGTH, stack=NEUTRAL)
    graph = build_graph(GPT, training, 4).block
    lists = [
        *_lists(tuple(operator.name for operator in graph.operators), 2),
        ("attention", "attention_out"),
    ]
    # recomputed attention makes its output, which its fused kernel saved, once more where that
    # stays for the output projection
    exact = [names for names in lists if "attention" not in names or "attention_out" in names]

    actual = {names: _held_ahead(training, names, gathers) for names in exact}

    assert len(actual) > 3
    assert set(actual.values()) <= {actual[()], actual[()] + (0 if gathers else 4)}


def _held_ahead(training: TrainingSpec, operators: tuple[str, ...], gathers: bool) -> int:
    with FakeTensorMode(), Observed() as memory:
        block = build_layer(GPT, training, LayerKind.BLOCK, 1, 0, torch.device("cpu"))
        block = recomputed(
            block, operators, "block0", Recipes() if gathers or not operators else None
        )
        x = torch.randn(4, SEQ_LENGTH, GPT.hidden_size, requires_grad=True)
        memory.start()
        before = memory.held()[OTHER]
        with block.ahead.collected() as reruns:
            out = block(x)
        with GraphExecGroup():
            for rerun in reruns:
                rerun()
        assert out.shape == x.shape
        return memory.held()[OTHER] - before


def _held_bytes(model, training, operators: tuple[str, ...]) -> int:
    block = recomputed(
        build_layer(model, training, LayerKind.BLOCK, 1, 0, torch.device("cpu")),
        operators,
        "block0",
    )
    x = torch.randn(4, 128, 256, requires_grad=True)
    tracker = MemTracker()
    tracker.track_external(block, x)
    with tracker:
        out = block(x)
        held = tracker.get_tracker_snapshot("current")[torch.device("cpu")]
    assert out.shape == x.shape
    return sum(n_bytes for kind, n_bytes in held.items() if str(kind).endswith("ACT"))
