"""The stages of unlike blocks are those whose slowest rank is fastest, of all that fit."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import ParallelLayout, Strategy
from parplan.planner.baselines.optimum import pass_s, rank_bytes
from parplan.planner.export.fields.balanced_stages import balanced_cuts
from parplan.planner.search.estimate import uniform_strategy
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack, with_gpus
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import TrainingSpec

NUM_LAYERS, PP = 9, 4
START = (3, 2, 2, 2)
PRICES = PriceCache(
    replace(load_model("deepseek-v3").spec, num_layers=NUM_LAYERS),
    TrainingSpec(global_batch_size=8, seq_length=4096, stack=load_stack("megatron-core")),
    machine_for(with_gpus(load_cluster("h100-80gb"), PP)),
)
LAYOUT = ParallelLayout(
    mesh=Mesh(pp=PP, dp=1, tp=1),
    schedule=Schedule.ONE_F_ONE_B,
    virtual_stages=1,
    micro_batch_size=1,
    num_micro_batches=8,
    sequence_parallel=False,
)


def made(blocks: tuple[int, ...]) -> Strategy:
    return uniform_strategy(LAYOUT, blocks, zero=0, recompute=Recompute.NONE, price_cache=PRICES)


def slowest_s(blocks: tuple[int, ...]) -> float:
    return max(sum(pass_s(each, LAYOUT, PRICES) for each in stage) for stage in made(blocks).stages)


EVERY = [
    blocks
    for blocks in itertools.product(range(1, NUM_LAYERS), repeat=PP)
    if sum(blocks) == NUM_LAYERS
]


PEAKS = {each: max(rank_bytes(made(each), rank, PRICES) for rank in range(PP)) for each in EVERY}


@pytest.mark.parametrize("number", [1, 2, 3, 5, 10, 20, len(EVERY)])
def test_the_slowest_rank_is_the_fastest_of_all_stages_that_fit(number):
    limit = sorted(PEAKS.values())[number - 1]

    (blocks,) = balanced_cuts(LAYOUT, made, START, PRICES, limit, math.inf)

    fitting = [each for each, peak in PEAKS.items() if peak <= limit]
    assert blocks in fitting
    assert slowest_s(blocks) == pytest.approx(min(map(slowest_s, fitting)), rel=1e-12)


def test_stages_that_are_too_slow_or_fit_nowhere_are_not_yielded():
    within_s = LAYOUT.num_micro_batches * min(map(slowest_s, EVERY))

    assert not list(balanced_cuts(LAYOUT, made, START, PRICES, math.inf, within_s))
    assert not list(balanced_cuts(LAYOUT, made, START, PRICES, 2**30, math.inf))
