"""A cluster file from facts: the packaged machine of its GPU, changed where the facts say so."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from parplan.profiles.documents.texts import escaped
from parplan.profiles.documents.yaml_text import yaml_flow
from parplan.profiles.errors import ConfigError
from parplan.profiles.inventory.machine_facts import FOUND, PLACES, Fact
from parplan.profiles.machines.hardware import Cluster, Link, Tier
from parplan.profiles.machines.machine_catalog import (
    cluster_document,
    load_cluster,
    packaged_cluster,
    with_gpus,
)
from parplan.profiles.units import GB

HEADER = """\
# A cluster file, for plan --cluster {path}.
# `plan init --check {path}` looks for gaps and for unlikely figures.
# GiB are 2**30 bytes, GB 10**9 bytes. Bandwidths are GB/s in one direction: a NIC of 400 Gbit/s
# has 50.
"""
_WIDTH = 100
BITS = 8
PCIE_LATENCY_S = 2.5e-6
NETWORKS = {"infiniband": "ib", "roce": "roce", "efa": "efa", "omni-path": "omni-path"}
RATES = {100: "edr", 200: "hdr", 400: "ndr", 800: "xdr"}  # InfiniBand's names of Gbit/s of 4 lanes


@dataclass(frozen=True, slots=True)
class Draft:
    """A cluster, and a comment for each of its keys of which something is to be said."""

    cluster: Cluster
    comments: Mapping[str, str]


def draft_of(facts: Mapping[str, Fact], name: str) -> Draft:
    """Returns the draft of a cluster file named `name`. Raises ConfigError for a GPU unknown."""
    if "gpu" not in facts:
        raise ConfigError(
            "no GPU was found and none was named",
            hint="name it: --gpu h100-80gb; `plan clusters` lists them",
        )
    gpu = str(facts["gpu"].value)
    if facts["gpu"].origin.startswith(FOUND) and packaged_cluster(gpu) is None:
        raise ConfigError(
            f"plan clusters has no machine with {gpu}, {facts['gpu'].origin}",
            hint="name a like one with --gpu and change its figures in the file",
        )
    base = load_cluster(gpu, what="GPU")
    known = {key: fact.value for key, fact in facts.items()}
    per_node = known.get("gpus_per_node", base.gpus_per_node)
    nodes = known.get("nodes", 1)
    cluster = replace(with_gpus(base, per_node * nodes, per_node), name=name)
    cluster = replace(
        cluster,
        intra_node=_link(cluster, known),
        nics_per_node=known.get("nics", cluster.nics_per_node),
        nic=_nic(cluster.nic, known),
        host_memory_bytes=known.get("host_memory_bytes", cluster.host_memory_bytes),
        hosts_per_node=known.get("hosts_per_node", cluster.hosts_per_node),
        tiers=known.get("tiers", ()),
    )
    return Draft(_with_numa(cluster, known.get("numa_domains")), _comments(facts, base))


def tier(name: str, nodes: int, oversubscription: float, *, rails: bool, source: str) -> Tier:
    """Returns a level of the network; what leaving it adds to the latency is not known."""
    return Tier(
        name=name,
        nodes=nodes,
        oversubscription=oversubscription,
        latency_s=0.0,
        rails=rails,
        source=source,
    )


def _link(cluster: Cluster, known: Mapping[str, Any]) -> Link:
    link = cluster.intra_node
    if known.get("joined_gpus") == 1 and link.name.startswith("nvlink"):
        link = Link(
            name="pcie",
            bytes_per_s=cluster.pcie_bytes_per_s,
            latency_s=PCIE_LATENCY_S,
            source="nvidia-smi topo -m shows no NVLink: the lane of a GPU to its host, with peer "
            "access assumed; latency: ring, LL128 over PCI, in NCCL's tuning table",
        )
    if "link_gb_per_s" not in known:
        return link
    return replace(
        link, bytes_per_s=known["link_gb_per_s"] * GB, source="given; latency of the catalogue"
    )


def _nic(nic: Link, known: Mapping[str, Any]) -> Link:
    """Returns the NIC of the facts, named by its network and rate where these are known."""
    gbit_per_s = known.get("nic_gbit_per_s")
    network = known.get("network")
    if gbit_per_s is None and network is None:
        return nic
    rate = round(gbit_per_s or nic.bytes_per_s * BITS / GB, 3)
    kind = NETWORKS.get(network or "", network or nic.name.split("-")[0])
    name = f"ib-{RATES[int(rate)]}" if kind == "ib" and int(rate) in RATES else kind
    return replace(
        nic,
        name=name,
        bytes_per_s=rate * GB / BITS,
        source=f"{rate:g} Gbit/s; latency of the catalogue",
    )


def _with_numa(cluster: Cluster, domains: int | None) -> Cluster:
    if not domains:
        return cluster
    gpus = max(1, cluster.gpus_per_node // domains)
    return replace(cluster, numa_domains=domains, gpus_per_numa=gpus)


def _comments(facts: Mapping[str, Fact], base: Cluster) -> dict[str, str]:
    usual = f"of {base.name} in plan clusters"
    comments = {place: f"{usual}: check it" for name, place in PLACES.items() if name != "tiers"}
    comments["device"] = comments["node.link"] = usual
    comments["nodes"] = "not given: change it, or say --gpus"
    comments["levels"] = "assumed to have no bottleneck above the nodes"
    for name, fact in facts.items():
        if name in PLACES:
            comments[PLACES[name]] = fact.origin
    return comments


def draft_text(draft: Draft, path: str) -> str:
    """Returns the file: every key, with a comment that says where its figure is from."""
    document = cluster_document(draft.cluster)
    lines = list(_lines(document, draft.comments, "", 0))
    if "levels" not in document:
        lines += [
            "# The network above the nodes is taken to have no bottleneck; else state its levels:",
            "# levels:",
            "# - {name: leaf, nodes: 32, rails: true, oversubscription: 1, source: ...}",
            "# - {name: pod, nodes: 128, oversubscription: 2, latency_us: 1.5, source: ...}",
        ]
    return HEADER.format(path=escaped(path)) + "\n".join((*lines, ""))


def _lines(
    body: Mapping[str, Any], comments: Mapping[str, str], place: str, indent: int
) -> Iterator[str]:
    pad = " " * indent
    for key, value in body.items():
        here = f"{place}.{key}".lstrip(".")
        comment = f"  # {escaped(comments[here])}" if here in comments else ""
        if isinstance(value, dict) and key != "peak_tflops":
            yield f"{pad}{key}:{comment}"
            yield from _lines(value, comments, here, indent + 2)
        elif isinstance(value, (list, tuple)):
            yield f"{pad}{key}:{comment}"
            for row in value:
                yield f"{pad}- {yaml_flow(row)}"
        elif isinstance(value, str) and len(value) > _WIDTH // 2:
            yield f"{pad}{key}: >-{comment}"
            yield from textwrap.wrap(
                value,
                _WIDTH,
                initial_indent=f"{pad}  ",
                subsequent_indent=f"{pad}  ",
                break_long_words=False,
                break_on_hyphens=False,
            )
        else:
            yield f"{pad}{key}: {yaml_flow(value)}{comment}"
