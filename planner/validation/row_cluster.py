"""The cluster of a measured row: the device of its name, its GPUs and the network it states."""

from __future__ import annotations

import functools
import re
from dataclasses import replace

from parplan.planner.validation.frameworks import (
    DEVICES,
    MAKERS,
    NETWORKS,
    NVL72_SEGMENT,
    PCIE_IS_ANOTHER,
)
from parplan.planner.validation.row_cells import Row, UnpricedError, whole
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus

_packaged_cluster = functools.cache(load_cluster)


def cluster_of(row: Row) -> Cluster:
    """Returns the cluster that the row names. Raises UnpricedError for one without a profile.

    The node of an NVL72 machine is its NVLink domain, whatever GPUs a tray has: the whole run, or
    the parts of 64 GPUs that its scheduler makes.
    """
    name = _device(row["gpu"])
    if name is None:
        raise UnpricedError(f"no device profile for {row['gpu'] or 'an unnamed GPU'}")
    cluster = _packaged_cluster(name)
    gpus = whole(row, "n_gpus")
    per_node = whole(row, "gpus_per_node", cluster.gpus_per_node)
    if "nvl72" in row["gpu"].lower():
        per_node = gpus if gpus <= cluster.gpus_per_node else NVL72_SEGMENT
    cluster = with_gpus(cluster, gpus, min(gpus, per_node))
    network = re.search(r"(\d+)x ?(\d+) ?Gb", row["interconnect"]) or re.search(
        r"()(\d+) Gb/s (?:IB )?per node", row["interconnect"]
    )
    if network:
        nics = max(1, int(network[1] or 1))
        if not int(network[2]):
            raise UnpricedError("interconnect is 0 Gb/s")
        nic = replace(cluster.nic, bytes_per_s=int(network[2]) * 1e9 / 8)
        cluster = replace(cluster, nics_per_node=nics, nic=nic)
    interconnect = row["interconnect"].lower()
    kind = next((ours for theirs, ours in NETWORKS.items() if theirs in interconnect), None)
    return replace(cluster, nic=replace(cluster.nic, name=kind)) if kind else cluster


def _device(gpu: str) -> str | None:
    """Names the cluster file of a gpu cell; whole words are compared, since an L40S is no L4."""
    words = re.sub(r"(\d)gb\b", r"\1g", gpu.lower()).split()
    gpu = "-".join(word for word in words if word not in MAKERS)
    name = next(
        (ours for theirs, ours in DEVICES.items() if re.match(rf"{theirs}(?![a-z0-9])", gpu)), None
    )
    if name and "pcie" in gpu and "pcie" not in name and name.startswith(PCIE_IS_ANOTHER):
        return None
    return name
