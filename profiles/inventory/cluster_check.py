"""Looks through a cluster for gaps and for figures that are unlikely beside its datasheet."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.machines.machine_catalog import cluster_names, load_cluster
from parplan.profiles.machines.pool_documents import ASSUMED_JOIN, machine_from_document
from parplan.profiles.machines.unequal_cluster import Join, UnequalCluster
from parplan.profiles.units import GB, GIB, TERA, US_PER_S

ABOVE = 1.02  # times a datasheet's figure, which is rounded
BELOW = 1 / 3
FASTEST_NIC_GB_PER_S = 125  # 1 Tbit/s; the fastest NICs of 2025 have 800 Gbit/s
MOST_NICS = 16  # of a node
SLOWEST_LATENCY_US = 100.0
FEW_NODES = 16  # one leaf of most networks
LARGEST_HOST_GIB = 65536


class Weight(StrEnum):
    """The weight of a finding: the file cannot be used, a figure is unlikely, or one is missing."""

    WRONG = "wrong"
    UNLIKELY = "unlikely"
    MISSING = "missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something to correct or to fill in at a key of a cluster file, and one action."""

    weight: Weight
    key: str
    message: str
    hint: str


def check_document(document: object, where: str) -> tuple[Cluster | None, tuple[Finding, ...]]:
    """Returns the cluster of a document, None if it is unreadable, and all findings."""
    try:
        cluster = machine_from_document(document, where)
    except ConfigError as error:
        hint = _unit_hint(str(error)) or error.hint or "compare with a file that plan init writes"
        return None, (Finding(weight=Weight.WRONG, key="", message=str(error), hint=hint),)
    return cluster, check_cluster(cluster)


def _unit_hint(message: str) -> str | None:
    """Returns the action for a key in another unit than the file's."""
    for unit in ("_gib_per_s", "_gbit", "_gbps", "_mb", "_mib", "_ns", "_ms", "_gb"):
        if f"{unit}'" in message or f"{unit} " in message or message.endswith(unit):
            return "keys end in _gib, _gb_per_s or _us: convert the figure and rename the key"
    return None


def check_cluster(cluster: Cluster) -> tuple[Finding, ...]:
    """Returns what is unlikely or missing, in the order of the file."""
    if isinstance(cluster, UnequalCluster):
        return (*_pools(cluster), *(found for join in cluster.joins for found in _join(join)))
    base = _like(cluster)
    findings = [
        *(_against_datasheet(cluster, base) if base else _no_datasheet(cluster)),
        *_links(cluster, base),
        *_node(cluster),
        *_levels(cluster),
        *_assumed(cluster),
    ]
    return tuple(findings)


def _pools(cluster: UnequalCluster) -> Iterator[Finding]:
    """Yields the findings of every pool, each with its name before the key."""
    for pool in cluster.pools:
        for finding in check_cluster(pool.cluster):
            yield replace(finding, key=f"pools.{pool.name}.{finding.key}")


def _join(join: Join) -> Iterator[Finding]:
    node_gb_per_s = (join.node_bytes_per_s or 0.0) / GB
    if node_gb_per_s > FASTEST_NIC_GB_PER_S * MOST_NICS:
        yield _unlikely(
            f"joins.{join.name}.gb_per_s_of_node",
            f"{node_gb_per_s:g} GB/s is more than {MOST_NICS} of the fastest NICs have",
            f"if it is in Gbit/s, write {node_gb_per_s / 8:g}",
        )
    if join.source == ASSUMED_JOIN:
        yield _missing(f"joins.{join.name}", join.source, "state the link between the pools")


def _like(cluster: Cluster) -> Cluster | None:
    """Returns the packaged machine of the cluster's device, or None."""
    name = cluster.device.name
    return load_cluster(name) if name in cluster_names() else None


def _unlikely(key: str, message: str, hint: str) -> Finding:
    return Finding(weight=Weight.UNLIKELY, key=key, message=message, hint=hint)


def _missing(key: str, message: str, hint: str) -> Finding:
    return Finding(weight=Weight.MISSING, key=key, message=message, hint=hint)


def _no_datasheet(cluster: Cluster) -> Iterator[Finding]:
    yield _missing(
        "device.name",
        f"{cluster.device.name} is not in plan clusters: no figure can be compared, and its speeds "
        "are assumed shares of the datasheet",
        "measure it with plan profile, or name a device of plan clusters",
    )


def _against_datasheet(cluster: Cluster, base: Cluster) -> Iterator[Finding]:
    device, usual = cluster.device, base.device
    if device.memory_bytes > usual.memory_bytes * ABOVE:
        nominal = math.isclose(device.memory_bytes / GIB, round(device.memory_bytes / GIB))
        yield _unlikely(
            "device.memory_gib",
            f"{device.memory_bytes / GIB:g} GiB, the device offers {usual.memory_bytes / GIB:g}",
            "GB of the datasheet are no GiB: take total_memory of torch over 2**30"
            if nominal
            else "take total_memory of torch over 2**30",
        )
    figures = {"memory_gb_per_s": (device.memory_bytes_per_s / GB, usual.memory_bytes_per_s / GB)}
    for precision, peak in device.peak_flops_per_s.items():
        if precision in usual.peak_flops_per_s:
            datasheet = usual.peak_flops_per_s[precision]
            figures[f"peak_tflops.{precision}"] = (peak / TERA, datasheet / TERA)
    for key, (found, datasheet) in figures.items():
        yield from _beside(f"device.{key}", found, datasheet, _PEAK_RATIOS)


