"""DeepSpeed's partitions of a model into stages: against every partition, and by hand."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest

from parplan.costmodels.price_cache import PriceCache
from parplan.planner.baselines.deepspeed_stages import Partition, balanced, blocks_of_stages
from parplan.profiles.machines.machine_catalog import load_cluster
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.stack import NEUTRAL


def book_of(model):
    training = TrainingSpec(global_batch_size=8, seq_length=1024, stack=NEUTRAL)
    return PriceCache(load_model(model).spec, training, machine_for(load_cluster("a100-80gb")))


@pytest.mark.parametrize("seed", range(8))
def test_no_partition_has_a_smaller_largest_stage_nor_as_small_a_one_and_is_more_even(seed):
    draw = random.Random(seed)
    weights = tuple(draw.randrange(10) for _ in range(draw.randrange(4, 9)))
    parts = draw.randrange(1, len(weights) + 1)

    def value(bounds):
        sums = [sum(weights[first:end]) for first, end in pairwise(bounds)]
        return max(sums), sum(total * total for total in sums)

    every = [(0, *cuts, len(weights)) for cuts in combinations(range(1, len(weights)), parts - 1)]
    assert value(balanced(weights, parts)) == min(map(value, every))


@pytest.mark.parametrize(
    ("method", "stages", "blocks"),
    [
        (
            Partition.UNIFORM,
            4,
            (11, 12, 11, 10),
        ),  # 46 layers: 12, 12, 11, 11; the first is the embedding, the last the head
        (Partition.UNIFORM, 2, (22, 22)),
        (Partition.TYPE, 4, (11, 11, 11, 11)),
        (Partition.TYPE, 1, (44,)),
    ],
)
def test_the_stages_of_gpt_20b_by_hand(method, stages, blocks):
    assert blocks_of_stages(method, stages, book_of("gpt-20b")) == blocks


def test_by_parameters_a_stage_with_a_large_table_has_fewer_blocks():
    price_cache = book_of("gpt-1.5b")  # embedding and head are 2.7 blocks each
    blocks = blocks_of_stages(Partition.PARAMETERS, 8, price_cache)

    assert sum(blocks) == 48
    assert max(blocks[0], blocks[-1]) < min(blocks[1:-1])


def test_more_stages_than_blocks_have_no_partition():
    assert blocks_of_stages(Partition.UNIFORM, 50, book_of("gpt-1.5b")) is None
