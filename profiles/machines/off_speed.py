"""A machine whose compute, links or memory differ from what its profile and datasheet say.

Predictions have errors, and most of an error is common to all prices of one kind: the GPUs run
hotter, or a network is busy. The search asks how much each plan would lose then
(planner/search/corner_steps.py).

    compute        the seconds of kernels, and of the host that launches them, are divided by the
                   factor
    link inside a node, NICs
                   their bytes per second are multiplied by the factor, and latencies stay. A
                   measured curve t(n) becomes t(n / factor), which is exact for t = alpha + n / B
    memory         the bytes of a device are multiplied by the factor

Leaves out: copies between device and host, and Adam on the host.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from parplan.profiles.machines.calibration_factors import Calibration, Factor
from parplan.profiles.machines.curves import CollectiveCurve
from parplan.profiles.machines.hardware import Cluster, Link
from parplan.profiles.machines.shipped_profiles import Machine, machine_for
from parplan.profiles.machines.speeds import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedFactors:
    """Speeds, and memory of a device, relative to those that a machine is priced with."""

    compute: float = 1.0
    inside_node: float = 1.0
    across_nodes: float = 1.0
    memory: float = 1.0


def at_speeds(machine: Machine, factors: SpeedFactors) -> Machine:
    """Returns the machine with its speeds multiplied by `factors`, those of each pool too."""
    if machine.cluster.pool_names:
        return machine_for(cluster_at(machine.cluster, factors))
    return Machine(_cluster(machine.cluster, factors), _profile(machine.profile, factors))


def cluster_at(cluster: Cluster, factors: SpeedFactors) -> Cluster:
    """Returns a cluster with other speeds, whose profile is that of the machine with them.

    Those of an unequal cluster are the speeds of all its pools and joins.
    """

    def at(nodes: Cluster) -> Cluster:
        machine = at_speeds(machine_for(nodes), factors)
        return replace(machine.cluster, profile=machine.profile)

    return cluster.with_nodes(at, joins=factors.across_nodes)


def _cluster(cluster: Cluster, factors: SpeedFactors) -> Cluster:
    return replace(
        cluster,
        device=replace(
            cluster.device, memory_bytes=round(cluster.device.memory_bytes * factors.memory)
        ),
        intra_node=_link(cluster.intra_node, factors.inside_node),
        nic=_link(cluster.nic, factors.across_nodes),
        calibration=_calibration(cluster.calibration, factors.compute),
    )


def _link(link: Link, factor: float) -> Link:
    return replace(link, bytes_per_s=link.bytes_per_s * factor)


def _calibration(calibration: Calibration | None, compute: float) -> Calibration | None:
    """Returns the calibration with its factors of kernels divided by `compute`."""
    if compute == 1.0:
        return calibration
    known = calibration or Calibration(stack="", precision="")

    def slower(cause: str) -> Factor:
        return Factor(value=known.factor(cause).value / compute, measured=True)

    return replace(
        known, forward=slower("forward"), backward=slower("backward"), optimizer=slower("optimizer")
    )


def _profile(profile: Profile, factors: SpeedFactors) -> Profile:
    intra, inter = profile.intra, profile.inter
    at_bytes_per_s = inter.node_bytes_per_s
    return replace(
        profile,
        intra=replace(
            intra,
            link_bytes_per_s=intra.link_bytes_per_s * factors.inside_node,
            curves=_curves(intra.curves, factors.inside_node),
        ),
        inter=replace(
            inter,
            node_bytes_per_s=at_bytes_per_s and at_bytes_per_s * factors.across_nodes,
            crossing=_curves(inter.crossing, factors.across_nodes),
        ),
    )


def _curves(curves: Iterable[CollectiveCurve], factor: float) -> tuple[CollectiveCurve, ...]:
    if factor == 1.0:
        return tuple(curves)
    return tuple(
        replace(curve, bytes=tuple(round(n_bytes * factor) for n_bytes in curve.bytes))
        for curve in curves
    )
