"""A layer of a tower keeps the bytes that its graph says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from parplan.costmodels.layers.recompute import saved_bytes
from parplan.costmodels.operators.sharding import Sharding
from parplan.executor.memory.layer_recompute import recomputed
from parplan.executor.models.transformer_layers import build_layer
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import ModelSpec, TrainingSpec
from parplan.profiles.models.towers import Tower
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.stack import NEUTRAL
from tests.executor.models.test_tower_runs import (
    GEMMA3,
    LLAMA4,
    MISTRAL3,
    QWEN2_5_VL,
    QWEN2_VL,
    WHISPER,
)
from tests.helpers.executor_plans import LLAMA

BATCH, TEXT, HIDDEN = 4, 64, 64
TRAINING = TrainingSpec(global_batch_size=BATCH, seq_length=TEXT, precision="fp32", stack=NEUTRAL)
TOWERS = {
    "qwen2-vl": QWEN2_VL,
    "qwen2.5-vl": QWEN2_5_VL,
    "gemma3": GEMMA3,
    "llama4": LLAMA4,
    "mistral3": MISTRAL3,
}
LAYERS = {
    "patches": (1, ("norm",)),
    "block": (2, ("norm1", "qkv", "rotary", "attention", "activation")),
    "projector": (4, ("norm", "projector_norm", "joined")),
}


HEARING = replace(
    WHISPER,
    num_layers=1,
    hidden_size=128,
    head_dim=32,
    ffn_hidden_size=256,
    max_seq_length=TEXT,
    tower=replace(
        WHISPER.tower,
        hidden_size=128,
        ffn_hidden_size=256,
        patches=64,
        patch_features=384,
        frame_features=48,
    ),
)
OF_WHISPER = {
    "patches": (1, ("frames", "frames_activation")),
    "block": (2, ("norm1", "qkv", "attention", "activation")),
    "norm": (4, ("norm",)),
    "attending-block": (5, ("cross_norm", "cross_q", "cross_kv", "cross_attention", "norm2")),
}


def seeing(tower: Tower) -> ModelSpec:
    projector = (*tower.projector[:-1], replace(tower.projector[-1], width=HIDDEN))
    sizes = {"hidden_size": 128, "ffn_hidden_size": 256, "patches": 64}
    return replace(
        LLAMA,
        num_layers=1,
        hidden_size=HIDDEN,
        head_dim=HIDDEN // LLAMA.num_heads,
        tower=replace(tower, projector=projector, **sizes),
    )


def inputs_of(layer: str, tower: Tower) -> tuple[torch.Tensor, ...]:
    if layer == "patches":
        return (torch.randn(BATCH, tower.images, tower.patches, tower.patch_features),)
    x = torch.randn(BATCH * tower.images, tower.tokens, tower.hidden_size, requires_grad=True)
    if layer == "block":
        return (x,)
    embedded = torch.randn(BATCH, TEXT, HIDDEN, requires_grad=True)
    return x, embedded, torch.tensor([[1, 30]] * BATCH)


def require_kept(
    model: ModelSpec, index: int, operators: tuple[str, ...], *inputs: torch.Tensor
) -> None:
    """Left out are statistics of norms and rotary tables."""
    graph = build_graph(model, TRAINING, BATCH)
    described = graph.layer_class(graph.key(index))
    known = [operator.name for operator in described.operators]
    operators = tuple(each for each in operators if each in known)
    built = build_layer(model, TRAINING, LayerKind.BLOCK, index, 0, torch.device("cpu"))
    built.requires_grad_(True)  # the tracker cannot follow what is frozen
    module = recomputed(built, operators, str(index))
    tracker = MemTracker()
    tracker.track_external(module, *inputs)

    with tracker:
        out = module(*inputs)
        held = tracker.get_tracker_snapshot("current")[torch.device("cpu")]

    made = sum(num_bytes for kind, num_bytes in held.items() if str(kind).endswith("ACT"))
    # the tracker counts the output, and not the input, which the first operator saves
    kept = made - out.nbytes + inputs[0].nbytes
    assert kept == pytest.approx(saved_bytes(described, Sharding(), operators), rel=0.03)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("name", TOWERS)
def test_a_layer_of_a_tower_keeps_what_its_graph_says(name, layer, recomputes):
    model = seeing(TOWERS[name])
    index, operators = LAYERS[layer]

    require_kept(model, index, operators if recomputes else (), *inputs_of(layer, model.tower))


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("layer", OF_WHISPER)
def test_a_layer_of_whisper_keeps_what_its_graph_says(layer, recomputes):
    index, operators = OF_WHISPER[layer]
    states = torch.randn(BATCH, TEXT, 128, requires_grad=True)
    inputs = {
        "patches": (torch.randn(BATCH, 1, 2 * TEXT, 48),),
        "attending-block": (torch.randn(BATCH, TEXT, 128, requires_grad=True), states),
    }

    read = inputs.get(layer, (states,))
    require_kept(HEARING, index, operators if recomputes else (), *read)
