"""No tuple of counts beats a mix of options, and no fractional mix is below the bound."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from parplan.costmodels.operators.sharding import Sharding
from parplan.planner.layer_options.layer_option import LayerOption
from parplan.planner.layer_options.mixes import (
    MOST_TUPLES,
    exhaustive,
    hull_options,
    make_mixes,
    option_pairs,
)
from parplan.planner.request import Constraints
from parplan.planner.stage_columns.columns import RankColumns
from parplan.planner.stage_columns.mix_table import MixTable
from tests.helpers.cases import mostly_slow
from tests.helpers.instances import random_instance
from tests.helpers.planning import enumerate_candidates

ALL, HEADS = frozenset({"heads", "ffn"}), frozenset({"heads"})
SEEDS = mostly_slow((0, 1, 2, 4), {4})


def option(time_s, saved, weight_layout=ALL, workspace=0.0):
    return LayerOption(
        recompute=(),
        sharding=Sharding(),
        weight_layout=weight_layout,
        time_s=time_s,
        saved_bytes=saved,
        ideal_saved_bytes=saved,
        workspace_bytes=workspace,
    )


def catalogue(seed, count):
    """Returns options on a noisy falling curve of saved bytes; recomputed bytes are workspace."""
    draw = random.Random(seed)
    saved = sorted((draw.uniform(1, 100) for _ in range(count)), reverse=True)
    times = sorted(draw.uniform(1, 2) for _ in range(count))
    return tuple(option(t, s, workspace=100 - s) for t, s in zip(times, saved, strict=True))


def tuples(options, total):
    for chosen in itertools.combinations_with_replacement(range(len(options)), total):
        yield [options[i] for i in chosen]


@pytest.mark.parametrize("seed", SEEDS)
def test_few_options_give_every_tuple_that_is_worth_having(seed):
    options = catalogue(seed, 4)
    assert exhaustive(options, 5)

    mixes = make_mixes(options, 5, 1)

    rows = list(
        zip(
            mixes.counts @ np.array([o.time_s for o in options]),
            mixes.saved_bytes,
            mixes.workspace_bytes,
            strict=True,
        )
    )
    for chosen in tuples(options, 5):
        time_s = sum(o.time_s for o in chosen)
        saved = sum(o.saved_bytes for o in chosen)
        workspace = max(o.workspace_bytes for o in chosen)
        assert any(
            t <= time_s + 1e-9 and s <= saved + 1e-9 and w <= workspace + 1e-9 for t, s, w in rows
        )
    assert (mixes.counts.sum(axis=1) == 5).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_pairs_of_many_options_lose_less_than_one_block_of_the_best_tuple(seed):
    options = catalogue(seed, 12)
    assert not exhaustive(options, 6)

    mixes = make_mixes(options, 6, 1)

    times = mixes.counts @ np.array([o.time_s for o in options])
    longest = max(o.time_s for o in options) - min(o.time_s for o in options)
    every = [
        (
            sum(o.time_s for o in c),
            sum(o.saved_bytes for o in c) + max(o.workspace_bytes for o in c),
        )
        for c in tuples(options, 6)
    ]
    for limit in np.quantile([held for _, held in every], (0.02, 0.2, 0.5, 0.9)):
        best_s = min(time_s for time_s, held in every if held <= limit)
        found_s = times[mixes.saved_bytes + mixes.workspace_bytes <= limit].min()
        assert best_s - 1e-9 <= found_s <= best_s + longest


def test_every_chunk_has_the_same_mix_and_the_shorter_one_lacks_a_block():
    mixes = make_mixes((option(1.0, 10.0), option(2.0, 1.0)), 7, 4)

    assert (mixes.chunk_counts.sum(axis=1) == 2).all()
    assert (mixes.counts.sum(axis=1) == 7).all()
    assert {tuple(row) for row in mixes.counts} == {(7, 0), (4, 3), (0, 7)}


def test_the_hull_is_of_each_layout_by_itself():
    options = (
        option(1.0, 10.0),
        option(1.5, 8.0),
        option(2.0, 2.0),
        option(1.0, 12.0, HEADS),
        option(3.0, 1.0, HEADS),
    )

    assert hull_options(options) == [0, 2, 3, 4]  # 1 is above the line from 0 to 2


def test_pairs_hold_every_two_options_with_the_larger_workspace():
    pairs = option_pairs((option(1.0, 10.0, workspace=1.0), option(2.0, 1.0, workspace=9.0)))

    assert pairs.index.T.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert pairs.workspace_bytes.tolist() == [1.0, 9.0, 9.0, 9.0]


def test_as_many_tuples_are_tried_as_said():
    options = catalogue(0, 3)
    assert exhaustive(options, 61)  # 63 over 2 is 1,953
    assert not exhaustive(options, 63)
    assert MOST_TUPLES == 2000


@pytest.mark.parametrize("seed", SEEDS)
def test_no_column_is_below_the_relaxed_bound_of_its_count(seed):
    instance = random_instance(seed)
    price_cache, pins = instance.price_cache(), Constraints()
    table = MixTable(price_cache, pins)
    checked = 0
    for layout in enumerate_candidates(
        instance.model, instance.cluster, instance.training, pins
    ).layouts:
        for rank in range(layout.mesh.pp):
            columns = RankColumns(rank, layout, table)
            count = max(1, instance.model.num_layers // layout.mesh.pp)
            smallest = columns.smallest(count).memory_bytes
            for limit in (smallest * 1.001, smallest * 1.2, 1e15):
                fast, bound = columns.fastest(count, limit), columns.relaxed(count, limit)
                averages = columns.averages(count, limit)
                assert bound
                assert averages
                weights = (
                    (0.0, 0.1, 0.3, 1.0, 1e3)
                    if layout.mesh.pp > 1
                    else (1 / layout.num_micro_batches,)
                )
                for column, weight in itertools.product(fast, weights):
                    for every in (bound, averages):
                        assert min(b.time_s + weight * b.tail_s for b in every) <= (
                            column.time_s + weight * column.tail_s
                        ) * (1 + 1e-9)
                checked += len(fast)
    assert checked
