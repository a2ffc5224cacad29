"""Fits links to records of communication: curves of collectives, link shares and contention.

A curve covers one collective at one placement; the shares price everything else.
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
# Factor of (p - 1)/p of the bytes that a ring sends through every link; the best collective first.
RINGS = {"all_gather": 1.0, "reduce_scatter": 1.0, ALL_REDUCE: 2.0}
Placed = tuple[str, int, int, int]


def links_of(records: Iterable[Record], cluster: Cluster) -> tuple[Intra, Inter, float | None]:
    """Returns the links and the contention of `cluster`, on which `records` were measured.

    Values without a record come from the device's shipped profile, or are assumed.
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
    """A curve through the measured sizes of each collective at each placement.

    A size that was measured twice has the median.
    """
    placements: dict[Placed, dict[int, list[Record]]] = {}
    for record in records:
        if record.case.work in TIMED and record.measured is not None:
            case = record.case
            sizes = case.size("nodes"), case.size("ranks_per_node"), case.size("groups")
            by_bytes = placements.setdefault((case.work, *sizes), {})
            by_bytes.setdefault(case.size("bytes"), []).append(record)
    return tuple(_curve(placed, by_bytes) for placed, by_bytes in sorted(placements.items()))


def _curve(placed: Placed, by_bytes: Mapping[int, Sequence[Record]]) -> CollectiveCurve:
    work, nodes, ranks, groups = placed
    timings = {
        n_bytes: [record.measured.times["time"] for record in same if record.measured]
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
    """The curves inside a node, with the link shares of large rings and messages.

    The shares are those of a large ring on the most ranks, and of a large message.
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
    """The curves across nodes, with shares of the NICs for placements without a curve.

    The share is the median of large rings over groups that together use whole nodes, as a mesh's
    do; a single group on part of a node counts only if there is no other.
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
    """The curves of the best collective that was measured, by falling number of ranks.

    A switch that reduces moves fewer bytes than a ring.
    """
    works = [work for work in RINGS if any(curve.collective == work for curve in curves)]
    same = [curve for curve in curves if curve.collective in works[:1]]
    return sorted(same, key=lambda curve: (-curve.ranks * curve.nodes, curve.groups))


def _bytes_per_s(curve: CollectiveCurve) -> float:
    """Bytes per second at the largest size."""
    return curve.bytes[-1] / (curve.time_us[-1] / US_PER_S)


def _ring_bytes_per_s(curve: CollectiveCurve) -> float:
    """Bytes per second through every link of a ring, at its largest size.

    nccl-tests calls this the bus bandwidth.
    """
    ranks = curve.ranks * curve.nodes
    return RINGS[curve.collective] * (ranks - 1) / ranks * _bytes_per_s(curve)


def contention_of(records: Iterable[Record]) -> float | None:
    """The median slowdown of compute per second of concurrent communication, None without records.

    both = max(0, c - w) + w + x min(c, w)

    c   the communication alone
    w   the compute alone
    x   the contention
    """
    contentions = []
    for record in records:
        if record.case.work == OVERLAP and record.measured is not None:
            compute_s = record.measured.figures["compute_alone_s"]
            communication_s = record.measured.figures["communication_alone_s"]
            exposed_s = record.measured.figures["both_s"] - max(compute_s, communication_s)
            contentions.append(max(0.0, exposed_s / min(compute_s, communication_s)))
    return rounded(statistics.median(contentions)) if contentions else None
