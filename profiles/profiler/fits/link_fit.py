"""Records of communication -> curves of each collective and placement, the shares of the links for
all else, and contention.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from parplan.profiles.machines.curve_fitting import rounded
from parplan.profiles.machines.curves import CollectiveCurve
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.machines.measurements import CaseOutcome, Record
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.machines.speeds import Inter, Intra
from parplan.profiles.profiler.communication.comm_cases import (
    ALL_REDUCE,
    OVERLAP,
    POINT_TO_POINT,
    TIMED,
)
from parplan.profiles.provenance import Kind
from parplan.profiles.units import US_PER_S

SOURCE = "plan profile: collectives and messages on this machine"
RINGS = {
    "all_gather": 1.0,
    "reduce_scatter": 1.0,
    ALL_REDUCE: 2.0,
}  # how often a ring takes (p - 1)/p of the bytes round; best first
Placed = tuple[str, int, int, int]


def links_of(records: Iterable[Record], cluster: Cluster) -> tuple[Intra, Inter, float | None]:
    """What records of communication say of the links of `cluster`, on which they were measured, and
    its contention.

    What no record says is that of the device's shipped profile, or assumed.
    """
    measured = [record for record in records if record.outcome is CaseOutcome.MEASURED]
    curves = curves_of(measured)
    profile = machine_for(cluster).profile
    inside = tuple(curve for curve in curves if curve.nodes == 1)
    across = tuple(curve for curve in curves if curve.nodes > 1)
    return (
        _intra(inside, cluster, profile.intra) if inside else profile.intra,
        _inter(across, cluster, profile.inter) if across else profile.inter,
        contention_of(measured),
    )


def curves_of(records: Iterable[Record]) -> tuple[CollectiveCurve, ...]:
    """A curve through the measured sizes of each collective at each placement; of a size that is
    there twice the median.
    """
    found: dict[Placed, dict[int, list[Record]]] = {}
    for record in records:
        if record.case.work in TIMED and record.measured is not None:
            n_bytes, nodes, ranks, groups = (
                record.case.size(name) for name in ("bytes", "nodes", "ranks_per_node", "groups")
            )
            found.setdefault((record.case.work, nodes, ranks, groups), {}).setdefault(
                n_bytes, []
            ).append(record)
    return tuple(_curve(placed, by_bytes) for placed, by_bytes in sorted(found.items()))


def _curve(placed: Placed, by_bytes: Mapping[int, Sequence[Record]]) -> CollectiveCurve:
    work, nodes, ranks, groups = placed
    timings = {
        n_bytes: [one.measured.times["time"] for one in same if one.measured]
        for n_bytes, same in sorted(by_bytes.items())
    }
    return CollectiveCurve(
        collective=work,
        nodes=nodes,
        ranks=ranks,
        groups=groups,
        bytes=tuple(timings),
        time_us=tuple(
            statistics.median(timing.median_us for timing in same) for same in timings.values()
        ),
        rows=sum(map(len, timings.values())),
        median_error=rounded(
            statistics.median(timing.spread for same in timings.values() for timing in same)
        ),
    )


def _intra(curves: tuple[CollectiveCurve, ...], cluster: Cluster, base: Intra) -> Intra:
    """The curves inside a node; what a large ring on the most ranks and a large message reach of
    the link.
    """
    link = cluster.intra_node.bytes_per_s
    rings = [_ring_bytes_per_s(curve) / link for curve in _best_rings(curves)]
    messages = [
        _bytes_per_s(curve) / link
        for curve in curves
        if (curve.collective, curve.groups) == (POINT_TO_POINT, 1)
    ]
    return replace(
        base,
        link_bytes_per_s=link,
        kind=Kind.MEASURED,
        source=SOURCE,
        curves=curves,
        link_share=rounded(rings[0]) if rings else base.link_share,
        point_to_point_share=rounded(messages[0]) if messages else base.point_to_point_share,
    )


def _inter(curves: tuple[CollectiveCurve, ...], cluster: Cluster, base: Inter) -> Inter:
    """The curves across nodes; what large rings reach of their groups' part of the NICs, for
    placements without a curve.

    The median over groups that use whole nodes together, as a mesh's do; one group alone on part of
    a node counts where there is no other.
    """
    best = _best_rings(curves)
    whole = [curve for curve in best if curve.ranks * curve.groups == cluster.gpus_per_node]
    rings = [
        _ring_bytes_per_s(curve) / cluster.group_nic_bytes_per_s(curve.ranks, curve.groups)
        for curve in whole or best
    ]
    alone = [curve for curve in curves if (curve.collective, curve.groups) == (POINT_TO_POINT, 1)]
    messages = [_bytes_per_s(curve) / cluster.nic.bytes_per_s for curve in alone]
    return replace(
        base,
        source=SOURCE,
        kind=Kind.ANALYTIC,
        crossing=curves,
        node_bytes_per_s=cluster.node_bytes_per_s,
        nic_share=rounded(statistics.median(rings)) if rings else base.nic_share,
        point_to_point_share=rounded(messages[0]) if messages else base.point_to_point_share,
    )


def _best_rings(curves: tuple[CollectiveCurve, ...]) -> list[CollectiveCurve]:
    """Those of the best collective that is there (a switch that reduces moves fewer bytes than a
    ring), by falling number of ranks.
    """
    works = [work for work in RINGS if any(curve.collective == work for curve in curves)]
    same = [curve for curve in curves if curve.collective in works[:1]]
    return sorted(same, key=lambda curve: (-curve.ranks * curve.nodes, curve.groups))


def _bytes_per_s(curve: CollectiveCurve) -> float:
    """At its largest size."""
    return curve.bytes[-1] / (curve.time_us[-1] / US_PER_S)


def _ring_bytes_per_s(curve: CollectiveCurve) -> float:
    """Bytes per second through every link of a ring, at its largest size (what nccl-tests calls the
    bus bandwidth).
    """
    ranks = curve.ranks * curve.nodes
    return RINGS[curve.collective] * (ranks - 1) / ranks * _bytes_per_s(curve)


def contention_of(records: Iterable[Record]) -> float | None:
    """What a second of communication costs the compute that it runs under; the median of what was
    measured, None without.

    both = max(0, c - w) + w + x min(c, w)          c: the communication alone, w: the compute
    alone, x: the contention
    """
    found = []
    for record in records:
        if record.case.work == OVERLAP and record.measured is not None:
            names = ("compute_alone_s", "communication_alone_s", "both_s")
            compute_s, communication_s, both_s = (record.measured.figures[name] for name in names)
            found.append(
                max(
                    0.0,
                    (both_s - max(compute_s, communication_s)) / min(compute_s, communication_s),
                )
            )
    return rounded(statistics.median(found)) if found else None
