"""Cluster, GPU and stack names and files -> specs: the packaged configs, YAML files of that shape.

Units leave the key names here: GiB (2**30), GB (10**9), TFLOP/s and microseconds in a file, bytes,
bytes/s, FLOP/s and seconds in a spec.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources.abc import Traversable
from typing import Annotated, Any, Literal, cast

from parplan.profiles.documents.packaged_configs import (
    config_source,
    label_of,
    packaged_names,
    read_config,
)
from parplan.profiles.documents.plain import Limits
from parplan.profiles.documents.schema import document, json_schema, parse
from parplan.profiles.errors import ConfigError, unknown_name_error
from parplan.profiles.machines.calibration_factors import Calibration
from parplan.profiles.machines.hardware import Cluster, Device, Link
from parplan.profiles.machines.network_levels import LevelDocument, level_documents, levels_of
from parplan.profiles.machines.speeds import Profile
from parplan.profiles.machines.stack_terms import Terms, shipped_terms
from parplan.profiles.stack import FlashKernel, Stack
from parplan.profiles.units import GB, GIB, TERA, microseconds_of, seconds_of, shortest

_Positive = Annotated[float, Limits(gt=0)]
_NotNegative = Annotated[float, Limits(ge=0)]
_Count = Annotated[int, Limits(ge=1)]
_FORBID = {"extra": "forbid"}
_Arithmetic = Literal[
    "fp4", "fp8", "bf16", "fp16", "fp32"
]  # precisions that a device has a peak for
_CLUSTER_ALIASES = {
    "v100": "v100-32gb",
    "a100": "a100-80gb",
    "a800": "a800-80gb",
    "h100": "h100-80gb",
    "h800": "h800-80gb",
    "h200": "h200-141gb",
    "gh200": "gh200-96gb",
    "b200": "b200-180gb",
    "gb200": "gb200-186gb",
    "b300": "b300-270gb",
    "gb300": "gb300-279gb",
    "rtx3090": "rtx3090-24gb",
    "3090": "rtx3090-24gb",
    "a10g": "a10g-24gb",
    "l4": "l4-24gb",
    "h100-pcie": "h100-80gb-pcie",
    "h100-nvl": "h100-94gb-nvl",
    "h20": "h20-96gb",
    "l40s": "l40s-48gb",
    "rtx-3090": "rtx3090-24gb",
    "rtx4090": "rtx4090-24gb",
    "rtx-4090": "rtx4090-24gb",
    "4090": "rtx4090-24gb",
    "rtx5090": "rtx5090-32gb",
    "rtx-5090": "rtx5090-32gb",
    "5090": "rtx5090-32gb",
    "rtxa6000": "rtxa6000-48gb",
    "rtx-a6000": "rtxa6000-48gb",
    "a6000": "rtxa6000-48gb",
    "rtxpro6000": "rtxpro6000-96gb",
    "rtx-pro-6000": "rtxpro6000-96gb",
    "mi250x": "mi250x-64gb",
    "mi300x": "mi300x-192gb",
    "mi325x": "mi325x-256gb",
    "mi355x": "mi355x-288gb",
    "gaudi3": "gaudi3-128gb",
    "gaudi-3": "gaudi3-128gb",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _DeviceDocument:
    __pydantic_config__ = _FORBID

    name: str
    memory_gib: _Positive
    memory_gb_per_s: _Positive
    peak_tflops: Mapping[_Arithmetic, _Positive]
    num_sms: _Count
    context_gib: _NotNegative
    source: str
    compute_capability: _Positive | None = None
    flash_kernel: FlashKernel | None = None
    host_slowdown: _Positive | None = None
    board_power_w: _Positive | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _LinkDocument:
    """A link; `gb_per_s` is in one direction, of one GPU in a node or of one NIC between nodes.

    mesh: number of GPUs with a wire to each other one, which share `gb_per_s` equally
    """

    __pydantic_config__ = _FORBID

    name: str
    gb_per_s: _Positive
    latency_us: _NotNegative
    source: str
    mesh: Annotated[int, Limits(ge=2)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _NodeDocument:
    """A node: what the fast link joins. `hosts` is the number of machines that have its GPUs."""

    __pydantic_config__ = _FORBID

    gpus: _Count
    link: _LinkDocument
    nics: _Count
    nic: _LinkDocument
    host_memory_gib: _Positive
    pcie_gb_per_s: _Positive
    pcie_node_gb_per_s: _Positive | None = None
    host_gb_per_s: _Positive | None = None
    numa_domains: _Count | None = None
    gpus_per_numa: _Count | None = None
    hosts: _Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _ClusterDocument:
    __pydantic_config__ = _FORBID

    name: str
    device: _DeviceDocument
    node: _NodeDocument
    nodes: _Count = 1
    levels: tuple[LevelDocument, ...] = ()
    calibration: Calibration | None = None
    profile: Profile | None = None


def cluster_names() -> tuple[str, ...]:
    """Returns the names of the packaged clusters (one per device, with its usual node), sorted."""
    return packaged_names("clusters")


def packaged_cluster(name: str) -> str | None:
    """Returns the name of the packaged cluster that a name or a short name stands for, or None."""
    known = _canonical(name)
    return known if known in cluster_names() else None


def _canonical(name: str) -> str:
    name = name.lower().replace("_", "-")
    return _CLUSTER_ALIASES.get(name, name)


def load_cluster(name_or_path: str, *, what: str = "cluster") -> Cluster:
    """Returns a packaged cluster by name, or that of a YAML of the same shape.

    what: the word for a cluster in the error for an unknown name
    Raises ConfigError: unknown name, unreadable or broken file, unknown keys or wrong types.
    """
    source = cluster_source(name_or_path, what)
    return cluster_from_document(read_config(source), label_of(source))


def cluster_source(name_or_path: str, what: str) -> Traversable:
    """Returns the packaged configuration or the file of a cluster. Raises ConfigError."""
    return config_source("clusters", _canonical(name_or_path), what, name_or_path)


def cluster_from_document(document: object, where: str) -> Cluster:
    """Returns the cluster of equal nodes that a document of the YAML shape describes.

    `machine_from_document` in `pool_documents.py` also reads pools. Raises ConfigError with `where`
    and the key's path.
    """
    if isinstance(document, Mapping) and "pools" in document:
        raise ConfigError(
            f"{where}: the cluster has pools, one of equal nodes is needed here",
            hint="describe one pool in a cluster file of its own",
        )
    cluster = parse(_ClusterDocument, document, where)
    device, node = cluster.device, cluster.node
    islands, tiers = levels_of(cluster.levels, where)
    return Cluster(
        name=cluster.name,
        device=Device(
            name=device.name,
            memory_bytes=_bytes(device.memory_gib),
            memory_bytes_per_s=_per_s(device.memory_gb_per_s),
            peak_flops_per_s={
                str(precision): _flops(peak) for precision, peak in device.peak_tflops.items()
            },
            num_sms=device.num_sms,
            context_bytes=_bytes(device.context_gib),
            source=device.source,
            compute_capability=device.compute_capability,
            flash_kernel=device.flash_kernel,
            host_slowdown=device.host_slowdown or 1.0,
            board_power_w=device.board_power_w,
        ),
        nodes=cluster.nodes,
        gpus_per_node=node.gpus,
        intra_node=_link(node.link),
        nics_per_node=node.nics,
        nic=_link(node.nic),
        host_memory_bytes=_bytes(node.host_memory_gib),
        pcie_bytes_per_s=_per_s(node.pcie_gb_per_s),
        pcie_node_bytes_per_s=_per_s_if_known(node.pcie_node_gb_per_s),
        host_bytes_per_s=_per_s_if_known(node.host_gb_per_s),
        numa_domains=node.numa_domains,
        gpus_per_numa=node.gpus_per_numa,
        calibration=cluster.calibration,
        profile=cluster.profile,
        hosts_per_node=node.hosts or 1,
        islands=islands,
        tiers=tiers,
    )


def cluster_document(cluster: Cluster) -> dict[str, Any]:
    """Returns the YAML shape of `cluster`, with units in the key names.

    It is the inverse of `cluster_from_document`.
    """
    device = cluster.device
    body = _ClusterDocument(
        name=cluster.name,
        device=_DeviceDocument(
            name=device.name,
            memory_gib=shortest(device.memory_bytes, GIB, _bytes),
            memory_gb_per_s=shortest(device.memory_bytes_per_s, GB, _per_s),
            peak_tflops={
                cast(_Arithmetic, name): shortest(peak, TERA, _flops)
                for name, peak in device.peak_flops_per_s.items()
            },
            num_sms=device.num_sms,
            context_gib=shortest(device.context_bytes, GIB, _bytes),
            source=device.source,
            compute_capability=device.compute_capability,
            flash_kernel=device.flash_kernel,
            host_slowdown=None if device.host_slowdown == 1.0 else device.host_slowdown,
            board_power_w=device.board_power_w,
        ),
        node=_NodeDocument(
            gpus=cluster.gpus_per_node,
            link=_link_document(cluster.intra_node),
            nics=cluster.nics_per_node,
            nic=_link_document(cluster.nic),
            host_memory_gib=shortest(cluster.host_memory_bytes, GIB, _bytes),
            pcie_gb_per_s=shortest(cluster.pcie_bytes_per_s, GB, _per_s),
            pcie_node_gb_per_s=_gb_per_s_if_known(cluster.pcie_node_bytes_per_s),
            host_gb_per_s=_gb_per_s_if_known(cluster.host_bytes_per_s),
            numa_domains=cluster.numa_domains,
            gpus_per_numa=cluster.gpus_per_numa,
            hosts=None if cluster.hosts_per_node == 1 else cluster.hosts_per_node,
        ),
        nodes=cluster.nodes,
        levels=level_documents(cluster),
        calibration=cluster.calibration,
        profile=cluster.profile,
    )
    fields: dict[str, Any] = _known(document(body))
    node = _known(fields["node"])
    node.update({name: _known(node[name]) for name in ("link", "nic")})
    levels = [_known(level) for level in fields.pop("levels")]
    described = {**fields, "device": _known(fields["device"]), "node": node}
    return {**described, "levels": levels} if levels else described


def _per_s_if_known(gb_per_s: float | None) -> float | None:
    return None if gb_per_s is None else _per_s(gb_per_s)


def _gb_per_s_if_known(bytes_per_s: float | None) -> float | None:
    return None if bytes_per_s is None else shortest(bytes_per_s, GB, _per_s)


def _known(body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if value is not None}


def cluster_schema() -> dict[str, Any]:
    """Returns the JSON Schema of a cluster file."""
    return json_schema(_ClusterDocument)


def with_gpus(cluster: Cluster, num_gpus: int, gpus_per_node: int | None = None) -> Cluster:
    """Returns a cluster of the same machines with `num_gpus` devices.

    gpus_per_node: the devices of a node, those of the cluster's nodes by default

    Fewer devices than a node make one node of that many. A node of another size has NICs in
    proportion, at least one, and uplinks to the host, at least one lane: devices are taken in
    order, and those behind one switch share its uplink. Raises ConfigError when the devices do not
    fill whole nodes.
    """
    for flag, count in (("--gpus", num_gpus), ("--gpus-per-node", gpus_per_node)):
        if count is not None and count < 1:
            raise ConfigError(f"{flag} is {count}, it must be at least 1")
    per_node = min(num_gpus, gpus_per_node or cluster.gpus_per_node)
    if num_gpus % per_node:
        below = num_gpus // per_node * per_node
        raise ConfigError(
            f"{num_gpus} GPUs do not fill whole nodes of {per_node} {cluster.device.name}",
            hint=f"use --gpus {below} or --gpus {below + per_node}, "
            f"or set --gpus-per-node to a divisor of {num_gpus}",
        )
    nics = max(1, math.ceil(cluster.nics_per_node * per_node / cluster.gpus_per_node))
    uplinks = cluster.pcie_node_bytes_per_s
    if uplinks is not None:
        part = per_node / cluster.gpus_per_node
        uplinks = max(part * uplinks, min(uplinks, cluster.pcie_bytes_per_s))
    return replace(
        cluster,
        nodes=num_gpus // per_node,
        gpus_per_node=per_node,
        nics_per_node=nics,
        pcie_node_bytes_per_s=uplinks,
        hosts_per_node=_hosts(cluster, per_node),
        islands=tuple(island for island in cluster.islands if island.gpus <= per_node),
    )


def _hosts(cluster: Cluster, gpus: int) -> int:
    """Returns the hosts of `gpus` GPUs of a node, equal parts of no more than a host has."""
    of_a_host = cluster.gpus_per_node // cluster.hosts_per_node
    if cluster.hosts_per_node == 1 or gpus <= of_a_host:
        return 1
    return gpus // math.gcd(gpus, of_a_host)


def stack_names() -> tuple[str, ...]:
    """Returns the names of the packaged software stacks, sorted."""
    return packaged_names("stacks")


def load_stack(
    name_or_path: str, terms: Terms | None = None, *, without: str | None = None
) -> Stack:
    """Returns a packaged stack with its fitted terms, or that of a YAML of the same shape.

    terms: the terms of another fit than the shipped one
    without: a source; the terms are those of the fit that did not see it
    Raises ConfigError, as `load_cluster` does.
    """
    name = name_or_path.lower().replace("_", "-")
    source = config_source("stacks", name, "stack", name_or_path)
    stated = cast(Mapping[str, Any], read_config(source))
    stack = parse(Stack, stated, label_of(source))
    if stack.terms_of and stack.terms_of not in stack_names():
        raise unknown_name_error(
            "stack", stack.terms_of, stack_names(), where=f"terms_of of {label_of(source)}"
        )
    fitted = (shipped_terms() if terms is None else terms).of_stack(stack, without)
    return replace(fitted, **{key: getattr(stack, key) for key in stated})  # the file's values stay


def _link(link: _LinkDocument) -> Link:
    return Link(
        name=link.name,
        bytes_per_s=_per_s(link.gb_per_s),
        latency_s=seconds_of(link.latency_us),
        source=link.source,
        mesh=link.mesh,
    )


def _link_document(link: Link) -> _LinkDocument:
    return _LinkDocument(
        name=link.name,
        gb_per_s=shortest(link.bytes_per_s, GB, _per_s),
        latency_us=microseconds_of(link.latency_s),
        source=link.source,
        mesh=link.mesh,
    )


def _bytes(gib: float) -> int:
    return round(gib * GIB)


def _per_s(gb_per_s: float) -> float:
    return gb_per_s * GB


def _flops(tflops: float) -> float:
    return tflops * TERA
