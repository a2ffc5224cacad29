"""What a tensor-parallel block keeps, against the memory model; shapes only, with a process group that moves no data."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from costmodels.recompute import Recompute, recompute_operators, saved_bytes
from costmodels.sharding import Sharding, placements
from executor.kept import Recipes
from executor.models import build_layer
from executor.place import place_layer
from executor.recompute import recomputed
from planner.plan import OperatorPlacement
from profiles.model import LayerKind
from profiles.spec import ModelSpec, TrainingSpec
from profiles.transformer import build_graph

TP = 4
MODEL = ModelSpec(
    name="small", num_layers=2, hidden_size=256, num_heads=4, num_kv_heads=4, head_dim=64, ffn_hidden_size=1024, vocab_size=1024,
    max_seq_length=128)
TRAINING = TrainingSpec(global_batch_size=2, seq_length=128, precision="fp32")
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
    operators = {name: OperatorPlacement(parameters=p.parameters, input=p.input, output=p.output) for name, p in derived.items()}
    place_layer(layer, operators, mesh, "block0", recipes)
    layer = recomputed(layer, recompute_operators(BLOCK, level), "block0", recipes)
    tokens = 128 // TP if sharding.sequence_parallel else 128
    x = torch.randn(2, tokens, 256, requires_grad=True)
    tracker = MemTracker()
    tracker.track_external(layer, x)
    with tracker:
        out = layer(DTensor.from_local(x, mesh, (Shard(1) if sharding.sequence_parallel else Replicate(),), run_check=False))
        held = tracker.get_tracker_snapshot("current")[torch.device("cpu")]
    assert out.to_local().shape == x.shape
    return sum(n_bytes for kind, n_bytes in held.items() if str(kind).endswith("ACT"))


@pytest.mark.parametrize("level", list(Recompute))
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_tensor_parallel_block_keeps_the_bytes_that_the_memory_model_says(mesh, sequence_parallel, level):
    """Under sequence parallelism everything is divided by tp, gathered inputs included (EQUATIONS M3)."""
    sharding = Sharding(TP, sequence_parallel)

    held = _held_bytes(mesh, sharding, level)

    # the tracker counts the block's input apart and its output as an activation, and the two have one size
    assert held == pytest.approx(saved_bytes(BLOCK, sharding, recompute_operators(BLOCK, level)), rel=0.01)
