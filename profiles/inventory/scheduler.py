"""Parses what Slurm says of a cluster: `sinfo` and `scontrol show topology`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from parplan.profiles.errors import ConfigError
from parplan.profiles.units import MIB

SINFO_FORMAT = "%P %D %G %m"  # partition, nodes, generic resources, memory of a node in MB
_GRES = re.compile(r"gpu:(?:([A-Za-z][\w.-]*):)?(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmPartition:
    """Nodes of a partition that are alike.

    gpu: the scheduler's word for its GPU, empty where it has none
    """

    name: str
    nodes: int
    gpu: str
    gpus_per_node: int
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchLevel:
    """A level of the switches that Slurm knows: how many nodes the largest switch joins."""

    level: int
    nodes: int
    switches: int


def partitions_of_sinfo(text: str) -> tuple[SlurmPartition, ...]:
    """Parses `sinfo -h -o "%P %D %G %m"`; lines without GPUs are left out.

    Lines of one partition with the same nodes are added, since sinfo has one for each state.
    """
    found: dict[tuple[str, str, int, int], int] = {}
    for line in text.splitlines():
        cells = line.split()
        gres = _GRES.search(cells[2]) if len(cells) >= 4 else None
        if gres is None or not cells[1].isdigit():
            continue
        memory = re.match(r"\d+", cells[3])
        key = (
            cells[0].rstrip("*"),
            (gres[1] or "").lower(),
            int(gres[2]),
            int(memory[0]) if memory else 0,
        )
        found[key] = found.get(key, 0) + int(cells[1])
    return tuple(
        SlurmPartition(
            name=name, nodes=nodes, gpu=gpu, gpus_per_node=gpus, memory_bytes=memory * MIB
        )
        for (name, gpu, gpus, memory), nodes in found.items()
    )


def chosen_partition(partitions: tuple[SlurmPartition, ...], name: str | None) -> SlurmPartition:
    """Returns the partition of a name, else the one with the most GPUs. Raises ConfigError."""
    if not partitions:
        raise ConfigError(
            "sinfo shows no node with GPUs",
            hint=f'give the output of: sinfo -h -o "{SINFO_FORMAT}"',
        )
    named = [each for each in partitions if name in (None, each.name)]
    if not named:
        raise ConfigError(
            f"no partition {name} with GPUs",
            hint=f"use one of {', '.join(sorted({each.name for each in partitions}))}",
        )
    return max(named, key=lambda each: each.nodes * each.gpus_per_node)


def levels_of_topology(text: str) -> tuple[SwitchLevel, ...]:
    """Parses `scontrol show topology` of the tree plugin, from the lowest level up."""
    nodes: dict[int, list[int]] = {}
    for line in text.splitlines():
        level = re.search(r"Level=(\d+)", line)
        names = re.search(r"Nodes=(\S+)", line)
        if level and names:
            nodes.setdefault(int(level[1]), []).append(sum(1 for _ in host_names(names[1])))
    return tuple(
        SwitchLevel(level=level, nodes=max(counts), switches=len(counts))
        for level, counts in sorted(nodes.items())
    )


def host_names(hosts: str) -> Iterator[str]:
    """Yields the names of a list of hosts as Slurm writes it, such as `gpu[001-004,007],login1`."""
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\])?", hosts):
        prefix, _, ranges = part.partition("[")
        if not ranges:
            yield prefix
            continue
        for piece in ranges.rstrip("]").split(","):
            first, _, last = piece.partition("-")
            for number in range(int(first), int(last or first) + 1):
                yield f"{prefix}{number:0{len(first)}d}"
