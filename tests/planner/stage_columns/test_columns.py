"""Stage columns have the time, memory and redundancy of full pricing, and no dominated choice."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.step import price_step
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.master import evaluate
from parplan.planner.request import Constraints
from parplan.planner.stage_columns.block_counts import block_counts, to_strategy
from parplan.planner.stage_columns.columns import RankColumns
from parplan.planner.stage_columns.mix_table import MixTable
from parplan.planner.stage_columns.stage_prices import end_kinds
from parplan.profiles.machines.machine_catalog import load_stack
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import Precision
from tests.helpers.cases import mostly_slow
from tests.helpers.instances import (
    PINS,
    every_strategy,
    mixed_strategies,
    peak_bytes,
    random_instance,
    redundant_bytes,
    same_zero_of_ends,
    with_other_ends,
)
from tests.helpers.planning import enumerate_candidates

SEEDS = mostly_slow((0, 1, 2, 4), {4})
DEPTHS = [
    pytest.param(None, id="shallow"),
    pytest.param(4, id="with-virtual-stages", marks=pytest.mark.slow),
]  # 2 ranks x 2 chunks need 4 blocks
UNLIMITED = math.inf


def instance_of(seed, num_layers=None):
    instance = random_instance(seed)
    return (
        replace(instance, model=replace(instance.model, num_layers=num_layers))
        if num_layers
        else instance
    )


def frames_of(instance):
    return enumerate_candidates(instance.model, instance.cluster, instance.training, PINS).layouts


def frame_of(pp, v=1):
    return ParallelLayout(
        mesh=Mesh(pp=pp, dp=1, tp=1),
        schedule=Schedule.INTERLEAVED if v > 1 else Schedule.ONE_F_ONE_B,
        virtual_stages=v,
        micro_batch_size=1,
        num_micro_batches=8,
        sequence_parallel=False,
    )


def every_mix(rank, count, layout, price_cache):
    """Returns the columns of a rank at each ZeRO stage with each subset of levels.

    The columns are the front of time against memory, with mixes in its middle, and other ends.
    """
    mixes = set()
    for zero in range(4) if layout.mesh.dp > 1 else (0,):
        for size in (1, 2, 3):
            for levels in itertools.combinations(Recompute, size):
                columns = RankColumns(
                    rank,
                    layout,
                    MixTable(
                        price_cache,
                        Constraints(recompute=levels, zero=(zero,), megatron_sharding=True),
                    ),
                )
                mixes.update((*columns.leanest(count, UNLIMITED), columns.smallest(count)))
                front = columns.fastest(count, UNLIMITED)
                while front:
                    mixes.update(front)
                    front = columns.fastest(count, front[0].memory_bytes - 1)
    return sorted(mixes, key=lambda column: (column.zero, column.time_s, column.memory_bytes))


@pytest.mark.parametrize("num_layers", DEPTHS)
@pytest.mark.parametrize("seed", SEEDS)
def test_columns_cost_what_full_pricing_says_for_every_mix_and_zero_stage(seed, num_layers):
    instance = instance_of(seed, num_layers)
    price_cache = instance.price_cache()
    mixed = 0
    for layout in frames_of(instance):
        pp, layers = layout.mesh.pp, instance.model.num_layers
        split = [layers // pp + (rank < layers % pp) for rank in range(pp)]
        per_rank = [every_mix(rank, count, layout, price_cache) for rank, count in enumerate(split)]
        longest = max(map(len, per_rank))
        mixed += sum(len(column.mix) > 1 for options in per_rank for column in options)
        for index in range(
            longest
        ):  # every column of every rank, next to a varied choice of the other ranks
            columns = tuple(
                options[(index + 3 * rank) % len(options)] for rank, options in enumerate(per_rank)
            )
            price = price_step(to_strategy(layout, columns), price_cache)
            choice = evaluate(layout, columns, proven=True)

            assert [column.memory_bytes for column in columns] == pytest.approx(
                [m.total for m in price.memory], rel=1e-12
            )
            assert [column.redundant_bytes for column in columns] == pytest.approx(
                [rank.total for rank in price.redundant], rel=1e-9, abs=16
            )
            assert choice.step_s == pytest.approx(price.closed_form_s, rel=1e-12)
            for column, rank, timeline in zip(
                columns, price.ranks, price.simulated.ranks, strict=True
            ):
                work_s = rank.total.value_s - timeline.tail_s
                assert column.time_s * layout.num_micro_batches == pytest.approx(work_s, rel=1e-9)
                assert column.tail_s == pytest.approx(timeline.tail_s, rel=1e-12)
    assert mixed or num_layers is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "gradients"),
    mostly_slow(
        itertools.product(
            ["megatron-core", "megatron-deepspeed", "nanotron", "torchtitan-2024"],
            [Precision.FP16, Precision.FP32],
        ),
        {("torchtitan-2024", Precision.FP32)},
    ),
)
def test_columns_hold_what_full_pricing_says_under_every_stack(name, gradients):
    stack, instance = load_stack(name), instance_of(3, 4)
    training = replace(
        instance.training,
        stack=stack,
        attention=stack.attention,
        precision=Precision.FP16,
        gradient_precision=gradients,
    )
    price_cache = replace(instance, training=training).price_cache()
    for layout in frames_of(instance):
        table = MixTable(price_cache, Constraints())
        columns = tuple(
            RankColumns(rank, layout, table).smallest(4 // layout.mesh.pp)
            for rank in range(layout.mesh.pp)
        )

        price = price_step(to_strategy(layout, columns), price_cache)

        assert [column.memory_bytes for column in columns] == pytest.approx(
            [m.total for m in price.memory], rel=1e-12
        )
        assert [column.redundant_bytes for column in columns] == pytest.approx(
            [rank.total for rank in price.redundant], rel=1e-9, abs=16
        )


@pytest.mark.slow
@pytest.mark.parametrize("seed", mostly_slow([3, 4, 5], {4}))
def test_columns_hold_what_there_is_at_the_fullest_moment_where_the_stack_frees_gradients(seed):
    stack, instance = load_stack("parplan"), instance_of(seed, 4)
    price_cache = replace(
        instance, training=replace(instance.training, stack=stack, precision=Precision.FP32)
    ).price_cache()
    apart = mixed = 0
    pins = replace(PINS, schedule=None)
    for layout in enumerate_candidates(
        instance.model, instance.cluster, instance.training, pins
    ).layouts:
        if layout.mesh.tp > 2 or 4 % layout.num_virtual_stages:
            continue
        ranks = [
            RankColumns(rank, layout, MixTable(price_cache, pins)) for rank in range(layout.mesh.pp)
        ]
        per_rank = [
            [*rank.leanest(4 // layout.mesh.pp, UNLIMITED), rank.smallest(4 // layout.mesh.pp)]
            for rank in ranks
        ]
        for index in range(0, max(map(len, per_rank)), 5):
            columns = tuple(options[index % len(options)] for options in per_rank)
            price = price_step(to_strategy(layout, columns), price_cache)

            assert [column.memory_bytes for column in columns] == pytest.approx(
                [m.total for m in price.memory], rel=1e-9
            )
            assert [column.redundant_bytes for column in columns] == pytest.approx(
                [rank.total for rank in price.redundant], rel=1e-9, abs=16
            )
            assert all(memory.apart >= 0 for memory in price.memory)
            apart += sum(memory.apart > 0 for memory in price.memory)
            mixed += any(len({option.zero for option, _ in column.mix}) > 1 for column in columns)
    assert apart
    assert mixed or price_cache.model.num_layers < 4


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_no_enumerated_strategy_of_one_rank_beats_its_columns(seed):
    """At pp 1 each strategy of the layout is one column, so the enumeration can be compared."""
    instance = random_instance(seed)
    price_cache, layers = instance.price_cache(), instance.model.num_layers
    for layout in (layout for layout in frames_of(instance) if layout.mesh.pp == 1):
        mixed = (
            strategy
            for strategy in mixed_strategies(layout, layers, 400)
            if same_zero_of_ends(strategy)
        )
        priced = [
            (s, price_step(s, price_cache)) for s in (*every_strategy(layout, layers), *mixed)
        ]
        peaks = sorted(peak_bytes(price) for _, price in priced)
        for limit in (peaks[len(peaks) // 3] + 1, UNLIMITED, peaks[0] / 2):
            fitting = [
                (
                    p.simulated.ranks[0].busy_s,
                    p.simulated.ranks[0].tail_s,
                    redundant_bytes(s, p) / layout.mesh.num_ranks,
                )
                for s, p in priced
                if peak_bytes(p) <= limit
            ]
            columns = RankColumns(0, layout, MixTable(price_cache, PINS))
            fast, lean = columns.fastest(layers, limit), columns.leanest(layers, limit)
            assert bool(fast) == bool(lean) == bool(fitting)
            for point in fitting:  # nothing beats the columns
                assert min(c.time_s * layout.num_micro_batches + c.tail_s for c in fast) <= (
                    point[0] + point[1]
                ) * (1 + 1e-9)
                assert any(
                    c.time_s * layout.num_micro_batches + c.tail_s
                    <= (point[0] + point[1]) * (1 + 1e-9)
                    and c.redundant_bytes <= point[2] + 16
                    for c in lean
                )
            for column in (*fast, *lean):  # and the columns are within memory
                assert column.memory_bytes <= limit
                assert column.num_blocks == layers


@pytest.mark.parametrize("seed", SEEDS)
def test_the_smallest_column_has_the_least_memory_of_all(seed):
    instance = random_instance(seed)
    price_cache, layers = instance.price_cache(), instance.model.num_layers
    for layout in (layout for layout in frames_of(instance) if layout.mesh.pp == 1):
        least = min(
            peak_bytes(price_step(strategy, price_cache))
            for strategy in with_other_ends(every_strategy(layout, layers))
        )

        assert RankColumns(0, layout, MixTable(price_cache, PINS)).smallest(
            layers
        ).memory_bytes == pytest.approx(least, rel=1e-12)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_whole_end_of_a_tied_embedding_does_not_stand_in_for_a_sharded_one(rank):
    """The other rank's end must be alike, and there the sharded one may be faster."""
    price_cache = random_instance(0).price_cache()
    assert price_cache.tied
    layout = next(
        frame
        for frame in frames_of(random_instance(0))
        if frame.mesh == Mesh(pp=2, dp=2, tp=1) and frame.num_micro_batches == 2
    )
    columns = RankColumns(rank, layout, MixTable(price_cache, PINS))
    for sharded in (False, True):
        every = [priced for priced in columns.candidates(1) if (priced.zero > 0) == sharded]
        least_s = min(
            (layout.num_micro_batches * priced.time_s + priced.tail_s).min() for priced in every
        )
        fitting = [
            column for column in columns.fastest(1, UNLIMITED) if (column.zero > 0) == sharded
        ]

        assert min(
            layout.num_micro_batches * c.time_s + c.tail_s for c in fitting
        ) == pytest.approx(least_s, rel=1e-12)


