"""Cluster files of any kind -> records and back: equal clusters, and pools with their joins.

A row of `pools` is a cluster document of its own, or `gpu: NAME` with the nodes that it has of that
packaged machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from parplan.profiles.documents.numbers import whole_of
from parplan.profiles.documents.packaged_configs import label_of, read_config
from parplan.profiles.documents.plain import Limits
from parplan.profiles.documents.ranges import DEVICES
from parplan.profiles.documents.schema import document, json_schema, parse
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.machines.machine_catalog import (
    cluster_document,
    cluster_from_document,
    cluster_source,
    load_cluster,
    stack_names,
    with_gpus,
)
from parplan.profiles.machines.unequal_cluster import (
    Join,
    Pool,
    UnequalCluster,
    unequal_cluster,
)
from parplan.profiles.units import GB, microseconds_of, seconds_of, shortest

_Positive = Annotated[float, Limits(gt=0)]
_NotNegative = Annotated[float, Limits(ge=0)]
_Count = Annotated[int, Limits(ge=1)]
_FORBID = {"extra": "forbid"}
ASSUMED_JOIN = "assumed: pools meet at the slower of their NICs"


@dataclass(frozen=True, slots=True, kw_only=True)
class _PackagedPoolDocument:
    """A pool of packaged machines: `nodes` of them, with `gpus_per_node` GPUs if not the usual."""

    __pydantic_config__ = _FORBID

    name: str
    gpu: str
    nodes: _Count = 1
    gpus_per_node: _Count | None = None
    stack: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _JoinDocument:
    """A join of two pools; bandwidths are of one direction, of a node or of a pool in total."""

    __pydantic_config__ = _FORBID

    name: str
    latency_us: _NotNegative
    source: str
    pools: tuple[str, ...] = ()
    gb_per_s_of_node: _Positive | None = None
    gb_per_s_in_total: _Positive | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnequalDocument:
    __pydantic_config__ = _FORBID

    name: str
    pools: tuple[Mapping[str, Any], ...]
    joins: tuple[_JoinDocument, ...]


def load_machine(name_or_path: str) -> Cluster:
    """Returns a packaged cluster by name, or that of a cluster file, with pools or without.

    Raises ConfigError, as `load_cluster` does.
    """
    source = cluster_source(name_or_path, "cluster")
    return machine_from_document(read_config(source), label_of(source))


def machine_from_document(body: object, where: str) -> Cluster:
    """Returns the cluster of a document, with pools or without. Raises ConfigError."""
    if not isinstance(body, Mapping) or "pools" not in body:
        return cluster_from_document(body, where)
    stated = parse(_UnequalDocument, dict(body), where)
    try:
        return unequal_cluster(
            stated.name,
            (_pool(dict(row), f"{where}: pools") for row in stated.pools),
            map(_join, stated.joins),
        )
    except ConfigError as error:
        if error.message.startswith(where):
            raise
        raise ConfigError(f"{where}: {error.message}", hint=error.hint) from None


def machine_document(cluster: Cluster) -> dict[str, Any]:
    """Returns the YAML shape of a cluster, the inverse of `machine_from_document`."""
    if not isinstance(cluster, UnequalCluster):
        return cluster_document(cluster)
    return {
        "name": cluster.name,
        "pools": [
            {
                **cluster_document(pool.cluster),
                "name": pool.name,
                **({"stack": pool.stack} if pool.stack else {}),
            }
            for pool in cluster.pools
        ],
        "joins": [_join_document(join) for join in cluster.joins],
    }


def unequal_schema() -> dict[str, Any]:
    """Returns the JSON Schema of a cluster file with pools."""
    return json_schema(_UnequalDocument)


def pools_of_text(
    text: str, num_gpus: int | None = None, gpus_per_node: int | None = None
) -> UnequalCluster:
    """Returns the pools of `NAME:GPUS+NAME:GPUS`, joined at the slower NICs. Raises ConfigError."""
    counts: dict[str, int] = {}
    for part in text.split("+"):
        name, _, count = part.partition(":")
        number = whole_of(count, DEVICES)
        if number is None:
            raise ConfigError(
                f"--gpu {text}: {part} is not NAME:GPUS",
                hint="give each pool its number of GPUs: --gpu a100-80gb:32+h100-80gb:32",
            )
        if name in counts:
            raise ConfigError(
                f"--gpu {text} names {name} twice",
                hint="add up its GPUs, or name both pools in a cluster file",
            )
        counts[name] = number
    if num_gpus is not None:
        raise ConfigError(
            f"--gpus {num_gpus} beside --gpu {text}, which counts the GPUs of each pool",
            hint="leave out --gpus",
        )
    pools = [_pool_of_gpus(name, count, gpus_per_node) for name, count in counts.items()]
    nic = min((pool.cluster for pool in pools), key=lambda machine: machine.node_bytes_per_s)
    return unequal_cluster("pools", pools, (_slower_nics(nic),))


def _pool_of_gpus(name: str, num_gpus: int, gpus_per_node: int | None) -> Pool:
    node = load_cluster(name, what="GPU")
    try:
        machine = with_gpus(node, num_gpus, gpus_per_node)
    except ConfigError as error:
        raise ConfigError(
            str(error), hint="give the pool whole nodes, or set --gpus-per-node"
        ) from None
    return Pool(name=machine.device.name, cluster=machine)


def _slower_nics(machine: Cluster) -> Join:
    return Join(
        name=machine.nic.name,
        node_bytes_per_s=machine.node_bytes_per_s,
        latency_s=machine.nic.latency_s,
        source=ASSUMED_JOIN,
    )


def _pool(row: dict[str, Any], where: str) -> Pool:
    """Returns the pool of a row. Raises ConfigError with `where`."""
    label = f"{where}: {row.get('name', 'a row without name')}"
    stack = row.get("stack")
    if stack is not None and stack not in stack_names():
        raise ConfigError(
            f"{label}: unknown stack {stack!r}", hint=f"use one of {', '.join(stack_names())}"
        )
    if "gpu" not in row:
        cluster = cluster_from_document({k: v for k, v in row.items() if k != "stack"}, label)
        return Pool(name=cluster.name, cluster=cluster, stack=stack)
    stated = parse(_PackagedPoolDocument, row, label)
    machine = load_cluster(stated.gpu, what="GPU")
    per_node = stated.gpus_per_node or machine.gpus_per_node
    machine = with_gpus(machine, stated.nodes * per_node, per_node)
    return Pool(name=stated.name, cluster=machine, stack=stack)


def _join(stated: _JoinDocument) -> Join:
    return Join(
        name=stated.name,
        pools=stated.pools,
        latency_s=seconds_of(stated.latency_us),
        source=stated.source,
        node_bytes_per_s=_per_s(stated.gb_per_s_of_node),
        total_bytes_per_s=_per_s(stated.gb_per_s_in_total),
    )


def _join_document(join: Join) -> dict[str, Any]:
    body = document(
        _JoinDocument(
            name=join.name,
            pools=join.pools,
            latency_us=microseconds_of(join.latency_s),
            source=join.source,
            gb_per_s_of_node=_gb_per_s(join.node_bytes_per_s),
            gb_per_s_in_total=_gb_per_s(join.total_bytes_per_s),
        )
    )
    return {key: value for key, value in body.items() if value not in (None, [])}


def _per_s(gb_per_s: float | None) -> float | None:
    return None if gb_per_s is None else gb_per_s * GB


def _gb_per_s(bytes_per_s: float | None) -> float | None:
    return None if bytes_per_s is None else shortest(bytes_per_s, GB, lambda gb: gb * GB)
