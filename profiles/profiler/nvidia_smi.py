"""Reads clocks, power limit, driver and link kinds of GPUs from nvidia-smi.

A missing or failing nvidia-smi, or an unknown field, gives None; it never ends a profile.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from parplan.profiles.documents.numbers import real_of
from parplan.profiles.documents.ranges import Range
from parplan.profiles.documents.tables import rows_of

WAIT_S = 20.0  # a driver that is not loaded yet takes seconds
_FIELDS = {  # name in --query-gpu -> field of an environment
    "driver_version": "driver",
    "clocks.sm": "sm_clock_mhz",
    "clocks.max.sm": "max_sm_clock_mhz",
    "clocks.mem": "memory_clock_mhz",
    "clocks.max.mem": "max_memory_clock_mhz",
    "power.limit": "power_limit_w",
}
_TEXTS = ("driver",)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # newer versions underline the heading of the matrix
_GPU, _NIC = re.compile(r"GPU\d+"), re.compile(r"NIC\d+|mlx\d+_\d+")
_SELF = "X"
NOT_NEGATIVE = Range(0, 1e30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The number of pairs joined by each kind of link, of GPUs and of a GPU and a NIC."""

    gpus: Mapping[str, int] = field(default_factory=dict)
    nics: Mapping[str, int] = field(default_factory=dict)


def gpu_facts(gpu: str | None) -> dict[str, float | str]:
    """Returns driver, clocks and power limit of one GPU, by the fields of `Environment`.

    `gpu` is nvidia-smi's name for it; None means the first.
    """
    which = () if gpu is None else (f"--id={gpu}",)
    return parse_gpu_facts(
        _said(f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits", *which)
    )


def parse_gpu_facts(text: str) -> dict[str, float | str]:
    """Parses the first GPU of the answer; fields that nvidia-smi does not know are left out."""
    rows = rows_of(text.splitlines(), "nvidia-smi", skips_spaces=True)
    if not rows or len(rows[0]) != len(_FIELDS):
        return {}
    facts: dict[str, float | str] = {}
    for name, value in zip(_FIELDS.values(), rows[0], strict=True):
        if name in _TEXTS and not value.startswith("["):
            facts[name] = value
        elif (number := real_of(value.strip(), NOT_NEGATIVE)) is not None:
            facts[name] = number
    return facts


def node_links() -> Links:
    """The links of this node."""
    return parse_links(_said("topo", "-m"))


def parse_links(text: str) -> Links:
    """Counts each kind of link in the matrix of `nvidia-smi topo -m`, each pair of devices once."""
    lines = [_COLOUR.sub("", line).split() for line in text.splitlines()]
    heading = next((line for line in lines if line and _GPU.fullmatch(line[0])), [])
    columns = [name for name in heading if _GPU.fullmatch(name) or _NIC.fullmatch(name)]
    gpus: Counter[str] = Counter()
    nics: Counter[str] = Counter()
    for line in lines[lines.index(heading) + 1 :] if columns else ():
        if line and _GPU.fullmatch(line[0]):
            _count(columns, line[0], line[1:], gpus, nics)
    return Links(gpus=dict(sorted(gpus.items())), nics=dict(sorted(nics.items())))


def _count(
    columns: Sequence[str], name: str, kinds: Sequence[str], gpus: Counter[str], nics: Counter[str]
) -> None:
    """Adds one row; of the GPU columns only those right of the diagonal."""
    right = False
    for column, kind in zip(columns, kinds, strict=False):
        if _NIC.fullmatch(column):
            nics[kind] += 1
        elif right and kind != _SELF:
            gpus[kind] += 1
        right = right or column == name


def _said(*arguments: str) -> str:
    """The output of nvidia-smi, empty where it is missing or fails."""
    try:
        return subprocess.run(
            ("nvidia-smi", *arguments), capture_output=True, text=True, timeout=WAIT_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
