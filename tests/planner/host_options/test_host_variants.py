"""The search offloads activations over fast copies and not over slow ones."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from parplan.commands.requests.requests import offload_assumed
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.layers.recompute import Recompute, saved_bytes
from parplan.costmodels.memory.rank_memory import stashes
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.step import price_step
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy
from parplan.planner.host_options.activation_options import host_options
from parplan.planner.host_options.host_variants import with_host
from parplan.planner.plan.derived import blocks_of
from parplan.planner.plan.plan import LayerPlan, Plan
from parplan.planner.plan.plan_file import read_plan, write_plan
from parplan.planner.plan.reprice import reprice
from parplan.planner.request import Constraints, SearchOptions
from parplan.planner.stage_columns.block_counts import to_strategy
from parplan.planner.stage_columns.columns import RankColumns
from parplan.planner.stage_columns.mix_table import MixTable
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack, with_gpus
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import Precision, TrainingSpec
from parplan.profiles.units import GIB, MIB
from tests.helpers.command_runs import succeed
from tests.helpers.instances import Instance
from tests.helpers.planning import enumerate_candidates, find_plan, least_peak_bytes
from tests.planner.stage_columns.test_chunk_columns import instance

PINS = Constraints(offload=(Offload.ACTIVATIONS,), pp=(1,), micro_batch_size=(8,))
NOTHING_KEPT = SearchOptions(memory_margin=0.0)
LITTLE = 100 * MIB  # the states of six blocks take most of it


def small(
    memory_bytes: int = LITTLE, rate: float = 1e12, gpus: int = 1, **changes: object
) -> Instance:
    return instance(
        gpus, memory_bytes, batch=16, pcie_bytes_per_s=rate, pcie_node_bytes_per_s=None, **changes
    )


def best_plan(case: Instance, pins: Constraints = PINS) -> Plan:
    return find_plan(
        case.model, case.cluster, case.training, constraints=pins, options=NOTHING_KEPT
    )


def blocks(plan: Plan) -> list[LayerPlan]:
    return [
        plan.layer_plans[run.plan]
        for stage in plan.stages
        for run in stage.layers
        for _ in blocks_of(plan, run)
    ]


def test_fast_copies_take_activations_to_the_host_and_slow_ones_leave_them_to_recompute() -> None:
    fast, slow = blocks(best_plan(small())), blocks(best_plan(small(rate=1e7)))
    assert all(block.keep_on_host and not block.recompute for block in fast)
    assert not any(block.keep_on_host for block in slow)
    assert any(block.recompute for block in slow)


def test_a_plan_with_them_fits_and_its_file_is_priced_as_it_was(tmp_path: Path) -> None:
    case = small()
    plan, path = best_plan(case), tmp_path / "plan.yaml"
    write_plan(plan, path)

    assert reprice(read_plan(path)).plan.predicted == plan.predicted
    (memory,) = plan.predicted.memory_gib
    assert memory.total * GIB <= case.cluster.device.memory_bytes + 1e-3 * GIB
    assert memory.host * GIB <= case.cluster.host_memory_bytes
    assert "kept on the host: " in succeed("show", str(path)).output


@pytest.mark.slow
def test_a_small_host_keeps_what_it_holds_and_none_gets_a_plan_without() -> None:
    pins, case = replace(PINS, micro_batch_size=(8, 16)), small()
    much = best_plan(case, pins).predicted.memory_gib[0].host * GIB
    shares = [share * much for share in (0.3, 0.6, 0.95)]
    hosts = [
        best_plan(replace(case, cluster=replace(case.cluster, host_memory_bytes=int(share))), pins)
        for share in shares
    ]
    held = [plan.predicted.memory_gib[0].host * GIB for plan in hosts]
    assert all(host <= share + 1e-3 * GIB for host, share in zip(held, shares, strict=True))
    assert any(held)
    nothing = best_plan(replace(case, cluster=replace(case.cluster, host_memory_bytes=1)), pins)
    assert not any(block.keep_on_host for block in blocks(nothing))


def test_the_variants_are_behind_the_options_and_are_lists_of_the_blocks_operators() -> None:
    case = small(rate=2e10)
    table, plain = MixTable(case.price_cache(), PINS), MixTable(case.price_cache(), Constraints())
    (layout,) = enumerate_candidates(case.model, case.cluster, case.training, PINS).layouts
    options, more = plain.options(layout), table.options(layout)
    assert more[: len(options)] == options
    assert not any(option.on_host for option in options)
    assert len(more) > len(options)
    for option in more[len(options) :]:
        of_alike = host_options(
            layout.micro_batch_size, option.sharding, option.recompute, case.price_cache()
        )
        (same,) = [priced for priced in of_alike if priced.on_host == option.on_host]
        assert (option.saved_bytes, option.host_bytes) == (same.saved_bytes, same.host_bytes)
        block, shard = (
            case.price_cache().kept_layer(LayerKind.BLOCK, layout.micro_batch_size),
            (option.sharding, option.recompute, case.training.stack),
        )
        assert same.saved_bytes == saved_bytes(block, *shard, option.on_host)
        assert same.host_bytes == saved_bytes(block, *shard) - same.saved_bytes
    split = replace(layout, schedule=Schedule.ZBV, virtual_stages=2)
    assert not any(option.on_host for option in table.options(split))
    assert with_host((), 8, case.price_cache()) == ()


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("rate", [1e9, 2e10, 1e13])
def test_columns_wait_for_copies_as_stages_do_and_never_hold_less(gpus: int, rate: float) -> None:
    """A stage with a single offloading block has no window beside it, but its column has one."""
    case = instance(gpus, LITTLE * 10, batch=16, pcie_bytes_per_s=rate, pcie_node_bytes_per_s=None)
    pins = replace(PINS, pp=(gpus,), micro_batch_size=(1, 4), schedule=(Schedule.ONE_F_ONE_B,))
    table, seen = MixTable(case.price_cache(), pins), 0
    for layout in enumerate_candidates(case.model, case.cluster, case.training, pins).layouts:
        ranks = [RankColumns(rank, layout, table) for rank in range(gpus)]
        largest = max(option.host_bytes for option in table.options(layout)) * (
            1 + case.training.stack.allocator_share
        )
        for limit in (
            2**40,
            *(
                share * max(rank.smallest(6 // gpus).memory_bytes for rank in ranks)
                for share in (1.01, 1.05, 1.1)
            ),
        ):
            columns = tuple(rank.fastest(6 // gpus, limit)[0] for rank in ranks)
            price = price_step(to_strategy(layout, columns), case.price_cache())
            for number, (rank, column, memory) in enumerate(
                zip(ranks, columns, price.memory, strict=True)
            ):
                whole_s = column.time_s + column.tail_s / layout.num_micro_batches
                assert any(
                    bound.time_s <= whole_s * (1 + 1e-9) for bound in rank.relaxed(6 // gpus, limit)
                )
                assert memory.total <= column.memory_bytes * (1 + 1e-12) <= limit * (1 + 1e-12)
                sent = stashes(LayerKind.BLOCK, number, layout) * sum(
                    n * option.host_bytes for option, n in column.mix
                )
                assert memory.host == pytest.approx(sent)
                apart = memory.apart * (1 + case.training.stack.allocator_share)
                assert column.memory_bytes <= (memory.total + apart + largest) * (1 + 1e-12)
                line = price.simulated.ranks[number]
                assert column.time_s * layout.num_micro_batches == pytest.approx(
                    price.ranks[number].total.value_s - line.tail_s, rel=1e-9
                )
                seen += sent > 0
    assert seen or rate == 1e9


def test_that_activations_went_to_the_host_unasked_is_said() -> None:
    plan = best_plan(small())
    assert offload_assumed(replace(PINS, offload=None), plan)
    assert not offload_assumed(PINS, plan)


def every_strategy(layout: ParallelLayout, case: Instance) -> list[Strategy]:
    """Returns each pair of recompute levels with each offload list, in each number of blocks."""
    price_cache = case.price_cache()
    kinds = [
        LayerChoice(LayerKind.BLOCK, level, 0, on_host=option.on_host)
        for level in Recompute
        for option in host_options(layout.micro_batch_size, layout.sharding, level, price_cache)
    ]
    ends = (
        LayerChoice(LayerKind.EMBEDDING, Recompute.NONE, 0),
        LayerChoice(LayerKind.HEAD, Recompute.NONE, 0),
    )
    return [
        Strategy(
            layout=layout, stages=((ends[0], *(first,) * count, *(second,) * (6 - count), ends[1]),)
        )
        for first, second in itertools.product(kinds, repeat=2)
        for count in range(6)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("rate", [1e9, 3e10, 1e12])
def test_a_plan_is_as_fast_as_the_fastest_of_all_strategies_that_fit(
    rate: float, rows: int
) -> None:
    """Blocks that send less than the hidden maximum have a smaller window: a few percent of six."""
    case, pins = small(rate=rate), replace(PINS, recompute=tuple(Recompute))
    if rows > 1:
        case = small(2 * LITTLE // 7, rate, gpus=2 * rows)
        pins = replace(pins, tp=(2 * rows,), tp_rows=(rows,), megatron_sharding=True)
    plan = best_plan(case, pins)
    assert any(block.keep_on_host for block in blocks(plan)) or rate < 1e12
    (layout,) = enumerate_candidates(case.model, case.cluster, case.training, pins).layouts
    priced = (price_step(strategy, case.price_cache()) for strategy in every_strategy(layout, case))
    best_s = min(
        price.step_s
        for price in priced
        if price.memory[0].total <= case.cluster.device.memory_bytes
    )
    assert plan.predicted.step_time_s.value <= best_s * 1.05


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_plan_found_so_runs_as_it_was_predicted(tmp_path: Path) -> None:
    entry, cpu = load_model("gpt-tiny"), with_gpus(load_cluster("cpu"), 2)
    training = TrainingSpec(
        global_batch_size=8,
        seq_length=entry.seq_length,
        precision=Precision.FP32,
        stack=load_stack("parplan"),
    )
    pins = Constraints(
        pp=(1,),
        dp=(2,),
        micro_batch_size=(4,),
        recompute=(Recompute.NONE,),
        zero=(1,),
        offload=(Offload.ACTIVATIONS,),
    )
    least = least_peak_bytes(entry.spec, cpu, training, replace(pins, offload=pins.offload))
    without = least_peak_bytes(entry.spec, cpu, training, replace(pins, offload=()))
    assert least is not None
    assert without is not None
    assert without - least > MIB
    limit = SearchOptions(memory_limit_bytes=int(least + MIB))
    plan = find_plan(entry.spec, cpu, training, constraints=pins, options=limit)
    assert any(block.keep_on_host for block in blocks(plan))
    path = tmp_path / "plan.yaml"
    write_plan(plan, path)
    succeed("check", str(path), "--execute")
