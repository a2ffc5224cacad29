"""Prices on the pools of an unequal cluster, and of tensors that pass the join of two pools."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TypeVar

from parplan.costmodels.communication.collectives import ring_all_reduce_s
from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
from parplan.costmodels.layers.model_layers import ParameterSharing
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.strategy import ParallelLayout
from parplan.profiles.machines.hardware import Link
from parplan.profiles.machines.machine_catalog import load_stack
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.machines.unequal_cluster import Join, Pool, UnequalCluster
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.provenance import Kind, Seconds

Prices = TypeVar("Prices", bound=LayerPriceCache)


def prices_at(layout: ParallelLayout, rank: int, price_cache: Prices) -> Prices:
    """Returns the prices on the pool of a pipeline rank, the same on equal nodes (EQUATIONS I8)."""
    return price_cache if not layout.pools else prices_on(layout.pools[rank], price_cache)


def capacity_bytes(layout: ParallelLayout, rank: int, price_cache: LayerPriceCache) -> int:
    """Returns the bytes of the device of a pipeline rank."""
    return prices_at(layout, rank, price_cache).machine.cluster.device.memory_bytes


def prices_on(name: str, price_cache: Prices) -> Prices:
    """Returns the prices on a pool, made once; those of a pool stay as they are."""
    cluster = price_cache.machine.cluster
    if not isinstance(cluster, UnequalCluster):
        return price_cache

    def make() -> Prices:
        pool = cluster.by_name[name]
        prices = price_cache.on(machine_for(pool.cluster), _training(price_cache.training, pool))
        prices.whole = price_cache
        return prices

    prices = price_cache.once(("pool", name), make)
    return prices.with_states(on_host=price_cache.offloads_states).with_tower(price_cache.tower)


def _training(training: TrainingSpec, pool: Pool) -> TrainingSpec:
    """Returns the training with the stack of a pool."""
    if pool.stack is None or pool.stack == training.stack.name:
        return training
    stack = load_stack(pool.stack)
    return replace(training, stack=stack, overlap_grad_reduce=stack.overlap_grad_reduce)


def whole_cluster(price_cache: LayerPriceCache) -> UnequalCluster:
    """Returns the unequal cluster that prices are of, as a whole or on one of its pools."""
    cluster = (price_cache.whole or price_cache).machine.cluster
    assert isinstance(cluster, UnequalCluster), "the ranks lie on pools"
    return cluster


def passes_join(layout: ParallelLayout, here: int, there: int) -> bool:
    """True if two pipeline ranks lie on different pools."""
    return bool(layout.pools) and layout.pools[here] != layout.pools[there]


def joined_transfer(
    sender: int,
    receiver: int,
    layout: ParallelLayout,
    price_cache: LayerPriceCache,
    cut_class: int,
) -> Seconds:
    """Seconds of a micro-batch's tensors from a rank to one on another pool (EQUATIONS C10, T4).

        t = alpha_join + max(t_sender, t_receiver, R n / W_join)

    t_sender and t_receiver are the message through the NICs of either pool, R the ranks of a stage,
    which all send n bytes at once. Leaves out: the messages of other stages that
    pass the join in the same direction.
    """
    whole = price_cache.whole or price_cache
    size, ranks = layout.micro_batch_size, layout.mesh.ranks_per_stage
    ends = [prices_on(layout.pools[rank], whole) for rank in (sender, receiver)]
    own_s = max(
        end.transfer(
            cut_class,
            size,
            layout.sharding,
            level=1,
            sharing=min(ranks, end.machine.cluster.gpus_per_node),
        ).value_s
        for end in ends
    )
    sent_bytes = ranks * price_cache.sent_part_bytes(cut_class, size, layout.sharding)
    return _joined(sent_bytes, own_s, sender, receiver, layout, ends)


def joined_reduction(
    shared: ParameterSharing,
    sharding: Sharding,
    layout: ParallelLayout,
    price_cache: LayerPriceCache,
    reduced: Seconds,
) -> Seconds:
    """Seconds to sum gradients of shared parameters that two pools may hold (EQUATIONS C10).

    Each end sends its gradients once to the other (a ring of two ranks).

    reduced: the seconds inside one pool
    """
    first, last = layout.rank_of(0), layout.rank_of(layout.num_virtual_stages - 1)
    if not passes_join(layout, first, last):
        return reduced
    whole = price_cache.whole or price_cache
    ends = [prices_on(layout.pools[rank], whole) for rank in (first, last)]
    num_bytes = layout.mesh.ranks_per_stage * price_cache.shared_bytes(shared, sharding)
    return _joined(num_bytes, reduced.value_s, first, last, layout, ends)


def _joined(
    num_bytes: float,
    own_s: float,
    sender: int,
    receiver: int,
    layout: ParallelLayout,
    ends: list[Prices],
) -> Seconds:
    join = join_between(layout, sender, receiver, ends[0])
    nodes = min(
        -(-layout.mesh.ranks_per_stage // end.machine.cluster.gpus_per_node) for end in ends
    )
    passed_s = num_bytes / join.bytes_per_s(nodes)
    return Seconds(join.latency_s + max(own_s, passed_s), Kind.ANALYTIC)


def gradient_exchange_s(cluster: UnequalCluster, price_cache: LayerPriceCache) -> float:
    """Seconds in which P pools add the G bytes of gradients of a step (EQUATIONS P10).

    The sum is the ring of C1 over the pools, at the bandwidth and the latency of the slowest join.
    """
    pairs = [
        (cluster.join_of(one.name, other.name), min(one.cluster.nodes, other.cluster.nodes))
        for one, other in itertools.combinations(cluster.pools, 2)
    ]
    slowest = Link(
        name="slowest join",
        bytes_per_s=min(join.bytes_per_s(nodes) for join, nodes in pairs),
        latency_s=max(join.latency_s for join, _ in pairs),
        source="the joins of the cluster",
    )
    gradients = price_cache.training.gradient_precision.num_bytes
    num_bytes = gradients * price_cache.num_trained_parameters
    return float(ring_all_reduce_s(num_bytes, len(cluster.pools), slowest))


def join_between(
    layout: ParallelLayout, here: int, there: int, price_cache: LayerPriceCache
) -> Join:
    """Returns the join that messages between two pipeline ranks pass."""
    return whole_cluster(price_cache).join_of(layout.pools[here], layout.pools[there])
