"""Saved tensors of a tensor-parallel block against the memory model.

Only shapes are checked, with a process group that moves no data.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from parplan.costmodels.layers.recompute import Recompute, recompute_operators, saved_bytes
from parplan.costmodels.operators.plan_placements import placements
from parplan.costmodels.operators.sharding import Sharding
from parplan.executor.memory.layer_recompute import recomputed
from parplan.executor.memory.saved_tensors import Recipes
from parplan.executor.models.transformer_layers import build_layer
from parplan.executor.sharding.place import Axes, place_layer
from parplan.planner.plan.plan import OperatorPlacement
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import ModelSpec, Positions, TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.stack import NEUTRAL, AttentionKernel
from tests.helpers import executor_plans
from tests.helpers.divided_bytes import divided_saved_bytes
from tests.helpers.executor_plans import division

TP = 4
MODEL = ModelSpec(
    name="small",
    num_layers=2,
    hidden_size=256,
    num_heads=4,
    num_kv_heads=4,
    head_dim=64,
    ffn_hidden_size=1024,
    vocab_size=1024,
    max_seq_length=128,
)
TRAINING = TrainingSpec(global_batch_size=2, seq_length=128, precision="fp32", stack=NEUTRAL)
BLOCK = build_graph(MODEL, TRAINING, 2).block


@pytest.fixture
def mesh():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=TP)
    yield init_device_mesh("cpu", (TP,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


def _held_bytes(mesh, sharding: Sharding, level: Recompute) -> int:
    recipes = Recipes() if sharding.sequence_parallel else None
    layer = build_layer(MODEL, TRAINING, LayerKind.BLOCK, 1, 0, torch.device("cpu"))
    derived = {operator.name: placements(operator, sharding) for operator in BLOCK.operators}
    operators = {
        name: OperatorPlacement(parameters=p.parameters, input=p.input, output=p.output)
        for name, p in derived.items()
    }
    place_layer(layer, operators, Axes(tp=mesh), "block0", recipes)
    layer = recomputed(layer, recompute_operators(BLOCK, level), "block0", recipes)
    tokens = 128 // TP if sharding.sequence_parallel else 128
    x = torch.randn(2, tokens, 256, requires_grad=True)
    tracker = MemTracker()
    tracker.track_external(layer, x)
    with tracker:
        out = layer(
            DTensor.from_local(
                x, mesh, (Shard(1) if sharding.sequence_parallel else Replicate(),), run_check=False
            )
        )
        held = tracker.get_tracker_snapshot("current")[torch.device("cpu")]
    assert out.to_local().shape == x.shape
    return sum(n_bytes for kind, n_bytes in held.items() if str(kind).endswith("ACT"))


@pytest.mark.parametrize("level", list(Recompute))
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_tensor_parallel_block_keeps_the_bytes_that_the_memory_model_says(
    mesh, sequence_parallel, level
):
    """Sequence parallelism divides everything by tp, also gathered inputs (EQUATIONS M3)."""
    sharding = Sharding(TP, sequence_parallel)

    held = _held_bytes(mesh, sharding, level)

    # the tracker counts the block's input apart and its output as an activation, and the two have
    # one size
    assert held == pytest.approx(
        saved_bytes(BLOCK, sharding, recompute_operators(BLOCK, level)), rel=0.01
    )


DIVISIONS = (
    "WHOLE",
    "BATCH",
    "SEQUENCE",
    "MEGATRON",
    "MEGATRON_SEQUENCE",
    "TOKEN_FEED_FORWARD",
    "BATCH_FEED_FORWARD",
    "BATCH_ATTENTION",
    "HIDDEN_STREAM",
    "PATCHWORK",
)
LISTS = (
    (),
    ("norm2", "fc1", "activation"),
    ("attention", "residual1"),
    ("norm1", "qkv", "attention", "attention_out", "fc1"),
    ("qkv", "attention_out", "residual1", "norm2", "fc2"),
)
LLAMA = dataclasses.replace(
    MODEL, name="llama", positions=Positions.ROTARY, gated_ffn=True, tied_embeddings=False
)
# left out of every count: 8 bytes a token of each norm, the causal mask, the cosines and sines of
# 128 positions
LEFT_OUT_BYTES = 2 * 8 * 4 * 128 + 128 * 128 + 2 * 128 * 64 * 4


@pytest.mark.filterwarnings("ignore:.*alltoall.*")
@pytest.mark.parametrize(
    ("model", "attention", "name"),
    [
        pytest.param(
            model,
            attention,
            name,
            id=f"{model.name}-{attention}-{name}",
            marks=() if name in plain else pytest.mark.slow,
        )
        for model, attention, plain in (
            (MODEL, AttentionKernel.FLASH, ()),
            (MODEL, AttentionKernel.UNFUSED, ("PATCHWORK", "WHOLE")),
            (LLAMA, AttentionKernel.FLASH, DIVISIONS[1::2]),
        )
        for name in DIVISIONS
    ],
)
def test_a_block_keeps_of_every_tensor_the_part_that_its_placements_say(
    mesh, model, attention, name
):
    training = dataclasses.replace(TRAINING, attention=attention)
    graph = build_graph(model, training, 4).block
    operators = {
        operator.name: division(operator, getattr(executor_plans, name)[operator.name])
        for operator in graph.operators
    }

    for recompute in LISTS:
        held = _divided_held_bytes(mesh, model, training, operators, recompute)
        expected = divided_saved_bytes(graph, operators, TP, recompute, ("Shard(1)@tp",))

        assert 0 <= held - expected <= LEFT_OUT_BYTES, recompute


def _divided_held_bytes(
    mesh, model, training, operators: dict[str, OperatorPlacement], recompute: tuple[str, ...]
) -> int:
    """MemTracker's activations of a block that reads tokens divided over tp.

    Its input counts too where norm1 saves it.
    """
    recipes = Recipes()
    layer = build_layer(model, training, LayerKind.BLOCK, 1, 0, torch.device("cpu"))
    place_layer(layer, operators, Axes(tp=mesh), "block0", recipes)
    layer = recomputed(layer, recompute, "block0", recipes)
    x = torch.randn(4, 128 // TP, 256, requires_grad=True)
    tracker = MemTracker()
    tracker.track_external(layer, x)
    with tracker:
        out = layer(DTensor.from_local(x, mesh, (Shard(1),), run_check=False))
        held = tracker.get_tracker_snapshot("current")[torch.device("cpu")]
    activations = sum(n_bytes for kind, n_bytes in held.items() if str(kind).endswith("ACT"))
    keeps_input = operators["norm1"].input in ((), ("Shard(1)@tp",))
    return activations - out.to_local().nbytes + (x.nbytes if keeps_input else 0)
