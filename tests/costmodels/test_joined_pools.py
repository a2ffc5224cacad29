"""Messages and tied gradients over a join: by hand, limits, and nothing new on equal nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.joined_pools import joined_transfer, passes_join, prices_at, prices_on
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.stage_costs import time_between
from parplan.costmodels.strategy import ParallelLayout
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.machines.unequal_cluster import Join, Pool, unequal_cluster
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.stack import NEUTRAL

LAYOUT = ParallelLayout(
    mesh=Mesh(pp=4, dp=2, tp=4),
    schedule=Schedule.ONE_F_ONE_B,
    virtual_stages=1,
    micro_batch_size=1,
    num_micro_batches=8,
    sequence_parallel=True,
    pools=("old", "old", "new", "new"),
)
WIDTH, TOKENS = 6144, 2048  # of gpt-20b


def prices(*, total_gb_per_s: float = 1.0, latency_s: float = 0.0) -> PriceCache:
    pools = [
        Pool(name=name, cluster=with_gpus(load_cluster(gpu), 16))
        for name, gpu in (("old", "a100-80gb"), ("new", "h100-80gb"))
    ]
    join = Join(
        name="line", latency_s=latency_s, source="test", total_bytes_per_s=total_gb_per_s * 1e9
    )
    training = TrainingSpec(global_batch_size=16, seq_length=TOKENS, stack=NEUTRAL)
    machine = machine_for(unequal_cluster("two", pools, (join,)))
    return PriceCache(load_model("gpt-20b").spec, training, machine)


def test_a_slow_join_takes_the_bytes_of_all_ranks_over_its_bandwidth():
    price_cache = prices(total_gb_per_s=1.0, latency_s=0.002)
    sent_bytes = 2 * WIDTH * TOKENS * LAYOUT.mesh.dp  # the tp ranks divide bf16 tokens

    seconds = joined_transfer(1, 2, LAYOUT, price_cache, 0).value_s

    assert seconds == pytest.approx(0.002 + sent_bytes / 1e9, rel=1e-9)


def test_a_fast_join_takes_as_long_as_the_slower_nics():
    price_cache = prices(total_gb_per_s=1e6)
    alone = [
        prices_on(name, price_cache).transfer(0, 1, LAYOUT.sharding, level=1, sharing=8).value_s
        for name in ("old", "new")
    ]

    assert joined_transfer(2, 1, LAYOUT, price_cache, 0).value_s == pytest.approx(max(alone))


def test_stages_of_one_pool_send_as_on_that_pool_alone():
    price_cache = prices()
    new = prices_at(LAYOUT, 3, price_cache)

    assert not passes_join(LAYOUT, 2, 3)
    assert passes_join(LAYOUT, 1, 2)
    assert new.machine.cluster.device.name == "h100-80gb"
    alone = replace(LAYOUT, pools=())
    assert time_between(2, 3, LAYOUT, new) == time_between(2, 3, alone, new)
    assert prices_at(alone, 3, new) is new
