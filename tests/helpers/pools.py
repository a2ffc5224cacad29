"""Small seeded instances on two pools, and every legal layout of their stages."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from parplan.costmodels.communication.mesh import MeshOrder
from parplan.costmodels.step import StepPrice, price_step
from parplan.costmodels.strategy import ParallelLayout, Strategy
from parplan.planner.request import Constraints
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.machines.unequal_cluster import Join, Pool, UnequalCluster, unequal_cluster
from tests.helpers.instances import (
    PINS,
    Instance,
    every_strategy,
    mixed_strategies,
    random_instance,
    same_sharding,
)
from tests.helpers.planning import enumerate_candidates

Priced = tuple[Strategy, StepPrice]
KINDS = ("a100-80gb", "h100-80gb", "h20-96gb", "v100-32gb")


def two_pools(seed: int, memory_bytes: tuple[int, int] | None = None) -> Instance:
    """A tiny model on two pools of 1 to 4 GPUs, whose join may be far slower than their NICs.

    memory_bytes: memory of a device of each pool, that of the datasheet by default
    """
    instance, draw = random_instance(seed), random.Random(f"pools {seed}")
    training = replace(instance.training, attention="unfused")
    sizes = draw.choice(((2, 2), (1, 2), (2, 1)))
    kinds = draw.sample(KINDS[: 4 if training.precision == "fp16" else 3], 2)
    pools = []
    for place, (kind, gpus) in enumerate(zip(kinds, sizes, strict=True)):
        machine = with_gpus(load_cluster(kind), gpus, min(gpus, 2))
        pools.append(Pool(name=f"p{place}", cluster=machine))
    join = Join(
        name="line",
        latency_s=draw.choice((5e-6, 1e-4)),
        source="drawn",
        total_bytes_per_s=draw.choice((25e9, 1e9, 1e8)),
    )
    model = replace(instance.model, num_layers=draw.choice((3, 4)))
    instance = Instance(model, unequal_cluster("two", pools, (join,)), training)
    return instance if memory_bytes is None else with_memory(instance, memory_bytes)


def with_memory(instance: Instance, memory_bytes: tuple[int, ...]) -> Instance:
    """The same instance with other memory of the devices of each pool."""
    cluster = pools_of(instance)
    pools = [
        replace(
            pool,
            cluster=replace(
                pool.cluster, device=replace(pool.cluster.device, memory_bytes=num_bytes)
            ),
        )
        for pool, num_bytes in zip(cluster.pools, memory_bytes, strict=True)
    ]
    return replace(instance, cluster=unequal_cluster(cluster.name, pools, cluster.joins))


def pools_of(instance: Instance) -> UnequalCluster:
    assert isinstance(instance.cluster, UnequalCluster)
    return instance.cluster


def layouts_on_pools(instance: Instance, pins: Constraints = PINS) -> Iterator[ParallelLayout]:
    """Every layout whose stages lie on one pool each, with the stages of a pool side by side."""
    cluster = pools_of(instance)
    gpus = {pool.name: pool.cluster.num_gpus for pool in cluster.pools}
    space = enumerate_candidates(instance.model, _as_equal(cluster), instance.training, pins)
    for layout in space.layouts:
        if layout.mesh.order is not MeshOrder.PP_DP_TP:
            continue
        for pools in itertools.product(gpus, repeat=layout.mesh.pp):
            counts = Counter(pools)
            fills = all(counts[name] * layout.mesh.ranks_per_stage == gpus[name] for name in gpus)
            if fills and sum(a != b for a, b in itertools.pairwise(pools)) == len(gpus) - 1:
                yield replace(layout, pools=pools)


def _as_equal(cluster: UnequalCluster) -> Cluster:
    """The slowest GPU of the pools in nodes that leave every tensor-parallel degree legal."""
    per_node = min(pool.cluster.gpus_per_node for pool in cluster.pools)
    return with_gpus(load_cluster(cluster.device.name), cluster.num_gpus, per_node)


def every_price_on_pools(instance: Instance, mixed: int = 0) -> list[Priced]:
    """Every strategy of every layout over the pools, priced in whole."""
    price_cache, layers = instance.price_cache(), instance.model.num_layers
    return [
        (strategy, price_step(strategy, price_cache))
        for layout in layouts_on_pools(instance)
        for strategy in (*every_strategy(layout, layers), *mixed_strategies(layout, layers, mixed))
        if not price_cache.tied or same_sharding(strategy)
    ]


def shares_of(seed: int) -> tuple[float, float]:
    """The memory of the devices of two pools, relative to each other."""
    return 1.0, 1.2 if seed % 2 else 0.85


def tight(instance: Instance, everything: list[Priced], shares: tuple[float, float]) -> Instance:
    """The instance with so little memory on each pool that most of its strategies do not fit.

    shares: memory of a device of each pool, relative to each other
    """
    pools = pools_of(instance).pools
    share_of = {pool.name: share for pool, share in zip(pools, shares, strict=True)}
    needed = sorted(
        max(
            memory.total / share_of[pool]
            for pool, memory in zip(strategy.layout.pools, price.memory, strict=True)
        )
        for strategy, price in everything
    )
    room = needed[len(needed) // 8]
    return with_memory(instance, tuple(int(room * share) + 1 for share in shares))


def fits(priced: Priced, instance: Instance) -> bool:
    """True if every rank fits the device of its pool."""
    strategy, price = priced
    rooms = {pool.name: pool.cluster.device.memory_bytes for pool in pools_of(instance).pools}
    return all(
        memory.total <= rooms[pool]
        for memory, pool in zip(price.memory, strategy.layout.pools, strict=True)
    )
