"""Reads Galvatron's hardware files: all-reduce and point-to-point bandwidths, collective times.

    allreduce_bandwidth_<N>nodes_<G>gpus_per_node.json   allreduce_size_<n>_consec_<0|1>: MiB/ms
    p2p_bandwidth_<N>nodes_<G>gpus_per_node.json         pp_size_<n>: MiB/ms
    sp_time_<N>nodes_<G>gpus_per_node.json               <allreduce|all2all>_size_<n>_<k>MB_time: ms

A bandwidth is that of 32 sequences of 512 tokens of width 1,024 in 16 bits, 32 MiB, which is the
default of Galvatron's own programs and not in the file: 2 (n - 1) / n of it in an all-reduce's
time, all of it in a message's. All groups run at once; `consec` is 1 for neighbouring ranks.
Source: PKU-DAIR/Hetu-Galvatron, galvatron/profile_hardware/profile_allreduce.py, profile_p2p.py
and profile_all2all.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parplan.profiles.errors import ConfigError
from parplan.profiles.imports.imported import ImportedFile, collective_record, positive
from parplan.profiles.machines.measurements import Record
from parplan.profiles.profiler.communication.comm_cases import ALL_REDUCE, POINT_TO_POINT
from parplan.profiles.profiler.communication.group_shapes import Shape, World
from parplan.profiles.units import MIB

TOOL = "Galvatron"
PRECISION = "bf16"
TENSOR_MIB = 32  # the default of its programs
_FILE = re.compile(r"(?<![0-9])([1-9][0-9]{0,6})nodes_([1-9][0-9]{0,6})gpus_per_node")
_BANDWIDTH = re.compile(r"allreduce_size_([0-9]{1,7})_consec_([01])")
_MESSAGE = re.compile(r"pp_size_([0-9]{1,7})")
_TIME = re.compile(r"(allreduce|all2all)_size_([0-9]{1,7})_([0-9]{1,7})MB_time")
_WORKS = {"allreduce": ALL_REDUCE, "all2all": "all_to_all"}
_MS = 1e-3


def is_galvatron_hardware(body: Any) -> bool:
    """Returns whether a document has keys of these files alone."""
    patterns = (_BANDWIDTH, _MESSAGE, _TIME)
    return (
        isinstance(body, Mapping)
        and bool(body)
        and all(any(each.fullmatch(str(key)) for each in patterns) for key in body)
    )


def read_galvatron_hardware(body: Any, where: str, date: str) -> ImportedFile:
    """Returns the records of a file, whose name says the machine. Raises ConfigError."""
    named = _FILE.search(Path(where).name)
    if named is None:
        raise ConfigError(
            f"{where}: its name does not say the nodes and the GPUs of each",
            hint="name it as Galvatron does: allreduce_bandwidth_2nodes_8gpus_per_node.json",
        )
    world = World(nodes=int(named[1]), ranks_per_node=int(named[2]))
    records: list[Record] = []
    left_out: list[str] = []
    for key, value in body.items():
        found = _record(key, positive(value, key, where), world, f"{TOOL}, {date}")
        if isinstance(found, str):
            left_out.append(f"{key}: {found}")
        else:
            records.append(found)
    return ImportedFile(
        tool=TOOL,
        records=tuple(records),
        num_devices=world.ranks_per_node,
        left_out=tuple(left_out),
    )


def _record(key: str, value: float, world: World, source: str) -> Record | str:
    """Returns the record of one key, or why it has none."""
    if found := _BANDWIDTH.fullmatch(key):
        ranks = int(found[1])
        shape = _group(ranks, world, neighbours=found[2] == "1")
        seconds = 2 * (ranks - 1) / ranks * TENSOR_MIB / value * _MS
        work, num_bytes = ALL_REDUCE, TENSOR_MIB * MIB
    elif found := _TIME.fullmatch(key):
        shape = _group(int(found[2]), world, neighbours=True)
        seconds = value * _MS
        work, num_bytes = _WORKS[found[1]], int(found[3]) * MIB
    else:
        shape = _pairs(int(key.removeprefix("pp_size_")), world)
        seconds = TENSOR_MIB / value * _MS
        work, num_bytes = POINT_TO_POINT, TENSOR_MIB * MIB
    if isinstance(shape, str):
        return shape
    return collective_record(work, num_bytes, shape, seconds, PRECISION, source)


def _group(ranks: int, world: World, *, neighbours: bool) -> Shape | str:
    local = world.ranks_per_node
    if ranks < 2 or world.num_ranks % ranks:
        return f"groups of {ranks} do not divide {world.num_ranks} ranks"
    if neighbours or ranks == world.num_ranks:
        if ranks <= local:
            return Shape(nodes=1, ranks_per_node=ranks, groups=local // ranks)
        return Shape(nodes=ranks // local, ranks_per_node=local, groups=1)
    if world.nodes == 1:
        return "groups inside a node are priced as neighbours"
    if ranks < world.nodes:
        return Shape(nodes=ranks, ranks_per_node=1, groups=local)
    each = ranks // world.nodes
    return Shape(nodes=world.nodes, ranks_per_node=each, groups=local // each)


def _pairs(stages: int, world: World) -> Shape | str:
    """Returns the messages between two stages, all at once."""
    if stages != 2:
        return "ranks between two others send and receive at once"
    if world.nodes == 1:
        return Shape(nodes=1, ranks_per_node=2, groups=world.ranks_per_node // 2)
    return Shape(nodes=2, ranks_per_node=1, groups=world.ranks_per_node)