_PEAK_RATIOS = {2: "the figure with sparsity is twice the dense one: halve it"}
_LINK_RATIOS = {
    2: "datasheets add both directions: halve it",
    8: "Gbit/s are no GB/s: divide by 8",
    16: "Gbit/s of both directions: divide by 16",
}


def _beside(
    key: str, found: float, datasheet: float, ratios: Mapping[int, str]
) -> Iterator[Finding]:
    """Yields a finding for a figure above that of the datasheet, or far below it."""
    ratio = found / datasheet
    if ratio > ABOVE:
        near = (hint for times, hint in ratios.items() if abs(ratio / times - 1) < 0.1)
        yield _unlikely(
            key,
            f"{found:g}, the datasheet has {datasheet:g}",
            next(near, "take the datasheet's figure, dense and in one direction"),
        )
    elif ratio < BELOW:
        yield _unlikely(
            key,
            f"{found:g} is less than a third of the datasheet's {datasheet:g}",
            "state the link's own speed; what software reaches of it is priced apart",
        )


def _links(cluster: Cluster, base: Cluster | None) -> Iterator[Finding]:
    link, nic = cluster.intra_node, cluster.nic
    if base is not None and link.name == base.intra_node.name:
        usual = base.intra_node.bytes_per_s / GB
        yield from _beside("node.link.gb_per_s", link.bytes_per_s / GB, usual, _LINK_RATIOS)
    if nic.bytes_per_s / GB > FASTEST_NIC_GB_PER_S:
        yield _unlikely(
            "node.nic.gb_per_s",
            f"{nic.bytes_per_s / GB:g} GB/s is more than any NIC has",
            f"if it is in Gbit/s, write {nic.bytes_per_s / GB / 8:g}",
        )
    for key, latency_s in (("link", link.latency_s), ("nic", nic.latency_s)):
        latency_us = latency_s * US_PER_S
        if latency_us > SLOWEST_LATENCY_US:
            yield _unlikely(
                f"node.{key}.latency_us", f"{latency_us:g} us a message", "write microseconds"
            )
    if cluster.nic.bytes_per_s > cluster.pcie_bytes_per_s * ABOVE and cluster.nics_per_node > 1:
        yield _unlikely(
            "node.nic.gb_per_s",
            f"a NIC of {nic.bytes_per_s / GB:g} GB/s is faster than the lane of a GPU to its host, "
            f"{cluster.pcie_bytes_per_s / GB:g}",
            "compare with the NIC's own slot: lspci -vv, LnkSta",
        )


def _node(cluster: Cluster) -> Iterator[Finding]:
    gpus = cluster.gpus_per_node
    if gpus % cluster.nics_per_node and cluster.nics_per_node % gpus:
        yield _unlikely(
            "node.nics",
            f"{cluster.nics_per_node} NICs for {gpus} GPUs: GPUs have unequal parts of them",
            "count the NICs that training uses, without those of storage and management",
        )
    host_gib = cluster.host_memory_bytes / GIB
    if host_gib > LARGEST_HOST_GIB * cluster.hosts_per_node:
        yield _unlikely(
            "node.host_memory_gib", f"{host_gib:g} GiB of host memory", "write GiB, not MiB"
        )
    if cluster.numa_domains is None:
        yield _missing(
            "node.numa_domains",
            "the NUMA domains are not stated: a process is taken to reach all host memory alike",
            "add numa_domains and gpus_per_numa, from numactl --hardware and nvidia-smi topo -m",
        )
    elif (cluster.gpus_per_numa or 0) * cluster.numa_domains < gpus:
        yield _unlikely(
            "node.gpus_per_numa",
            f"{cluster.numa_domains} domains x {cluster.gpus_per_numa} have fewer than {gpus} GPUs",
            "state the GPUs at a domain that has any",
        )


def _levels(cluster: Cluster) -> Iterator[Finding]:
    for island in cluster.islands:
        if cluster.gpus_per_node % island.gpus:
            yield _unlikely(
                "levels",
                f"{island.link.name} joins {island.gpus} GPUs, which do not divide the "
                f"{cluster.gpus_per_node} of a node",
                "state the GPUs of one part of a node",
            )
        if island.link.bytes_per_s <= cluster.intra_node.bytes_per_s:
            yield _unlikely(
                "levels",
                f"{island.link.name} is no faster than the link of the node",
                "leave the level out",
            )
    for tier in cluster.tiers:
        if cluster.nodes > tier.nodes and cluster.nodes % tier.nodes:
            yield _unlikely(
                "levels",
                f"{cluster.nodes} nodes do not fill whole units of {tier.name}, of {tier.nodes}",
                "plan for the nodes that the scheduler gives, or change the level",
            )
    if not cluster.tiers and cluster.nodes > FEW_NODES:
        yield _missing(
            "levels",
            f"{cluster.nodes} nodes without a level above them: no bottleneck is assumed",
            "add the leaves and pods of the network, with their oversubscription",
        )


def _assumed(cluster: Cluster) -> Iterator[Finding]:
    sources: dict[str, Any] = {
        "device": cluster.device.source,
        "node.link": cluster.intra_node.source,
        "node.nic": cluster.nic.source,
    }
    for key, source in sources.items():
        if "assum" in source:
            yield _missing(
                key,
                "a part of it is assumed: " + _clause(source),
                "compare with your machine, and write where the figure is from",
            )


def _clause(source: str) -> str:
    """Returns the first part of a source that says that something is assumed."""
    return next(part.strip() for part in source.split(";") if "assum" in part)
