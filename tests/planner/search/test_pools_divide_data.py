"""Pools that divide the batch: equal to a full enumeration of shares and plans, bytes by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from parplan.costmodels.joined_pools import gradient_exchange_s
from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.objective import Objective
from parplan.planner.request import SearchOptions
from parplan.planner.search.largest_model import SearchWatch
from parplan.planner.search.pools_divide_data import divide_batch
from parplan.profiles.errors import ConfigError, InfeasibleError
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.machines.unequal_cluster import Join, Pool, unequal_cluster
from parplan.profiles.models.model_catalog import load_model
from tests.helpers.cases import mostly_slow
from tests.helpers.instances import PINS, every_price, peak_bytes, redundant_bytes
from tests.helpers.planning import request
from tests.helpers.pools import two_pools

BATCH = 6
SEEDS = mostly_slow(range(4), {3})


def instance_of(seed: int):
    instance = two_pools(seed)
    return replace(instance, training=replace(instance.training, global_batch_size=BATCH))


def asked(instance, objective=Objective.THROUGHPUT, **options):
    return request(
        instance.model,
        instance.cluster,
        instance.training,
        objective,
        constraints=PINS,
        options=SearchOptions(memory_margin=0.0, **options),
    )


def prices_by_pool(instance):
    """Every fitting strategy of every pool for every share, as (closed form, redundant bytes)."""
    found = {}
    for pool in instance.cluster.pools:
        for share in range(1, BATCH):
            alone = replace(
                instance,
                cluster=pool.cluster,
                training=replace(instance.training, global_batch_size=share),
            )
            try:
                every = every_price(alone)
            except ConfigError:
                every = []
            found[pool.name, share] = [
                (price.closed_form_s, redundant_bytes(strategy, price))
                for strategy, price in every
                if peak_bytes(price) <= pool.cluster.device.memory_bytes
            ]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_shares_of_two_pools_equal_brute_force_under_both_objectives(seed):
    instance = instance_of(seed)
    prices = prices_by_pool(instance)
    first, second = instance.cluster.by_name

    def least(pool: str, share: int) -> float:
        return min((time_s for time_s, _ in prices[pool, share]), default=float("inf"))

    fastest_s = min(
        max(least(first, share), least(second, BATCH - share)) for share in range(1, BATCH)
    )

    divided = divide_batch(asked(instance))

    assert divided.all_tried
    assert sum(share.sequences for share in divided.shares) == BATCH
    # the plans are chosen by their simulated steps, which are not the closed form
    assert divided.step_s - divided.exchange_s <= 1.1 * fastest_s
    for share in divided.shares:
        assert (
            share.plan.search.fastest_step_time_s
            <= least(share.pool, share.sequences) * (1 + 1e-5) + 2e-6
        )

    lean = divide_batch(asked(instance, Objective.MEMORY, max_slowdown=0.2))
    assert lean.redundant_gib <= divided.redundant_gib + 1e-6
    assert lean.step_s <= divided.step_s * 1.2 * 1.1


def test_the_exchange_sends_each_gradient_once_over_the_join():
    instance = two_pools(3)
    price_cache = instance.price_cache()
    (join,) = instance.cluster.joins
    num_bytes = price_cache.num_parameters * instance.training.gradient_precision.num_bytes

    exchange_s = gradient_exchange_s(instance.cluster, price_cache)

    assert exchange_s == pytest.approx(2 * join.latency_s + num_bytes / join.total_bytes_per_s)


@pytest.mark.slow
def test_many_shares_follow_the_speeds_of_the_pools():
    machines = [with_gpus(load_cluster(kind), 2) for kind in ("a100-80gb", "h100-80gb")]
    pools = [Pool(name=f"p{n}", cluster=machine) for n, machine in enumerate(machines)]
    join = Join(name="line", latency_s=0.0, source="test", total_bytes_per_s=100e9)
    instance = two_pools(3)
    training = replace(instance.training, global_batch_size=256, stack=instance.training.stack)
    cluster = unequal_cluster("two", pools, (join,))

    divided = divide_batch(
        request(instance.model, cluster, training, constraints=replace(PINS, tp=(1,), pp=(1,)))
    )

    slow, fast = divided.shares
    assert slow.sequences + fast.sequences == 256
    assert slow.sequences <= fast.sequences
    assert not divided.all_tried
    assert slow.step_s == pytest.approx(fast.step_s, rel=0.25)


def test_ctrl_c_ends_the_searches_with_the_best_shares_so_far():
    calls = itertools.count()

    divided = divide_batch(asked(instance_of(3)), SearchWatch(interrupted=lambda: next(calls) >= 4))

    assert (divided.stopped, divided.all_tried) == ("Ctrl-C", False)
    assert sum(share.sequences for share in divided.shares) == BATCH
    with pytest.raises(KeyboardInterrupt):
        divide_batch(asked(instance_of(3)), SearchWatch(interrupted=lambda: True))


@pytest.mark.slow
def test_shares_move_as_far_as_the_next_that_divides_over_the_ranks():
    machines = [with_gpus(load_cluster(kind), 32) for kind in ("a100-80gb", "h100-80gb")]
    pools = [Pool(name=f"p{n}", cluster=machine) for n, machine in enumerate(machines)]
    join = Join(name="line", latency_s=0.0, source="test", total_bytes_per_s=100e9)
    training = replace(two_pools(3).training, global_batch_size=512, seq_length=1024)
    pins = replace(
        PINS, tp=(1,), pp=(1,), zero=(1,), recompute=(Recompute.NONE,), micro_batch_size=(4,)
    )
    cluster = unequal_cluster("two", pools, (join,))

    divided = divide_batch(
        request(load_model("gpt-1.5b").spec, cluster, training, constraints=pins)
    )

    slow, fast = divided.shares
    assert slow.sequences % 32 == 0
    assert slow.sequences < fast.sequences


def test_pools_without_room_for_a_replica_are_refused():
    instance = two_pools(3, (2**20, 2**20))
    with pytest.raises(InfeasibleError, match="no shares of 4 sequences fit the pools"):
        divide_batch(asked(instance))
    with pytest.raises(ConfigError, match="--objective peak: pools divide the batch"):
        divide_batch(asked(instance, Objective.PEAK))
    one = replace(instance, training=replace(instance.training, global_batch_size=1))
    with pytest.raises(ConfigError, match="batch-size is 1: each of 2 pools that divide it has"):
        divide_batch(asked(one))
