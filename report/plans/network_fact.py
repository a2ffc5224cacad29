"""The line of a summary that says which levels of the network each axis of the mesh leaves."""

from __future__ import annotations

from collections.abc import Iterator

from parplan.costmodels.communication.mesh import Axis, Mesh, Placement, place, place_axis
from parplan.planner.plan.traced_plan import AnyPlan
from parplan.profiles.machines.hardware import Cluster


def network_facts(plan: AnyPlan) -> Iterator[tuple[str, str, str]]:
    """Yields the line, with a phrase for each axis of more than one rank.

    There is none on a network without levels, and for a single rank.
    """
    cluster, mesh = plan.cluster, plan.mesh
    if not (cluster.tiers or cluster.islands):
        return
    names = [axis for axis in (Axis.TP, Axis.CP, Axis.DP, Axis.PP) if mesh.degree(axis) > 1]
    places = {axis.value: place(mesh, axis, cluster.gpus_per_node) for axis in names}
    if mesh.ep > 1:
        places["ep"] = expert_placement(mesh, cluster)
    phrases = [f"{name} {reach(where, cluster)}" for name, where in places.items()]
    if phrases:
        yield "network", phrases[0], ", ".join(phrases[1:])


def expert_placement(mesh: Mesh, cluster: Cluster) -> Placement:
    """Returns the placement of the ranks that divide the experts of a block."""
    ranks = mesh.ep * mesh.etp
    return place_axis(mesh.ep, mesh.etp, ranks, cluster.gpus_per_node)


def reach(where: Placement, cluster: Cluster) -> str:
    """Returns the smallest unit that a group of an axis is inside, or the last that it leaves."""
    span = where.num_ranks * where.distance
    if not where.crosses_nodes:
        near = (island.link.name for island in cluster.islands if span <= island.gpus)
        return f"in a {next(near, 'node')}"
    left = "node"
    for tier, gpus in zip(cluster.tiers, cluster.unit_gpus[1:], strict=True):
        if span <= gpus or tier.nodes >= cluster.nodes:
            return f"across nodes in a {tier.name}"
        over = f" ({tier.oversubscription:g}:1)" if tier.oversubscription > 1 else ""
        left = f"{tier.name}{over}"
    return f"across each {left}"