@pytest.mark.parametrize(
    ("pp", "v", "num_layers", "longest", "expected"),
    [
        pytest.param(1, 1, 8, None, [8], id="one-stage-holds-all"),
        pytest.param(4, 2, 8, None, [2], id="virtual-stages-are-equal"),
        pytest.param(4, 1, 8, None, [1, 2, 3, 4, 5], id="the-others-hold-one-at-least"),
        pytest.param(4, 1, 8, 3, [1, 2, 3], id="no-more-than-the-longest"),
        pytest.param(4, 1, 4, 9, [1], id="as-many-stages-as-blocks"),
    ],
)
def test_block_counts_by_hand(pp, v, num_layers, longest, expected):
    assert list(block_counts(1, frame_of(pp, v), num_layers, longest)) == expected


def test_embedding_and_head_are_on_the_first_and_the_last_rank():
    assert [end_kinds(rank, frame_of(3, 1)) for rank in range(3)] == [
        (LayerKind.EMBEDDING,),
        (),
        (LayerKind.HEAD,),
    ]
    assert end_kinds(0, frame_of(1, 1)) == (LayerKind.EMBEDDING, LayerKind.HEAD)


def test_a_strategy_lists_each_chunk_with_its_share_of_every_level():
    price_cache = random_instance(0).price_cache()
    layout = frame_of(2, 2)
    columns = tuple(
        RankColumns(rank, layout, MixTable(price_cache, Constraints(recompute=(level,)))).smallest(
            4
        )
        for rank, level in enumerate((Recompute.FULL, Recompute.NONE))
    )

    stages = [
        [(choice.kind, choice.recompute) for choice in stage]
        for stage in to_strategy(layout, columns).stages
    ]

    full = (LayerKind.BLOCK, price_cache.recompute_operators(LayerKind.BLOCK, Recompute.FULL))
    none = (LayerKind.BLOCK, price_cache.recompute_operators(LayerKind.BLOCK, Recompute.NONE))
    embedding, head = (LayerKind.EMBEDDING, Recompute.NONE), (LayerKind.HEAD, Recompute.NONE)
    assert stages == [[embedding, full, full], [none, none], [full, full], [none, none, head]]


def test_without_data_parallelism_there_is_no_zero_stage_to_choose():
    table = MixTable(random_instance(0).price_cache(), Constraints(zero=(1, 3)))

    assert table.zero_choices(Mesh(pp=2, dp=1, tp=2)) == (0,)
    assert table.zero_choices(Mesh(pp=1, dp=2, tp=2)) == (1, 3)
