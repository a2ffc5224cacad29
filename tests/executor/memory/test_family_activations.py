"""A block of a published family keeps the bytes that its graph says, for each class of blocks."""

from __future__ import annotations

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from parplan.costmodels.layers.recompute import saved_bytes
from parplan.costmodels.operators.sharding import Sharding
from parplan.executor.memory.layer_recompute import recomputed
from parplan.executor.models.transformer_layers import build_layer
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import ModelSpec, TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.stack import NEUTRAL
from tests.executor.models.test_delta_rule_modules import WIDE

TRAINING = TrainingSpec(global_batch_size=4, seq_length=128, precision="fp32", stack=NEUTRAL)
BLOCKS = {
    "deepseek-dense": ("deepseek-tiny", 1, ("q_norm", "q_up", "kv_norm", "kv_up", "rotary")),
    "deepseek-experts": ("deepseek-tiny", 2, ("kv_up", "rotary", "attention", "shared_fc1")),
    "gpt-oss-window": ("gpt-oss-tiny", 1, ("norm1", "qkv", "rotary", "activation")),
    "gpt-oss-full": ("gpt-oss-tiny", 2, ("attention", "norm2")),
    "gemma-window": ("gemma-tiny", 1, ("attention", "post_norm1", "fc1", "activation")),
    "gemma-full": ("gemma-tiny", 2, ("norm1", "qkv", "norm2", "post_norm2")),
    "next-delta-rule": (WIDE.name, 1, ("norm1", "conv", "steps", "scan", "gated_norm")),
    "next-gated-attention": (WIDE.name, 2, ("qk_norm", "attention", "attention_gate")),
    "qwen3-moe": ("qwen3-moe-tiny", 1, ("qk_norm", "rotary")),
}


def model_of(name: str) -> ModelSpec:
    return WIDE if name == WIDE.name else load_model(name).spec


def held_bytes(name: str, index: int, operators: tuple[str, ...]) -> int:
    """Bytes of activations after the forward pass of a block.

    The tracker counts the block's input apart and its output as an activation; they have one size.
    """
    model = model_of(name)
    block = build_layer(model, TRAINING, LayerKind.BLOCK, index, 0, torch.device("cpu"))
    x = torch.randn(4, 128, model.hidden_size, requires_grad=True)
    layer = recomputed(block, operators, "block")
    tracker = MemTracker()
    tracker.track_external(layer, x)
    with tracker:
        out = layer(x)
        held = tracker.get_tracker_snapshot("current")[torch.device("cpu")]
    assert out.shape == x.shape
    return sum(num_bytes for kind, num_bytes in held.items() if str(kind).endswith("ACT"))


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_keeps_what_its_graph_says(name, recomputes):
    """Left out are statistics of norms, rotary tables and the order of copies of tokens."""
    model_name, index, operators = BLOCKS[name]
    operators = operators if recomputes else ()
    graph = build_graph(model_of(model_name), TRAINING, 4)

    held = held_bytes(model_name, index, operators)

    predicted = saved_bytes(graph.layer_class(graph.key(index)), Sharding(), operators)
    assert held == pytest.approx(predicted, rel=0.03)


def test_the_recompute_of_the_products_up_frees_keys_and_values_of_latent_attention():
    operators = ("q_up", "kv_up", "rotary", "attention")
    freed = held_bytes("deepseek-tiny", 1, ()) - held_bytes("deepseek-tiny", 1, operators)

    # queries and keys of 48 features, keys and values up of 64, 4 heads each, of 512 tokens in fp32
    assert freed >= (2 * 48 + 64) * 4 * 512 * 4
