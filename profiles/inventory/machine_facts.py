"""Facts about a machine before it has a cluster file: a value for each name, and its origin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FOUND = "found by"  # begins the origin of what a tool shows
# name of a fact -> its place in the cluster file
PLACES: Mapping[str, str] = {
    "gpu": "device",
    "nodes": "nodes",
    "gpus_per_node": "node.gpus",
    "hosts_per_node": "node.hosts",
    "joined_gpus": "node.link",
    "link_gb_per_s": "node.link.gb_per_s",
    "nics": "node.nics",
    "nic_gbit_per_s": "node.nic.gb_per_s",
    "network": "node.nic.name",
    "host_memory_bytes": "node.host_memory_gib",
    "numa_domains": "node.numa_domains",
    "tiers": "levels",
}


@dataclass(frozen=True, slots=True)
class Fact:
    """A value and the words that say where it is from."""

    value: Any
    origin: str


def merged(*sources: Mapping[str, Fact]) -> dict[str, Fact]:
    """Returns the facts of several sources, of each name that of the first source that has it."""
    facts: dict[str, Fact] = {}
    for source in sources:
        for name, fact in source.items():
            facts.setdefault(name, fact)
    return facts
