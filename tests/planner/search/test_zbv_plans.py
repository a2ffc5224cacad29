"""ZBV and custom schedules: prices against the simulation, the search against brute force."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement, product
from pathlib import Path

import pytest

from parplan.commands.requests.layouts import action_rows
from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.memory.rank_memory import rank_memory
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schedules.schedule import Schedule, csv_rows
from parplan.costmodels.step import price_step
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy
from parplan.planner.plan.plan_file import read_plan, write_plan
from parplan.planner.plan.reprice import reprice
from parplan.planner.request import Constraints, SearchOptions
from parplan.planner.stage_columns.block_counts import block_counts, to_strategy
from parplan.planner.stage_columns.columns import RankColumns
from parplan.planner.stage_columns.mix_table import MixTable
from parplan.profiles.errors import ConfigError, InfeasibleError
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.stack import NEUTRAL
from tests.helpers.cases import mostly_slow
from tests.helpers.instances import peak_bytes, random_instance
from tests.helpers.planning import enumerate_candidates, estimate_plan, find_plan

LLAMA = load_model("llama3-8b").spec
H100 = with_gpus(load_cluster("h100-80gb"), 8)
TRAINING = TrainingSpec(global_batch_size=32, seq_length=4096, stack=NEUTRAL)
ZBV_PIN = Constraints(schedule=(Schedule.ZBV,), pp=(2,))


def frame_of(
    pp: int = 4,
    dp: int = 2,
    tp: int = 1,
    *,
    schedule: Schedule = Schedule.ZBV,
    v: int = 2,
    b: int = 1,
    actions=(),
) -> ParallelLayout:
    return ParallelLayout(
        mesh=Mesh(pp=pp, dp=dp, tp=tp),
        schedule=schedule,
        virtual_stages=v,
        micro_batch_size=b,
        num_micro_batches=TRAINING.global_batch_size // (b * dp),
        sequence_parallel=tp > 1,
        actions=actions,
    )


def zbv_strategy(
    layout: ParallelLayout, counts: tuple[int, ...], zeros: tuple[tuple[int, ...], ...]
) -> Strategy:
    """Puts `counts[r]` blocks of ZeRO stages `zeros[r]` on rank r.

    The larger half is on the first chunk. The ends have the first ZeRO stage.
    """
    layers: list[list[LayerChoice]] = [[] for _ in range(layout.num_virtual_stages)]
    for rank, (count, stages) in enumerate(zip(counts, zeros, strict=True)):
        blocks = [LayerChoice(LayerKind.BLOCK, (), zero) for zero in stages]
        layers[rank] += blocks[: -(-count // 2)]
        layers[layout.num_virtual_stages - 1 - rank] += blocks[-(-count // 2) :]
    layers[0].insert(0, LayerChoice(LayerKind.EMBEDDING, Recompute.NONE, zeros[0][0]))
    layers[-1].append(LayerChoice(LayerKind.HEAD, Recompute.NONE, zeros[0][0]))
    return Strategy(layout=layout, stages=tuple(map(tuple, layers)))


@pytest.mark.parametrize(
    "layout",
    [
        frame_of(),
        frame_of(2, 2, 2),
        frame_of(4, 1, 2, b=4),
        frame_of(2, 4, b=2),
        frame_of(schedule=Schedule.DUALPIPEV),
        frame_of(2, 4, b=2, schedule=Schedule.DUALPIPEV),
    ],
    ids=str,
)
def test_what_a_rank_holds_of_micro_batches_is_what_the_simulation_holds(layout):
    price_cache = PriceCache(LLAMA, TRAINING, machine_for(H100))
    strategy = zbv_strategy(
        layout,
        (LLAMA.num_layers // layout.mesh.pp,) * layout.mesh.pp,
        ((1,) * (LLAMA.num_layers // layout.mesh.pp),) * layout.mesh.pp,
    )
    price = price_step(strategy, price_cache)

    for rank, timeline in enumerate(price.simulated.ranks):
        memory = rank_memory(strategy, rank, price_cache)
        layers = [choice for chunk in strategy.chunks(rank) for choice in chunk]
        kept = [
            price_cache.activations(c.kind, layout.micro_batch_size, layout.sharding)
            for c in layers
        ]
        states = [price_cache.states(c.kind, layout.mesh, layout.sharding, 1) for c in layers]
        transient = max(size.workspace for size in kept) + max(
            state.zero_buffer for state in states
        )
        held = memory.activations + memory.temporaries - transient
        head = price_cache.waiting_bytes(LayerKind.HEAD, layout.micro_batch_size, layout.sharding)
        if layout.schedule is Schedule.DUALPIPEV and rank == 0:  # the head's gradient never waits
            assert held - head <= timeline.peak_stash_bytes <= held  # while most stashes are held
        else:
            assert held == pytest.approx(timeline.peak_stash_bytes, rel=1e-12)


@pytest.mark.parametrize("seed", [1, 4])
def test_columns_have_the_price_and_the_memory_of_the_strategy_that_they_become(seed):
    instance = replace(
        random_instance(seed), model=replace(random_instance(seed).model, num_layers=7)
    )
    price_cache, table = instance.price_cache(), MixTable(instance.price_cache(), Constraints())
    layout = ParallelLayout(
        mesh=Mesh(pp=2, dp=2, tp=1),
        schedule=Schedule.ZBV,
        virtual_stages=2,
        micro_batch_size=1,
        num_micro_batches=2,
        sequence_parallel=False,
    )
    counts = (3, 4)
    columns = tuple(
        RankColumns(rank, layout, table).smallest(count) for rank, count in enumerate(counts)
    )

    strategy = to_strategy(layout, columns)
    price = price_step(strategy, price_cache)

    assert [
        sum(c.kind is LayerKind.BLOCK for chunk in strategy.chunks(rank) for c in chunk)
        for rank in range(2)
    ] == [3, 4]
    assert [len(stage) for stage in strategy.stages] == [1 + 2, 2, 2, 1 + 1]
    for rank, column in enumerate(columns):
        assert column.memory_bytes == pytest.approx(price.memory[rank].total, rel=1e-12)
        line = price.simulated.ranks[rank]
        assert column.time_s * layout.num_micro_batches == pytest.approx(
            line.busy_s + line.transfer_s, rel=1e-12
        )


@pytest.mark.parametrize(
    "schedule", mostly_slow([Schedule.ZBV, Schedule.DUALPIPEV], {Schedule.DUALPIPEV})
)
@pytest.mark.parametrize("seed", mostly_slow(range(2), {1}))
def test_the_search_finds_the_best_of_all_plans_of_the_schedule_where_memory_binds(seed, schedule):
    pins = replace(ZBV_PIN, schedule=(schedule,))
    instance = random_instance(seed)
    instance = replace(
        instance,
        model=replace(instance.model, num_layers=6),
        training=replace(
            instance.training, global_batch_size=16 if schedule is Schedule.DUALPIPEV else 4
        ),
    )
    price_cache, space = (
        instance.price_cache(),
        enumerate_candidates(instance.model, instance.cluster, instance.training, pins),
    )
    layouts = [layout for layout in space.layouts if layout.mesh.tp == 1]
    everything = [
        price_step(zbv_strategy(layout, counts, zeros), price_cache)
        for layout in layouts
        for counts in ((2, 4), (3, 3), (4, 2))
        for zeros in product(
            *(
                combinations_with_replacement(range(3) if layout.mesh.dp > 1 else (0,), count)
                for count in counts
            )
        )
    ]
    peaks = sorted(map(peak_bytes, everything))
    limit = int(peaks[len(peaks) // 4])
    best_s = min(price.closed_form_s for price in everything if peak_bytes(price) <= limit)

    plan = find_plan(
        instance.model,
        instance.cluster,
        instance.training,
        constraints=replace(pins, tp=(1,)),
        options=SearchOptions(memory_limit_bytes=limit),
    )

    assert plan.pipeline.schedule is schedule
    assert plan.search.fastest_step_time_s <= best_s * (1 + 1e-5) + 2e-6
    assert plan.search.bound <= best_s * (1 + 1e-5) + 2e-6
    assert plan.search.gap < 0.01  # the simulated step may be below the closed form by as much
    assert max(stage.total for stage in plan.predicted.memory_gib) * 2**30 <= limit * (1 + 1e-4)


@pytest.mark.slow
def test_where_the_bubble_is_large_the_search_takes_it_and_says_what_it_holds():
    pins = Constraints(pp=(4,), tp=(1,), micro_batch_size=(1,), zero=(1,))

    plan = find_plan(LLAMA, H100, TRAINING, constraints=pins)
    without = find_plan(
        LLAMA,
        H100,
        TRAINING,
        constraints=replace(pins, schedule=(Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED)),
    )

    assert plan.pipeline.schedule is Schedule.ZBV
    assert [stage.rank for stage in plan.stages] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert plan.predicted.step_time_s.value < 0.98 * without.predicted.step_time_s.value
    assert (
        plan.predicted.breakdown.pp_bubble_s.value < without.predicted.breakdown.pp_bubble_s.value
    )
    assert all(layer.recompute == () for layer in plan.layer_plans.values())


@pytest.mark.parametrize(
    ("pins", "reason"),
    [
        (Constraints(recompute=(Recompute.FULL,)), "zbv runs without recompute"),
        (Constraints(zero=(3,)), "zbv does not run with ZeRO 3"),
    ],
)
def test_what_the_executor_cannot_run_with_it_is_not_offered(pins, reason):
    space = enumerate_candidates(LLAMA, H100, TRAINING, pins)

    assert not any(
        layout.schedule is Schedule.ZBV and layout.mesh.dp > 1 for layout in space.layouts
    )
    assert any(reason in pruned.reason for pruned in space.pruned)


def test_the_zero_stages_of_its_columns_leave_out_the_third():
    table = MixTable(PriceCache(LLAMA, TRAINING, machine_for(H100)), Constraints())

    assert table.zero_stages(frame_of()) == (0, 1, 2)
    assert table.zero_stages(frame_of(schedule=Schedule.INTERLEAVED)) == (0, 1, 2, 3)


def test_each_rank_holds_a_block_a_chunk_at_least():
    assert list(block_counts(1, frame_of(4), 10)) == [2, 3, 4]
    with pytest.raises(
        (ConfigError, InfeasibleError),
        match=r"pp 8 x 2 virtual stages are more than the 12 layers|no legal way",
    ):
        find_plan(
            replace(LLAMA, num_layers=12),
            H100,
            TRAINING,
            constraints=Constraints(schedule=(Schedule.ZBV,), pp=(8,)),
        )


def test_lists_from_a_file_are_priced_as_the_schedule_that_they_are_and_read_back(tmp_path: Path):
    for schedule, v in ((Schedule.ZBV, 2), (Schedule.DUALPIPEV, 2), (Schedule.ONE_F_ONE_B, 1)):
        known = frame_of(schedule=schedule, v=v)
        file = tmp_path / "lists.csv"
        file.write_text("\n".join(csv_rows(schedule, 4, known.num_micro_batches, v)) + "\n")
        custom = replace(known, schedule=Schedule.CUSTOM, actions=action_rows(file))

        custom_plan = estimate_plan(LLAMA, H100, TRAINING, custom, zero=1)
        expected = estimate_plan(LLAMA, H100, TRAINING, known, zero=1)

        assert custom_plan.predicted.step_time_s == expected.predicted.step_time_s
        write_plan(custom_plan, tmp_path / "plan.yaml")
        assert read_plan(tmp_path / "plan.yaml") == custom_plan
        assert reprice(custom_plan).plan.predicted == custom_plan.predicted
        for mine, theirs in zip(
            custom_plan.predicted.memory_gib, expected.predicted.memory_gib, strict=True
        ):
            assert mine.total == pytest.approx(theirs.total, rel=2e-3)


@pytest.mark.parametrize(
    ("zero", "recompute", "message"),
    [
        (3, Recompute.NONE, "does not run with ZeRO 3"),
        (1, Recompute.FULL, "runs without recompute"),
    ],
)
def test_an_estimate_of_what_cannot_run_is_refused(zero, recompute, message):
    with pytest.raises(ConfigError, match=message):
        estimate_plan(LLAMA, H100, TRAINING, frame_of(), zero=zero, recompute=recompute)


def test_lists_that_wait_for_each_other_are_refused_before_they_are_priced():
    rows = ("0F0,0B0", "1F0,1B0")
    layout = replace(
        frame_of(2, 4, schedule=Schedule.CUSTOM, v=1, actions=rows),
        num_micro_batches=1,
        micro_batch_size=8,
    )
    estimate_plan(LLAMA, H100, TRAINING, layout, zero=1)

    with pytest.raises(ConfigError, match="1B0 comes after nothing"):
        estimate_plan(
            LLAMA, H100, TRAINING, replace(layout, actions=("0F0,0B0", "1B0,1F0")), zero=1
        )


def test_a_plan_has_lists_when_and_only_when_its_schedule_is_custom():
    plan = estimate_plan(LLAMA, H100, TRAINING, frame_of(), zero=1)

    with pytest.raises(ConfigError, match="schedule custom has 0 lines"):
        replace(plan.pipeline, schedule=Schedule.CUSTOM)
    with pytest.raises(ConfigError, match="schedule zbv has 1 lines"):
        replace(plan.pipeline, actions=("0F0",))
