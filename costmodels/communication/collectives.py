"""Seconds of collectives and messages by measured curves or textbook forms.

The textbook forms are EQUATIONS C1, C2, C3, C4, C5, C6; the measured curves are EQUATIONS C7.

Inside a node a measured curve is read where the profile has one, else a ring over the link. Across
nodes NCCL pipelines one ring through the nodes, so the slowest part decides: the part inside the
node or the group's share of the NICs, plus the latency of the hops between nodes. Three phases one
after another would be too slow (EQUATIONS C5): on four 8-GPU nodes at 1 GiB and more they give 293
GB/s where 362-382 GB/s were measured (stas00/ml-engineering, compared only).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from enum import StrEnum

from parplan.costmodels.communication.mesh import Placement
from parplan.costmodels.operators.kernels import ranks_met
from parplan.profiles.elementwise import Number, exp, larger_of, log, smaller_of
from parplan.profiles.machines.curves import CollectiveCurve, spline_s
from parplan.profiles.machines.hardware import Link
from parplan.profiles.machines.shipped_profiles import Machine
from parplan.profiles.provenance import ZERO, Kind, Seconds, kinds_where, weakest_kind

POINT_TO_POINT = "point_to_point"  # the name of curves of single messages


class Collective(StrEnum):
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"


def ring_all_reduce_s(n_bytes: Number, p: int, link: Link) -> Number:
    """Seconds to all-reduce `n_bytes` held on each of `p` ranks over one link class.

        t = 2 (p - 1) (alpha + n / (p W))       alpha = link.latency_s, W = link.bytes_per_s

    Algorithm: Patarasuk & Yuan 2009, doi:10.1016/j.jpdc.2008.09.002 (EQUATIONS C1).
    Leaves out: reduction arithmetic, contention. `p == 1` costs exactly 0.
    """
    return 2 * ring_all_gather_s(n_bytes, p, link)


def ring_all_gather_s(n_bytes: Number, p: int, link: Link) -> Number:
    """Seconds to gather `n_bytes` (the whole output) on `p` ranks.

        t = (p - 1) (alpha + n / (p W))         (EQUATIONS C2)

    A reduce-scatter of `n_bytes` of input takes as long. Leaves out: contention. `p == 1` costs
    exactly 0.
    """
    return (p - 1) * (link.latency_s + n_bytes / (p * link.bytes_per_s))


def pairwise_all_to_all_s(n_bytes: Number, p: int, link: Link) -> Number:
    """Seconds to exchange a send buffer of `n_bytes` between `p` ranks, one partner after another.

        t = (p - 1) (alpha + n / (p W))         W of the slowest link (EQUATIONS C3)

    Leaves out: contention, messages in flight together. `p == 1` costs exactly 0.
    """
    return (p - 1) * (link.latency_s + n_bytes / (p * link.bytes_per_s))


def tree_all_reduce_s(n_bytes: Number, p: int, link: Link) -> Number:
    """Seconds to all-reduce `n_bytes` up and down a binary tree, for small messages.

        t = 2 ceil(log2 p) alpha + 2 n / W      (EQUATIONS C1; Thakur 2005), 0 for p == 1

    Leaves out: reduction arithmetic.
    """
    if p == 1:
        return 0.0
    return 2 * math.ceil(math.log2(p)) * link.latency_s + 2 * n_bytes / link.bytes_per_s


def send_s(n_bytes: Number, link: Link) -> Number:
    """Seconds of one message: t = alpha + n / W (EQUATIONS C4)."""
    return link.latency_s + n_bytes / link.bytes_per_s


def all_reduce_s(n_bytes: Number, p: int, link: Link) -> Number:
    """Seconds of the faster of ring and tree (EQUATIONS C1), as NCCL chooses by size."""
    return smaller_of(ring_all_reduce_s(n_bytes, p, link), tree_all_reduce_s(n_bytes, p, link))


_TEXTBOOK = {
    Collective.ALL_REDUCE: all_reduce_s,
    Collective.ALL_GATHER: ring_all_gather_s,
    Collective.REDUCE_SCATTER: ring_all_gather_s,
    Collective.ALL_TO_ALL: pairwise_all_to_all_s,
}


def _scaled(link: Link, bytes_per_s: float) -> Link:
    return replace(link, bytes_per_s=bytes_per_s)


def collective_time(
    collective: Collective, n_bytes: Number, placement: Placement, machine: Machine
) -> Seconds:
    """Seconds of one collective of a group that sits at `placement`.

    `n_bytes` as nccl-tests counts: the tensor (all-reduce), the gathered output (all-gather), the
    whole input (reduce-scatter), the send buffer (all-to-all). A group of one rank costs exactly 0.
    A curve of exactly this placement in the machine's own profile takes precedence.
    """
    if placement.num_ranks == 1:
        return ZERO
    groups = (
        (placement.groups_per_node,)
        if placement.crosses_nodes
        else (machine.cluster.gpus_per_node // placement.ranks_per_node, 1)
    )
    curve = _placed(collective, placement.nodes, placement.ranks_per_node, groups, machine)
    if curve is not None:
        return Seconds(spline_s(curve, n_bytes), curve.kind_at(n_bytes))
    inside = _inside_node(collective, n_bytes, placement, machine)
    if not placement.crosses_nodes:
        return inside
    return _across_nodes(collective, n_bytes, placement, inside, machine)


def exchange_once_time(
    n_bytes: Number, copies: int, placement: Placement, machine: Machine
) -> Seconds:
    """Seconds of an exchange that sends a token once to a rank, and once to another node.

    n_bytes    those of `copies` copies of each token of a rank, one for each of its experts

    Between nodes goes one copy for each node with some of the token's experts, which its ranks pass
    on to one another (EQUATIONS T3; DeepEP and HybridEP).
    """
    token_bytes = n_bytes / copies
    to_ranks = token_bytes * ranks_met(placement.num_ranks, copies)
    if not placement.crosses_nodes:
        return collective_time(Collective.ALL_TO_ALL, to_ranks, placement, machine)
    inside = _inside_node(Collective.ALL_TO_ALL, to_ranks, placement, machine)
    to_nodes = token_bytes * ranks_met(placement.nodes, copies)
    return _across_nodes(Collective.ALL_TO_ALL, to_nodes, placement, inside, machine)


def _placed(
    name: str, nodes: int, ranks: int, groups: tuple[int, ...], machine: Machine
) -> CollectiveCurve | None:
    """Returns the machine's curve of a placement with the first measured number of groups at once.

    Inside a node all groups of an axis run at once, whatever a placement says: they share no NIC,
    but on some machines they share the link.
    """
    if not machine.placed_curves:
        return None
    for at_once in groups:
        curve = machine.placed_curves.get((name, nodes, ranks, at_once))
        if curve is not None:
            return curve
    return None


def _inside_node(
    collective: Collective, n_bytes: Number, placement: Placement, machine: Machine
) -> Seconds:
    """Seconds of the part on the links of one node.

    They are read from the curve of that many ranks, interpolated between two curves (EQUATIONS C7),
    or computed by a textbook form, on the link of the smallest part of the node that holds them.
    """
    ranks = placement.ranks_per_node
    if ranks == 1:
        return ZERO
    curves = machine.collective_curves.get(collective, ())
    if not curves:
        link = machine.cluster.link_of(ranks * placement.distance)
        slowed = _scaled(link, link.among(ranks) * machine.profile.intra.link_share)
        return Seconds(_TEXTBOOK[collective](n_bytes, ranks, slowed), Kind.ANALYTIC)
    below = next((curve for curve in reversed(curves) if curve.ranks <= ranks), curves[0])
    above = next((curve for curve in curves if curve.ranks >= ranks), curves[-1])
    known = curves[0].ranks <= ranks <= curves[-1].ranks
    inside = known & (below.bytes[0] <= n_bytes) & (n_bytes <= below.bytes[-1])
    best = weakest_kind((machine.profile.intra.kind, Kind.INTERPOLATED))
    kind = kinds_where(inside, best, Kind.ANALYTIC)
    return Seconds(_between_ranks(below, above, ranks, n_bytes), kind)


def _between_ranks(
    below: CollectiveCurve, above: CollectiveCurve, ranks: int, n_bytes: Number
) -> Number:
    """Seconds between two curves, log-linear in the number of ranks (EQUATIONS C7).

    Beyond the last curve the latency, its seconds of the fewest bytes, grows by steps of a tree,
    and the rest as the bytes that a rank sends through the switch, (p - 1) / p of them.
    """
    low_s = spline_s(below, n_bytes)
    if below.ranks == above.ranks:
        if ranks <= below.ranks:
            return low_s
        latency_s = smaller_of(low_s, below.time_us[0] * 1e-6)
        steps = max(1.0, math.log2(ranks) / math.log2(below.ranks))
        sent = (1 - 1 / ranks) / (1 - 1 / below.ranks)
        return latency_s * steps + (low_s - latency_s) * sent
    share = math.log(ranks / below.ranks) / math.log(above.ranks / below.ranks)
    high_s = spline_s(above, n_bytes)
    return exp((1 - share) * log(low_s) + share * log(high_s))


def group_nic_bytes_per_s(placement: Placement, machine: Machine) -> float:
    """Bytes per second with which one group leaves a node (EQUATIONS C6).

    They are its part of the NICs (Cluster.group_nic_bytes_per_s) times the share of their bandwidth
    that NCCL reaches; the ring passes through the GPUs' own links.
    """
    cluster = machine.cluster
    shared = cluster.group_nic_bytes_per_s(placement.ranks_per_node, placement.groups_per_node)
    return min(shared * machine.profile.inter.nic_share, cluster.intra_node.bytes_per_s)


@dataclass(frozen=True, slots=True)
class _Left:
    """A level of the network of which a group leaves the units: a node, or a unit of a tier.

    ranks: ranks of the group in one unit
    bytes_per_s: bandwidth of the unit's uplinks that the group has
    latency_s: seconds that a message takes more because it leaves the unit
    """

    ranks: int
    bytes_per_s: float
    latency_s: float


def _levels_left(placement: Placement, machine: Machine) -> tuple[_Left, ...]:
    """Returns the levels of the network of which a group leaves the units, nodes first.

    All groups of its kind that a unit has ranks of share its uplinks:

        W = W_nodes / o x r / (g G)             (EQUATIONS C9)

    o oversubscription, r ranks of the group in the unit, g on a node, G groups that cross a node.
    """
    cluster = machine.cluster
    nic_bytes_per_s = group_nic_bytes_per_s(placement, machine)
    left = [_Left(placement.ranks_per_node, nic_bytes_per_s, cluster.nic.latency_s)]
    reached = cluster.node_bytes_per_s * machine.profile.inter.nic_share
    for tier, gpus in zip(cluster.tiers, cluster.unit_gpus[1:], strict=True):
        if placement.num_ranks * placement.distance > gpus and tier.nodes < cluster.nodes:
            ranks = max(placement.ranks_within(gpus), placement.ranks_per_node)
            shared_by = placement.ranks_per_node * placement.groups_per_node
            uplinks = reached / tier.oversubscription * ranks / shared_by
            left.append(_Left(ranks, uplinks, tier.latency_s))
    return tuple(left)


def _across_nodes(
    collective: Collective, n_bytes: Number, placement: Placement, inside: Seconds, machine: Machine
) -> Seconds:
    """The slowest level of (bytes that leave a unit / W) + hops alpha (EQUATIONS C5, C6, C9).

    It is the minimum over the algorithms. The parts run as one pipeline, so the slowest decides.
    """
    levels = _levels_left(placement, machine)
    crossings = [
        _crossings(collective, n_bytes, placement.num_ranks, level.ranks) for level in levels
    ]
    passed = _ranks_passed(collective, placement)
    seconds = (
        _crossed_s(inside.value_s, levels, of_algorithm)
        + ranks * machine.cluster.intra_node.latency_s
        for of_algorithm, ranks in zip(zip(*crossings, strict=True), passed, strict=True)
    )
    return Seconds(functools.reduce(smaller_of, seconds), machine.profile.inter.kind)


def _crossed_s(
    inside_s: Number, levels: tuple[_Left, ...], crossings: tuple[tuple[Number, int], ...]
) -> Number:
    """Seconds of one algorithm, by the bytes and the hops that leave a unit of each level."""
    slowest_s, hops_s = inside_s, 0.0
    for level, (crossing_bytes, hops) in zip(levels, crossings, strict=True):
        slowest_s = larger_of(slowest_s, crossing_bytes / level.bytes_per_s)
        hops_s += hops * level.latency_s
    return slowest_s + hops_s


def _crossings(
    collective: Collective, n_bytes: Number, p: int, g: int
) -> tuple[tuple[Number, int], ...]:
    """(bytes that leave a unit, hops between units in sequence) of each algorithm.

    p ranks, k = p / g units of g ranks. Ring over all p ranks: 2 (p-1)/p n in 2 (k-1) hops
    (all-reduce), (p-1)/p n in k - 1. Tree over units: 2 n in 2 ceil(log2 k) hops. All-to-all: the
    part of the g send buffers that is for other units, g n (k-1)/k.
    """
    k = p // g
    if collective is Collective.ALL_TO_ALL:
        return ((g * n_bytes * (k - 1) / k, k - 1),)
    ring_bytes = n_bytes * (p - 1) / p
    if collective is Collective.ALL_REDUCE:
        return (2 * ring_bytes, 2 * (k - 1)), (2 * n_bytes, 2 * math.ceil(math.log2(k)))
    return ((ring_bytes, k - 1),)


def _ranks_passed(collective: Collective, placement: Placement) -> tuple[int, ...]:
    """Links inside nodes that each algorithm passes in sequence, beside those of one node's part.

    A ring passes every rank of every node: (k - 1)(g - 1) links more than inside one node, twice
    as many for an all-reduce. A tree passes the nodes on the way at once.
    """
    links = (placement.nodes - 1) * (placement.ranks_per_node - 1)
    if collective is Collective.ALL_TO_ALL:
        return (0,)
    return (2 * links, 0) if collective is Collective.ALL_REDUCE else (links,)


def point_to_point_time(n_bytes: Number, *, level: int, sharing: int, machine: Machine) -> Seconds:
    """Seconds of a message while `sharing` neighbouring ranks send at once (EQUATIONS C4, C6, C9).

    level: 0 inside a node, 1 between nodes, one more for each tier of which it leaves a unit

    Between nodes each transfer has min(one NIC, all NICs / sharing), and no more than its part of
    the uplinks of each unit that it leaves. A curve in the machine's own profile takes precedence;
    inside a node, where that number of transfers was not measured, the curve of a single transfer
    is read. Leaves out: other traffic on the NICs.
    """
    cluster, profile = machine.cluster, machine.profile
    at_once = min(sharing, cluster.gpus_per_node)
    place, groups = ((2, 1), (at_once,)) if level else ((1, 2), (at_once, 1))
    curve = _placed(POINT_TO_POINT, *place, groups, machine)
    if curve is not None:
        return Seconds(spline_s(curve, n_bytes), curve.kind_at(n_bytes))
    if not level:
        link = cluster.intra_node
        measured = machine.collective_curves and not machine.placed_curves
        slowed = _scaled(link, link.among(2) * profile.intra.point_to_point_share)
        return Seconds(send_s(n_bytes, slowed), profile.intra.kind if measured else Kind.ANALYTIC)
    share = min(1.0, cluster.nics_per_node / max(1, at_once))
    bytes_per_s = cluster.nic.bytes_per_s * share
    latency_s = cluster.nic.latency_s
    for tier, gpus in zip(cluster.tiers[: level - 1], cluster.unit_gpus[1:], strict=False):
        uplinks = cluster.node_bytes_per_s * tier.nodes / tier.oversubscription
        bytes_per_s = min(bytes_per_s, uplinks / max(1, min(sharing, gpus)))
        latency_s += tier.latency_s
    nic = replace(
        cluster.nic,
        bytes_per_s=bytes_per_s * profile.inter.point_to_point_share,
        latency_s=latency_s,
    )
    return Seconds(send_s(n_bytes, nic), profile.inter.kind)
