"""The recompute lists of traced layers lie on the front of all lists, and no list is below them."""

from __future__ import annotations

from itertools import chain, combinations

import numpy as np
import pytest

from parplan.costmodels.operators.sharding import Sharding
from parplan.planner.layer_options import recompute_lists as module
from parplan.planner.layer_options.layer_front import FrontLimits
from parplan.planner.layer_options.layer_problem import may_recompute
from parplan.planner.layer_options.recompute_lists import recompute_lists
from parplan.planner.traced.shard_price_cache import ShardPriceCache
from parplan.planner.traced.shards import shard
from parplan.profiles.machines.machine_catalog import load_cluster
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.operator_graph import LayerKey
from parplan.profiles.models.spec import ModelSpec, TrainingSpec
from parplan.profiles.stack import NEUTRAL
from tests.helpers.traced_models import traced_spec

B = 2
GPT = ModelSpec(
    name="gpt",
    num_layers=2,
    hidden_size=1024,
    num_heads=16,
    num_kv_heads=16,
    head_dim=64,
    ffn_hidden_size=4096,
    vocab_size=32000,
    max_seq_length=512,
    dropout=0.1,
)
TRAINING = TrainingSpec(global_batch_size=32, seq_length=512, stack=NEUTRAL)


@pytest.fixture(scope="module")
def prices() -> ShardPriceCache:
    machine = machine_for(load_cluster("a100-80gb"))
    return ShardPriceCache(shard(traced_spec(GPT, TRAINING)), TRAINING, machine)


def classes(prices: ShardPriceCache) -> list[LayerKey]:
    return [prices.key(first, first) for first in prices.classes.firsts]


def priced(
    prices: ShardPriceCache, key: LayerKey, tp: int, operators: tuple[str, ...]
) -> tuple[float, float]:
    """Seconds and saved bytes of a layer with a recompute list."""
    own = prices.own_sharding(key, Sharding(tp))
    seconds = prices.layer_time(key, B, own, operators).total_s
    return seconds, float(prices.activations(key, B, own, operators).saved)


def all_lists(prices: ShardPriceCache, key: LayerKey) -> list[tuple[str, ...]]:
    names = [each.name for each in prices.layer(key, B).operators if may_recompute(each)]
    return list(chain.from_iterable(combinations(names, n) for n in range(len(names) + 1)))


@pytest.mark.parametrize("tp", [1, 2])
def test_no_list_of_operators_is_better_at_any_price_of_a_byte(prices, tp):
    counts = set()
    for key in classes(prices):
        every = np.array([priced(prices, key, tp, each) for each in all_lists(prices, key)])
        lists = recompute_lists(key, B, prices.own_sharding(key, Sharding(tp)), prices)
        found = np.array([priced(prices, key, tp, each) for each in lists])
        counts.add(len(lists))

        for price in (0.0, *np.geomspace(1e-14, 1e-8, 60)):
            least = (every @ [1, price]).min()
            assert (found @ [1, price]).min() == pytest.approx(least, rel=1e-9)
    assert max(counts) > 2


def test_with_a_limit_only_the_lists_on_the_hull_stay(prices, monkeypatch):
    key = max(classes(prices), key=lambda each: len(prices.layer(each, B).operators))
    every = [priced(prices, key, 1, each) for each in recompute_lists(key, B, Sharding(), prices)]

    monkeypatch.setattr(module, "LIMITS", FrontLimits(points=1, labels=module.MOST_LABELS))
    hull = [priced(prices, key, 1, each) for each in recompute_lists(key, B, Sharding(), prices)]

    assert set(hull) <= set(every)
    for price in (0.0, *np.geomspace(1e-14, 1e-8, 60)):
        least = min(seconds + price * saved for seconds, saved in every)
        assert min(seconds + price * saved for seconds, saved in hull) == pytest.approx(least)


def test_an_operator_that_cannot_run_again_is_on_no_list(prices):
    drops = 0
    for key in classes(prices):
        fixed = {each.name for each in prices.layer(key, B).operators if not may_recompute(each)}
        drops += len(fixed)

        assert not any(fixed & set(each) for each in recompute_lists(key, B, Sharding(), prices))
    assert drops, "dropout draws another mask"
