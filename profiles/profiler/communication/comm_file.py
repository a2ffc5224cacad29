"""The file that `profiles/profile_comm.py` writes: the machine, and every record."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from parplan.profiles.documents.bounded import Hints
from parplan.profiles.documents.files import write_text
from parplan.profiles.documents.reader import read_yaml
from parplan.profiles.documents.schema import document, parse
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.measurements import Record
from parplan.profiles.profiler.communication.comm_cases import SIZES, TIMED

COMM_VERSION = 1
_FORBID = {"extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CommFile:
    """Records of communication on `nodes` nodes of `ranks_per_node` ranks.

    `date` is the day of the last measurement.
    """

    __pydantic_config__ = _FORBID

    comm_version: int
    date: str
    device: str
    backend: str
    torch: str
    nodes: int
    ranks_per_node: int
    records: tuple[Record, ...]


def write_comm_file(path: Path, comm_file: CommFile) -> None:
    """Writes the file whole or not at all. Raises ConfigError."""
    write_text(
        yaml.safe_dump(document(comm_file), sort_keys=False, width=120),
        path,
        hint="choose another -o",
    )


def read_comm_file(path: Path) -> CommFile:
    """Reads a file of `write_comm_file`.

    Raises ConfigError for a file that is not readable, not YAML, of another version, or with
    unknown or missing keys.
    """
    body = read_yaml(path, hints=Hints(_HINT, _HINT))
    version = body.get("comm_version") if isinstance(body, dict) else None
    if version != COMM_VERSION:
        raise ConfigError(
            f"{path}: comm_version is {version}, this parplan reads {COMM_VERSION}", hint=_HINT
        )
    comm_file = parse(CommFile, body, str(path))
    for index, record in enumerate(comm_file.records):
        _require_timed(record, f"{path}: records.{index}")
    return comm_file


def _require_timed(record: Record, where: str) -> None:
    """Raises ConfigError for a timed collective without group sizes or a positive time."""
    if record.case.work not in TIMED:
        return
    missing = [name for name in SIZES if name not in dict(record.case.sizes)]
    if missing:
        raise ConfigError(f"{where}: {record.case.work} has no size {missing[0]}", hint=_HINT)
    if record.measured is not None and "time" not in record.measured.times:
        raise ConfigError(f"{where}: {record.case.work} was measured and has no time", hint=_HINT)
    if record.measured is not None and record.measured.times["time"].median_us <= 0:
        raise ConfigError(
            f"{where}: {record.case.work} was measured in "
            f"{record.measured.times['time'].median_us} us",
            hint=_HINT,
        )


def in_flight_path(output: Path) -> Path:
    """The path of the note on the case that is being measured."""
    return output.with_name(output.name + ".in-flight")


_HINT = "make one with: torchrun --nproc-per-node 8 -m parplan.profiles.profile_comm -o comm.yaml"
