"""Chunks of blocks whose experts lie over ranks: bytes by hand, columns, bounds and brute force."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from parplan.costmodels.chunks.chunk_layout import block_tensors
from parplan.costmodels.chunks.chunk_memory import chunk_states, chunks_of_rank
from parplan.costmodels.chunks.chunk_operations import ChunkAction
from parplan.costmodels.chunks.chunk_schedule import rank_chunks
from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.host.state_location import Eviction, StateLocation
from parplan.costmodels.layers.chunk_owners import expert_owners
from parplan.costmodels.layers.chunked_layer import Chunking
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.memory.rank_memory import occupied_bytes
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.step import bubble_share, price_step
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy
from parplan.planner.candidates.chunk_lower_bounds import ChunkBound
from parplan.planner.candidates.lower_bounds import may_fit, time_bound
from parplan.planner.host_options.state_locations import BlockLocations, illegal_chunks
from parplan.planner.request import Constraints, SearchOptions
from parplan.planner.stage_columns.block_counts import to_strategy
from parplan.planner.stage_columns.chunk_columns import ChunkColumns
from parplan.planner.stage_columns.mix_table import MixTable
from parplan.profiles.errors import InfeasibleError
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import ModelSpec, Precision, TrainingSpec
from parplan.profiles.stack import NEUTRAL
from tests.helpers.instances import Instance
from tests.helpers.planning import find_plan
from tests.planner.stage_columns.test_chunk_columns import chunked_frames, cluster

EXPERTS = ModelSpec(
    name="small-experts",
    num_layers=4,
    hidden_size=256,
    num_heads=4,
    num_kv_heads=4,
    head_dim=64,
    ffn_hidden_size=0,
    vocab_size=512,
    max_seq_length=256,
    dropout=0.0,
    tied_embeddings=False,
    num_experts=4,
    experts_per_token=2,
    expert_ffn_hidden_size=512,
    linear_bias=False,
)
TRAINING = TrainingSpec(
    global_batch_size=8, seq_length=64, gradient_precision=Precision.FP32, stack=NEUTRAL
)
WIDTH, GRADIENT, OPTIMIZER = 2, 4, 12  # bytes a parameter: bf16, fp32, master and two moments
PINS = Constraints(
    offload=(Offload.OPTIMIZER, Offload.PARAMETERS), recompute=tuple(Recompute), ep=(2, 4)
)
MEMORY = 24_000_000


def layout_on(mesh: Mesh) -> ParallelLayout:
    return ParallelLayout(
        mesh=mesh,
        schedule=Schedule.ONE_F_ONE_B,
        virtual_stages=1,
        micro_batch_size=1,
        num_micro_batches=TRAINING.global_batch_size // mesh.dp,
        sequence_parallel=mesh.tp > 1,
        chunked=True,
    )


def prices(gpus: int, memory_bytes: int = MEMORY) -> PriceCache:
    machine = machine_for(cluster(gpus, memory_bytes))
    return PriceCache(EXPERTS, TRAINING, machine).within(Chunking(limit_bytes=1e12))


def strategy_of(layout: ParallelLayout, homes: tuple[StateLocation, ...]) -> Strategy:
    blocks = [LayerChoice(LayerKind.BLOCK, Recompute.FULL, 3, home=home) for home in homes]
    ends = [LayerChoice(kind, Recompute.NONE, 3) for kind in (LayerKind.EMBEDDING, LayerKind.HEAD)]
    return Strategy(layout=layout, stages=((ends[0], *blocks, ends[1]),))


@pytest.mark.parametrize(
    ("mesh", "owners"),
    [
        pytest.param(Mesh(pp=1, dp=4, tp=1, ep=4), 1, id="each-expert-once"),
        pytest.param(Mesh(pp=1, dp=4, tp=1, ep=2), 2, id="two-owners"),
        pytest.param(Mesh(pp=1, dp=4, tp=2, ep=4), 2, id="over-tp-too"),
        pytest.param(Mesh(pp=1, dp=2, tp=2, ep=2, etp=2), 1, id="divided-by-width"),
        pytest.param(Mesh(pp=1, dp=2, tp=2, ep=2), 2, id="as-many-as-dp"),
    ],
)
def test_each_rank_owns_its_part_of_the_shared_parameters_and_of_its_own_experts(
    mesh: Mesh, owners: int
) -> None:
    """All sizes are multiples of 64 x ranks, so that no chunk has padding."""
    layout, homes = layout_on(mesh), (StateLocation.DEVICE,) * 2 + (StateLocation.HOST,) * 2
    price_cache = prices(mesh.num_ranks)
    chunks = chunks_of_rank(strategy_of(layout, homes), 0, price_cache)
    layer = price_cache.layer(LayerKind.BLOCK, 1)
    tensors = block_tensors(layer, layout.sharding)
    experts = sum(tensor.elements for tensor in tensors if tensor.of_experts)
    shared = sum(tensor.elements for tensor in tensors) - experts
    h, f = EXPERTS.hidden_size, EXPERTS.expert_ffn_hidden_size
    assert experts == 4 * 2 * h * f // (mesh.ep * mesh.etp)
    assert expert_owners(mesh) in (0, owners)
    rounded = -(-shared // (64 * mesh.dp)) * 64
    own = rounded + experts // owners
    device, host = chunk_states(chunks, price_cache)
    assert device.total == host.total == 2 * own * (WIDTH + GRADIENT + OPTIMIZER)
    assert chunks.moved(ChunkAction.FETCH) == 2 * own * WIDTH  # there is room for all of them
    gathered = rounded * mesh.dp + experts
    micro_batches = layout.num_micro_batches
    turns = 2 * micro_batches - 1  # the next pass is of the same block, which stays gathered
    assert chunks.moved(ChunkAction.GATHER) == (8 * micro_batches - turns) * gathered * WIDTH
    assert chunks.moved(ChunkAction.REDUCE) == 4 * micro_batches * gathered * GRADIENT


def test_copies_of_experts_over_tensor_parallel_ranks_alone_are_refused() -> None:
    reason = illegal_chunks(layout_on(Mesh(pp=1, dp=1, tp=4, ep=2)))
    assert reason is not None
    assert "2 tensor-parallel ranks have copies of each of ep 2" in reason
    assert illegal_chunks(layout_on(Mesh(pp=1, dp=1, tp=4, ep=4))) is None


def frames(gpus: int) -> list[ParallelLayout]:
    return [
        layout
        for layout in chunked_frames(Instance(EXPERTS, cluster(gpus, MEMORY), TRAINING), PINS)
        if expert_owners(layout.mesh) and layout.mesh.pp == 1
    ]


def test_columns_hold_what_schedules_need_and_no_bound_is_above_them() -> None:
    price_cache, limit, seen = prices(4), float(MEMORY), set()
    table = MixTable(price_cache, PINS)
    for layout in frames(4):
        time = time_bound(layout, table)
        share = bubble_share(layout, price_cache)
        bound = ChunkBound(layout, table, time, limit, share)
        columns = ChunkColumns(0, layout, table)
        relaxed = columns.relaxed(EXPERTS.num_layers, limit)
        for column in columns.fastest(EXPERTS.num_layers, limit):
            strategy = to_strategy(layout, (column,))
            needed = rank_chunks(
                strategy, 0, price_cache, eviction=Eviction.OPT, device_bytes=10**12
            ).smallest_bytes
            assert occupied_bytes(needed, layout.mesh, price_cache) <= column.memory_bytes + 1
            assert any(
                each.time_s <= column.time_s * (1 + 1e-9)
                and each.tail_s <= column.tail_s * (1 + 1e-9)
                for each in relaxed
            )
            step_s = (layout.num_micro_batches - share) * column.time_s
            assert bound.step_s() <= (step_s + time.total_s + column.tail_s) * (1 + 1e-9)
            assert may_fit(layout, table, limit)
            seen.add((layout.mesh.ep, layout.mesh.etp))
    assert {(2, 1), (4, 1)} <= seen


@pytest.mark.slow
def test_a_plan_of_divided_experts_is_as_fast_as_the_fastest_of_all_that_fit() -> None:
    """Each strategy is priced with its exact schedule; without the host none fits."""
    case = Instance(EXPERTS, cluster(4, MEMORY, pcie_bytes_per_s=3e9), TRAINING)
    pins = replace(PINS, ep=(4,), tp=(1,), pp=(1,), micro_batch_size=(2,), megatron_sharding=True)
    options = SearchOptions(memory_margin=0.0)
    asked = case.model, case.cluster, case.training
    with pytest.raises(InfeasibleError):
        find_plan(*asked, constraints=replace(pins, offload=()), options=options)
    plan = find_plan(*asked, constraints=pins, options=options)
    (layout,) = chunked_frames(case, pins)
    limit = float(case.cluster.device.memory_bytes)
    price_cache, best_s = case.price_cache().within(Chunking(limit_bytes=limit)), float("inf")
    for host, optimizer in itertools.product(range(5), repeat=2):
        for levels in itertools.combinations_with_replacement(Recompute, 4):
            if host + optimizer > 4:
                continue
            homes = BlockLocations(host, optimizer).of(4)
            plain = strategy_of(layout, homes)
            blocks = [
                replace(block, recompute=level)
                for block, level in zip(plain.stages[0][1:-1], levels, strict=True)
            ]
            stage = (plain.stages[0][0], *blocks, plain.stages[0][-1])
            strategy = replace(plain, stages=(stage,))
            needed = rank_chunks(
                strategy, 0, price_cache, eviction=Eviction.OPT, device_bytes=10**12
            ).smallest_bytes
            if occupied_bytes(needed, layout.mesh, price_cache) <= limit:
                best_s = min(best_s, price_step(strategy, price_cache).step_s)
    assert plan.mesh.ep == 4
    assert plan.chunks is not None
    assert plan.predicted.step_time_s.value <= best_s * 1.02
