"""The layouts of a cluster of unequal pools whose pools divide the pipeline (EQUATIONS I8).

Every pipeline stage lies on one pool, and the stages of a pool are neighbours. All stages have the
same ranks, so a pool has a part of the stages in proportion to its GPUs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from parplan.costmodels.communication.mesh import MeshOrder
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.candidates.enumeration import CandidateSpace, layout_text
from parplan.planner.candidates.meshes import Pruned
from parplan.profiles.machines.unequal_cluster import UnequalCluster


def over_pools(space: CandidateSpace, cluster: UnequalCluster) -> CandidateSpace:
    """Returns the candidates with the pools of their pipeline ranks, in every order of the pools.

    space: the candidates of as many equal GPUs
    """
    layouts: list[ParallelLayout] = []
    pruned = list(space.pruned)
    for layout in space.layouts:
        reason = illegal_on_pools(layout, cluster)
        if reason:
            pruned.append(Pruned(layout_text(layout), reason))
            continue
        layouts += (replace(layout, pools=pools) for pools in _orders(layout, cluster))
    return CandidateSpace(tuple(layouts), tuple(pruned))


def illegal_on_pools(layout: ParallelLayout, cluster: UnequalCluster) -> str | None:
    """Returns why a layout's stages cannot fill the pools of a cluster, or None."""
    ranks = layout.mesh.ranks_per_stage
    if layout.mesh.order is not MeshOrder.PP_DP_TP:
        return f"the order {layout.mesh.order} puts one stage on several pools"
    for pool in cluster.pools:
        gpus, per_node = pool.cluster.num_gpus, pool.cluster.gpus_per_node
        if gpus % ranks:
            return f"stages of {ranks} ranks do not fill the {gpus} GPUs of pool {pool.name}"
        if ranks % per_node and per_node % ranks:
            return f"stages of {ranks} ranks do not fill nodes of {per_node} GPUs"
    return None


def _orders(layout: ParallelLayout, cluster: UnequalCluster) -> Iterator[tuple[str, ...]]:
    """Yields the pool of every pipeline rank, for every order of the pools."""
    ranks = layout.mesh.ranks_per_stage
    for order in itertools.permutations(cluster.pools):
        yield tuple(
            itertools.chain.from_iterable(
                itertools.repeat(pool.name, pool.cluster.num_gpus // ranks) for pool in order
            )
        )
