"""Megatron's baseline recomputes the first blocks of every stage, the fewest that fit."""

from __future__ import annotations

import pytest

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.price_cache import PriceCache
from parplan.planner.baselines.first_blocks import with_first_blocks
from parplan.planner.baselines.optimum import fastest, fits
from parplan.planner.baselines.systems import baseline_strategies, price_baseline
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.stack import NEUTRAL
from parplan.profiles.units import GIB


@pytest.fixture(scope="module")
def prices() -> PriceCache:
    entry = load_model("gpt-2.5b")
    training = TrainingSpec(global_batch_size=32, seq_length=entry.seq_length, stack=NEUTRAL)
    cluster = with_gpus(load_cluster("a100-80gb"), 8)
    return PriceCache(entry.spec, training, machine_for(cluster))


def recomputed(strategy) -> list[list[bool]]:
    return [
        [bool(each.recompute is Recompute.FULL) for each in stage if each.kind is LayerKind.BLOCK]
        for stage in strategy.stages
    ]


def test_the_first_blocks_of_every_stage_recompute(prices):
    plain = next(
        each
        for each in baseline_strategies("megatron", prices, 80 * GIB)
        if each.layout.num_virtual_stages == 4
        and all(choice.recompute is Recompute.NONE for stage in each.stages for choice in stage)
    )

    chosen = recomputed(with_first_blocks(plain, 3))

    assert all(stage == [True] * 3 + [False] * (len(stage) - 3) for stage in chosen)
    assert len(chosen) == 4


@pytest.mark.slow
@pytest.mark.parametrize("limit_gib", [9.0, 14.0])
def test_the_baseline_is_the_best_of_every_number_of_blocks(prices, limit_gib):
    limit = limit_gib * GIB
    every = baseline_strategies("megatron", prices, limit)
    plain = [
        each
        for each in every
        if all(choice.recompute is Recompute.NONE for stage in each.stages for choice in stage)
    ]
    most = max(len(stage) for each in plain for stage in each.stages)
    numbered = [with_first_blocks(each, n) for each in plain for n in range(1, most)]
    best = fastest((*every, *numbered), prices, limit)

    found = price_baseline("megatron", prices, limit).optimum

    assert found is not None
    assert best is not None
    assert found.price.step_s == pytest.approx(best.price.step_s, rel=1e-12)
    assert fits(found.strategy, prices, limit)
