"""Columns of ranks in chunks against exact schedules, all counts of blocks, and their bounds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from parplan.commands.requests.requests import offload_assumed
from parplan.costmodels.chunks.chunk_memory import chunked_memory
from parplan.costmodels.chunks.chunk_schedule import rank_chunks
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.host.state_location import ChunkCommunication, Eviction, StateLocation
from parplan.costmodels.layers.chunked_layer import Chunking
from parplan.costmodels.layers.model_layers import IDS_BYTES
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.memory.rank_memory import occupied_bytes, stashes, usable_bytes
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.step import bubble_share, price_step
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy
from parplan.planner.candidates.chunk_lower_bounds import ChunkBound
from parplan.planner.candidates.lower_bounds import in_reach, may_fit, time_bound
from parplan.planner.host_options.state_locations import BlockLocations
from parplan.planner.infeasible.shortfall import _shorter, enough_host_bytes
from parplan.planner.layer_options.layer_option import LayerOption
from parplan.planner.plan.derived import blocks_of as planned_blocks
from parplan.planner.request import SEARCHED_OFFLOAD, Constraints, SearchOptions
from parplan.planner.stage_columns.block_counts import block_counts, to_strategy
from parplan.planner.stage_columns.chunk_columns import ChunkColumns
from parplan.planner.stage_columns.mix_table import MixTable
from parplan.profiles.errors import InfeasibleError
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import ModelSpec, Precision, TrainingSpec
from parplan.profiles.stack import NEUTRAL
from parplan.profiles.units import GIB, MIB
from tests.helpers.instances import Instance
from tests.helpers.planning import enumerate_candidates, find_plan, request

PINS = Constraints(offload=SEARCHED_OFFLOAD)
MODEL = ModelSpec(
    name="small",
    num_layers=6,
    hidden_size=256,
    num_heads=4,
    num_kv_heads=4,
    head_dim=64,
    ffn_hidden_size=1024,
    vocab_size=512,
    max_seq_length=256,
    dropout=0.0,
    tied_embeddings=True,
)
STATES = 18 * 12 * 256**2  # bytes of one block with fp32 gradients


def cluster(gpus: int, memory_bytes: int, **changes: object) -> Cluster:
    """Returns devices without a context, whose memory is all for tensors."""
    whole = with_gpus(load_cluster("a100-80gb"), gpus, gpus)
    return replace(
        whole, device=replace(whole.device, memory_bytes=memory_bytes, context_bytes=0), **changes
    )  # type: ignore[arg-type]


def instance(
    gpus: int,
    memory_bytes: int,
    precision: Precision = Precision.FP32,
    batch: int = 4,
    **changes: object,
) -> Instance:
    training = TrainingSpec(
        global_batch_size=batch, seq_length=64, gradient_precision=precision, stack=NEUTRAL
    )
    return Instance(MODEL, cluster(gpus, memory_bytes, **changes), training)


def chunked_frames(case: Instance, pins: Constraints = PINS) -> list[ParallelLayout]:
    return [
        layout
        for layout in enumerate_candidates(case.model, case.cluster, case.training, pins).layouts
        if layout.chunked
    ]


GROUP = ChunkCommunication.GROUP
CASES = [
    (1, Precision.FP32, 4, GROUP),
    (2, Precision.FP32, 4, GROUP),
    (2, Precision.FP32, 4, ChunkCommunication.SINGLE),
    (2, Precision.BF16, 2, GROUP),
    pytest.param(4, Precision.BF16, 8, GROUP, marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("gpus", "precision", "batch", "communication"), CASES)
def test_no_exact_schedule_needs_more_than_its_column_says(
    gpus: int, precision: Precision, batch: int, communication: ChunkCommunication
) -> None:
    """The host suffices too. Columns are exact on one rank without embedding and head."""
    memory_bytes = 6 * STATES // gpus
    case = instance(gpus, memory_bytes, precision, batch)
    chunking = Chunking(communication=communication)
    price_cache = case.price_cache().within(chunking)
    table = MixTable(price_cache, PINS)
    tried = 0
    for layout, share in itertools.product(chunked_frames(case)[:: 2 * gpus], (0.5, 0.8)):
        limit = share * memory_bytes
        budget = replace(chunking, limit_bytes=float(memory_bytes * 100))
        ranks = [ChunkColumns(rank, layout, table) for rank in range(layout.mesh.pp)]
        counts = [
            next(block_counts(rank, layout, 6)) if layout.equal_ranks else 6 // layout.mesh.pp
            for rank in range(layout.mesh.pp)
        ]
        options = [rank.fastest(count, limit) for rank, count in zip(ranks, counts, strict=True)]
        for columns in zip(
            *(rank_columns[:: max(1, len(rank_columns) // 3)] for rank_columns in options),
            strict=False,
        ):
            strategy = to_strategy(layout, columns)
            for rank, column in enumerate(columns):
                exact = rank_chunks(
                    strategy, rank, price_cache, eviction=Eviction.OPT, device_bytes=10**12
                ).smallest_bytes
                assert (
                    occupied_bytes(exact, layout.mesh, price_cache)
                    <= column.memory_bytes * (1 + 1e-12) + 1
                )
                assert column.memory_bytes <= limit
                host = chunked_memory(strategy, rank, price_cache.within(budget)).host
                costs = table.homes(layout, column.mix[0][0].sharding, column.num_blocks)
                told = [
                    costs.host_bytes[i]
                    for i in range(len(costs.host))
                    if costs.homes(i) == column.homes
                ]
                in_flight = stashes(LayerKind.BLOCK, rank, layout) / layout.virtual_stages
                sent = in_flight * sum(count * option.host_bytes for option, count in column.mix)
                assert host == pytest.approx(told[0] + sent, rel=1e-9)
                tried += 1
    assert tried > 5


def test_the_best_of_all_counts_is_found() -> None:
    """Prices each mix with each location; columns are the undominated ones in time and tail."""
    case = instance(1, 5 * STATES // 2, pcie_bytes_per_s=3e9)
    table = MixTable(case.price_cache(), PINS)
    for layout in chunked_frames(case):
        rank, limit = ChunkColumns(0, layout, table), float(case.cluster.device.memory_bytes)
        usable = usable_bytes(limit, layout.mesh, table.price_cache)
        cells = []
        for mixes, *_ in rank._mixes(table.get(layout, 0, 6, rank.zero), 6):
            for row, home in itertools.product(
                range(len(mixes.compute_s)), range(len(mixes.costs.host))
            ):
                choice = np.array([row]), np.array([home])
                if (
                    mixes.needed(*choice)[0] <= usable
                    and mixes.costs.host_bytes[home] <= table.host_share_bytes
                ):
                    cells.append(
                        (
                            float(mixes.seconds(*choice, usable)[0]),
                            float(mixes.costs.once_s[home]) + rank.fixed.tail_s,
                        )
                    )
        best = sorted(
            {
                cell
                for cell in cells
                if not any((a <= cell[0] and b <= cell[1]) and (a, b) != cell for a, b in cells)
            }
        )
        columns = rank.fastest(6, limit)
        np.testing.assert_allclose(sorted((c.time_s, c.tail_s) for c in columns), best, rtol=1e-12)
        assert all(c.homes.host + c.homes.optimizer for c in columns)


@pytest.mark.slow
@pytest.mark.parametrize(("gpus", "precision", "batch", "communication"), CASES)
def test_no_column_is_below_the_relaxation_nor_any_below_the_bound(
    gpus: int, precision: Precision, batch: int, communication: ChunkCommunication
) -> None:
    case = instance(gpus, 5 * STATES // (2 * gpus), precision, batch, pcie_bytes_per_s=5e9)
    price_cache = case.price_cache().within(Chunking(communication=communication))
    table = MixTable(price_cache, PINS)
    limit = float(case.cluster.device.memory_bytes)
    seen = 0
    for layout in chunked_frames(case)[:: 2 * gpus]:
        share, bound_s = bubble_share(layout, table.price_cache), time_bound(layout, table)
        bound, passes = ChunkBound(layout, table, bound_s, limit, share), layout.num_micro_batches
        for rank in range(layout.mesh.pp):
            columns = ChunkColumns(rank, layout, table)
            for count in block_counts(rank, layout, 6):
                solved, relaxed = columns.fastest(count, limit), columns.relaxed(count, limit)
                for column in solved:
                    seen += 1
                    assert any(
                        c.time_s <= column.time_s * (1 + 1e-9)
                        and c.tail_s <= column.tail_s * (1 + 1e-9)
                        for c in relaxed
                    )
                    step_s = (passes - share) * column.time_s + bound_s.total_s + column.tail_s
                    assert bound.step_s(count) <= step_s * (1 + 1e-9)
                    assert may_fit(layout, table, limit) or layout.mesh.pp > 1
    assert seen > 3


def test_no_order_of_the_blocks_of_a_mix_needs_less_than_the_widest_first() -> None:
    case = instance(1, 6 * STATES)
    table = MixTable(case.price_cache(), replace(PINS, recompute=tuple(Recompute)))
    (columns, *_) = (ChunkColumns(0, layout, table) for layout in chunked_frames(case))
    mixes, lower = columns._every(5), 0
    mixes = mixes.at(np.flatnonzero(mixes.host_bytes == 0))

    for counts, needs in zip(mixes.counts, mixes.workspace_bytes, strict=True):
        blocks = [
            option
            for option, count in zip(mixes.options, counts, strict=True)
            for _ in range(count)
        ]
        orders = list(set(itertools.permutations(blocks)))
        assert needs == min(map(most_beyond_saved, orders))
        lower += needs < max(map(most_beyond_saved, orders))

    assert lower > 5


def most_beyond_saved(blocks: Sequence[LayerOption]) -> float:
    """Returns the most that a backward pass takes beyond all saved bytes, the last block first."""
    freed, most = 0.0, 0.0
    for block in reversed(blocks):
        most = max(most, block.workspace_bytes - freed)
        freed += block.saved_bytes
    return most


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize(
    ("host", "rate"), [(2.0, 5e9), pytest.param(4.0, 1e11, marks=pytest.mark.slow), (6.0, 1e12)]
)
def test_no_mix_that_sends_activations_is_below_the_relaxation(
    gpus: int,
    host: float,
    rate: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prices each mix with each location on small hosts; no fitting one is ruled out."""
    monkeypatch.setattr("parplan.planner.stage_columns.chunk_columns.MOST_SENDING", 10**6)
    case = instance(
        gpus,
        3 * STATES,
        batch=32,
        pcie_bytes_per_s=rate,
        host_memory_bytes=int(gpus * host * STATES),
    )
    table = MixTable(case.price_cache(), PINS)
    limit = float(case.cluster.device.memory_bytes)
    sent = 0
    for layout in chunked_frames(case)[:: 3 * gpus]:
        for rank in range(layout.mesh.pp):
            columns = ChunkColumns(rank, layout, table)
            for count in list(block_counts(rank, layout, 6))[::2]:
                relaxed, solved = columns.relaxed(count, limit), columns.fastest(count, limit)
                for column in solved:
                    assert any(
                        c.time_s <= column.time_s * (1 + 1e-9)
                        and c.tail_s <= column.tail_s * (1 + 1e-9)
                        for c in relaxed
                    )
                    sent += any(option.on_host for option, _ in column.mix)
                assert not solved or layout.mesh.pp > 1 or may_fit(layout, table, limit)
                assert not solved or layout.mesh.pp > 1 or in_reach(table, limit)
    assert sent or host < 6


