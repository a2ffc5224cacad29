"""What nvidia-smi says of a GPU: clocks, power limit, driver, and by what kinds of links GPUs are
joined. Parsers of its text.

A machine without it, or one whose nvidia-smi fails or does not know a field, gives None there; it
never ends a profile.
"""

from __future__ import annotations

import csv
import re
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

WAIT_S = 20.0  # a driver that is not loaded yet takes seconds
_FIELDS = {  # as --query-gpu names them -> the field of an environment
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """How many pairs are joined by a link of that kind: of GPUs, and of a GPU and a NIC."""

    gpus: Mapping[str, int] = field(default_factory=dict)
    nics: Mapping[str, int] = field(default_factory=dict)


def gpu_facts(gpu: str | None) -> dict[str, float | str]:
    """Driver, clocks and power limit of one GPU, by the fields of `Environment`; `gpu`: what
    nvidia-smi knows it by, None: the first.
    """
    which = () if gpu is None else (f"--id={gpu}",)
    return facts_of(
        _said(f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits", *which)
    )


def facts_of(text: str) -> dict[str, float | str]:
    """The first GPU of the answer to such a query; fields that it does not know are left out."""
    rows = list(csv.reader(text.splitlines(), skipinitialspace=True))
    if not rows or len(rows[0]) != len(_FIELDS):
        return {}
    found: dict[str, float | str] = {}
    for name, value in zip(_FIELDS.values(), rows[0], strict=True):
        if name in _TEXTS and not value.startswith("["):
            found[name] = value
        elif re.fullmatch(r"\d+(\.\d+)?", value.strip()):
            found[name] = float(value)
    return found


def links() -> Links:
    """The links of this node."""
    return nvidia_links_of(_said("topo", "-m"))


def nvidia_links_of(text: str) -> Links:
    """The matrix of `nvidia-smi topo -m` reduced to kinds of links: each pair of GPUs, and each GPU
    with each NIC, once.
    """
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
    """Adds one row; of the pairs of GPUs the half right of the diagonal."""
    right = False
    for other, kind in zip(columns, kinds, strict=False):
        if _NIC.fullmatch(other):
            nics[kind] += 1
        elif right and kind != _SELF:
            gpus[kind] += 1
        right = right or other == name


def _said(*arguments: str) -> str:
    """What nvidia-smi prints, nothing where it is missing or fails."""
    try:
        return subprocess.run(
            ("nvidia-smi", *arguments), capture_output=True, text=True, timeout=WAIT_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
