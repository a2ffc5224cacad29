"""Parses what Slurm says of a cluster: `sinfo` and `scontrol show topology`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from parplan.profiles.documents.bounded import MAX_LINE, lines_of
from parplan.profiles.documents.numbers import whole, whole_of
from parplan.profiles.documents.ranges import BYTES, DEVICES, RANKS, Range
from parplan.profiles.errors import ConfigError, shortened
from parplan.profiles.units import MIB

SINFO_FORMAT = "%P %D %G %m"  # partition, nodes, generic resources, memory of a node in MB
# gpu[:type][:no_consume]:count, of which %G has one after another
_GRES = re.compile(r"(?:gres/)?gpu:(?:([\w.-]{1,80}):)??(?:no_consume:)?([0-9]{1,7})(?![\w.-])")
_SLICE = re.compile(r"[0-9]g\.[0-9]{1,3}gb")  # a type of MIG, such as 1g.5gb or a100_3g.20gb
_COLUMNS = 4  # of SINFO_FORMAT
_TOPOLOGY = "scontrol show topology"
MOST_HOSTS = 1_000_000


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

    Lines of one partition with the same nodes are added, since sinfo has one for each state. Slices
    of a GPU, which MIG makes, are no GPUs that train one model together.
    """
    found: dict[tuple[str, str, int, int], int] = {}
    for line in lines_of(text, "sinfo"):
        cells = line[:MAX_LINE].split()
        if len(cells) < _COLUMNS:
            continue
        gpus = next(_whole_gpus(cells[2]), None)
        nodes = whole_of(cells[1], DEVICES)
        if gpus is None or nodes is None:
            continue
        memory = whole_of(cells[3].rstrip("+"), BYTES) or 0
        key = (cells[0].rstrip("*"), *gpus, memory)
        found[key] = found.get(key, 0) + nodes
    return tuple(
        SlurmPartition(
            name=name, nodes=nodes, gpu=gpu, gpus_per_node=gpus, memory_bytes=memory * MIB
        )
        for (name, gpu, gpus, memory), nodes in found.items()
    )


def _whole_gpus(resources: str) -> Iterator[tuple[str, int]]:
    """Yields the types of whole GPUs of a node, each with its number."""
    for match in _GRES.finditer(resources):
        kind, count = (match[1] or "").lower(), int(match[2])
        if count and not _SLICE.search(kind):
            yield kind, count


def chosen_partition(partitions: tuple[SlurmPartition, ...], name: str | None) -> SlurmPartition:
    """Returns the partition of a name, else the one with the most GPUs. Raises ConfigError."""
    if not partitions:
        raise ConfigError(
            "sinfo shows no node with whole GPUs",
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
    for line in lines_of(text, _TOPOLOGY):
        words = dict(word.split("=", 1) for word in line.split() if "=" in word)
        level = whole_of(words.get("Level"), Range(0, 100))
        if level is not None and words.get("Nodes"):
            nodes.setdefault(level, []).append(sum(1 for _ in host_names(words["Nodes"])))
    return tuple(
        SwitchLevel(level=level, nodes=max(counts), switches=len(counts))
        for level, counts in sorted(nodes.items())
    )


def host_names(hosts: str) -> Iterator[str]:
    """Yields the names of a list of hosts as Slurm writes it, such as `gpu[001-004,007],login1`.

    Raises ConfigError for a range that is none, and for more names than a cluster has.
    """
    left = MOST_HOSTS
    for part in re.findall(r"[^,\[]+(?:\[[^\[\]]*\])?", hosts):
        prefix, _, ranges = part.partition("[")
        if not ranges:
            yield prefix
            continue
        for piece in ranges.rstrip("]").split(","):
            first, _, last = piece.partition("-")
            what = f"a host of {shortened(hosts)}"
            begin = whole(first, what, _TOPOLOGY, RANKS)
            end = whole(last or first, what, _TOPOLOGY, RANKS)
            left -= max(0, end - begin + 1)
            if left < 0:
                raise ConfigError(
                    f"{shortened(hosts)} names more than {MOST_HOSTS:,} hosts",
                    hint=f"give the output of: {_TOPOLOGY}",
                )
            for number in range(begin, end + 1):
                yield f"{prefix}{number:0{len(first)}d}"