@pytest.mark.slow
def test_fewer_micro_batches_hold_as_much_but_for_their_ids() -> None:
    """An error prices a plan that does not fit with as many micro-batches as fill its pipeline."""
    case = instance(2, 10 * STATES, batch=16)
    price_cache, table = (
        case.price_cache().within(Chunking(limit_bytes=float(10**12))),
        MixTable(case.price_cache(), PINS),
    )
    for layout in chunked_frames(case):
        if _shorter(layout) != layout:
            ranks = [ChunkColumns(rank, layout, table) for rank in range(layout.mesh.pp)]
            strategy = to_strategy(
                layout, tuple(rank.smallest(6 // layout.mesh.pp) for rank in ranks)
            )
            for rank in range(layout.mesh.pp):
                shorter = replace(strategy, layout=_shorter(layout))
                whole = chunked_memory(strategy, rank, price_cache)
                less = chunked_memory(shorter, rank, price_cache)
                dropped = layout.num_micro_batches - shorter.layout.num_micro_batches
                ids = IDS_BYTES * case.training.seq_length * layout.micro_batch_size * dropped
                assert (whole.states, whole.activations, whole.host) == (
                    less.states,
                    less.activations,
                    less.host,
                )
                assert whole.temporaries - less.temporaries == ids


def every_strategy(layout: ParallelLayout) -> list[Strategy]:
    """Returns all locations and levels of one rank's blocks, in runs."""
    zero = 3 if layout.mesh.dp > 1 else 0
    ends = (
        LayerChoice(LayerKind.EMBEDDING, Recompute.NONE, zero),
        LayerChoice(LayerKind.HEAD, Recompute.NONE, zero),
    )
    strategies = []
    for host, optimizer in itertools.product(range(7), repeat=2):
        if host + optimizer <= 6:
            for levels in itertools.combinations_with_replacement(Recompute, 6):
                blocks = [
                    LayerChoice(LayerKind.BLOCK, level, zero, home=home)
                    for level, home in zip(
                        levels, BlockLocations(host, optimizer).of(6), strict=True
                    )
                ]
                strategies.append(Strategy(layout=layout, stages=((ends[0], *blocks, ends[1]),)))
    return strategies


@pytest.mark.slow
def test_a_plan_is_as_fast_as_the_fastest_of_all_strategies_that_fit() -> None:
    """Each strategy is priced with its exact schedule."""
    case = instance(1, 5 * STATES // 2, pcie_bytes_per_s=3e9)
    pins = replace(PINS, recompute=tuple(Recompute), micro_batch_size=(2,))
    plan = find_plan(
        case.model,
        case.cluster,
        case.training,
        constraints=pins,
        options=SearchOptions(memory_margin=0.0),
    )
    (layout,) = chunked_frames(case, pins)
    price_cache, best_s = (
        case.price_cache().within(Chunking(limit_bytes=float(case.cluster.device.memory_bytes))),
        float("inf"),
    )
    usable = usable_bytes(case.cluster.device.memory_bytes, layout.mesh, price_cache)
    for strategy in every_strategy(layout):
        if rank_chunks(
            strategy, 0, price_cache, eviction=Eviction.OPT, device_bytes=10**12
        ).smallest_bytes <= int(usable):
            best_s = min(best_s, price_step(strategy, price_cache).step_s)
    assert plan.predicted.step_time_s.value <= best_s * 1.02


def blocks_of(pcie_bytes_per_s: float) -> tuple[int, int]:
    """Returns how many blocks of the best plan recompute, and how many have states on the host."""
    case = instance(
        1,
        9 * STATES // 2,
        batch=16,
        pcie_bytes_per_s=pcie_bytes_per_s,
        pcie_node_bytes_per_s=None,
        host_bytes_per_s=1e14,
    )
    plan = find_plan(
        case.model,
        case.cluster,
        case.training,
        constraints=replace(PINS, micro_batch_size=(4,)),
        options=SearchOptions(memory_margin=0.0),
    )
    blocks = [
        plan.layer_plans[run.plan]
        for stage in plan.stages
        for run in stage.layers
        for _ in planned_blocks(plan, run)
    ]
    return sum(bool(block.recompute) for block in blocks), sum(
        bool(block.offload) for block in blocks
    )


@pytest.mark.slow
def test_fast_copies_make_room_for_activations_and_slow_ones_are_avoided_by_recompute() -> None:
    assert blocks_of(1e12) == (0, 6)
    recomputed, offloaded = blocks_of(1e7)
    assert recomputed == 5  # the last block need not: its backward pass comes first
    assert offloaded < 6


@pytest.mark.slow
def test_what_fits_the_devices_by_more_pipeline_does_not_go_to_slow_hosts() -> None:
    case = instance(4, 4 * STATES, batch=16, pcie_bytes_per_s=1e7, pcie_node_bytes_per_s=None)
    pins = replace(
        PINS, tp=(1,), micro_batch_size=(1, 4), schedule=(Schedule.ONE_F_ONE_B, Schedule.GPIPE)
    )
    plan = find_plan(
        case.model,
        case.cluster,
        case.training,
        constraints=pins,
        options=SearchOptions(memory_margin=0.0),
    )
    assert plan.chunks is None
    alone = replace(case.cluster, nodes=1, gpus_per_node=1)
    small = find_plan(
        case.model,
        alone,
        case.training,
        constraints=pins,
        options=SearchOptions(memory_margin=0.0),
    )
    assert small.chunks is not None


def test_the_host_is_used_unasked_only_where_nothing_fits_without() -> None:
    pins, options = replace(PINS, offload=None), SearchOptions(memory_margin=0.0)
    for memory_bytes, offloaded in ((6 * STATES, True), (20 * STATES, False)):
        case = instance(1, memory_bytes)
        plan = find_plan(case.model, case.cluster, case.training, constraints=pins, options=options)
        assert (plan.chunks is not None) == offloaded
        (said,) = offload_assumed(pins, plan) or ("",)
        assert (
            said
            == "--offload optimizer,parameters,activations,lookup (nothing fits the devices alone)"
            * offloaded
        )
    with pytest.raises(InfeasibleError):
        find_plan(
            case.model,
            replace(case.cluster, device=replace(case.cluster.device, memory_bytes=6 * STATES)),
            case.training,
            constraints=Constraints(offload=()),
            options=options,
        )


@pytest.mark.slow
def test_an_error_says_how_much_memory_the_hosts_lack_and_that_much_is_enough() -> None:
    case = instance(1, 4 * STATES, host_memory_bytes=MIB)
    model = replace(case.model, num_layers=400)
    with pytest.raises(
        InfeasibleError, match=r"it would fit with 6 GiB of host memory a node, there are 0$"
    ):
        find_plan(
            model,
            case.cluster,
            case.training,
            constraints=PINS,
            options=SearchOptions(memory_margin=0.0),
        )
    enough = enough_host_bytes(
        request(model, case.cluster, case.training, constraints=PINS), 4.0 * STATES
    )
    assert enough is not None
    plan = find_plan(
        model,
        replace(case.cluster, host_memory_bytes=enough),
        case.training,
        constraints=PINS,
        options=SearchOptions(memory_margin=0.0),
    )
    assert max(stage.host for stage in plan.predicted.memory_gib) * GIB <= enough


@pytest.mark.parametrize("offload", [(Offload.OPTIMIZER,), (Offload.PARAMETERS,)])
def test_a_plan_keeps_on_the_host_only_what_it_may(offload: tuple[Offload, ...]) -> None:
    case = instance(1, 6 * STATES)
    plan = find_plan(
        case.model,
        case.cluster,
        case.training,
        constraints=Constraints(offload=offload),
        options=SearchOptions(memory_margin=0.0),
    )
    assert plan.chunks is not None
    homes = {group.home for group in plan.chunks.groups}
    assert homes <= {
        StateLocation.DEVICE,
        StateLocation.OPTIMIZER if offload == (Offload.OPTIMIZER,) else StateLocation.HOST,
    }
    assert len(homes) > 1
