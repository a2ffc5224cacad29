"""The formats of other planners' profile files, one row each, and the reader that tells them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parplan.profiles.documents.bounded import Hints, read_text, start_of
from parplan.profiles.documents.files import changed_on
from parplan.profiles.documents.reader import parse_json
from parplan.profiles.documents.tables import table_of
from parplan.profiles.errors import ConfigError
from parplan.profiles.imports.aiconfigurator_table import is_aiconfigurator, read_aiconfigurator
from parplan.profiles.imports.galvatron_hardware import (
    is_galvatron_hardware,
    read_galvatron_hardware,
)
from parplan.profiles.imports.imported import ImportedFile
from parplan.profiles.imports.layer_files import is_layer_file
from parplan.profiles.imports.simumax_system import is_simumax, read_simumax

_PARQUET = b"PAR1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportFormat:
    """One format of JSON: how its documents look, and their reader."""

    name: str
    is_it: Callable[[Any], bool]
    read: Callable[[Any, str, str], ImportedFile]


JSON_FORMATS = (
    ImportFormat(name="SimuMax's system file", is_it=is_simumax, read=read_simumax),
    ImportFormat(
        name="Galvatron's hardware files",
        is_it=is_galvatron_hardware,
        read=read_galvatron_hardware,
    ),
)
NAMES = (*(each.name for each in JSON_FORMATS), "AIConfigurator's tables as CSV")


def read_import(path: Path) -> ImportedFile:
    """Returns the measurements in a file of another planner, dated by the file's last change.

    Raises ConfigError: not readable, of no known format, or without a field that its format has.
    """
    where = str(path)
    _require_text(path)
    text = read_text(path, hints=Hints("check the path", "give the file as its tool wrote it"))
    date = changed_on(path)
    if text.lstrip()[:1] in ("{", "["):
        body = parse_json(text, where)
        found = next((each for each in JSON_FORMATS if each.is_it(body)), None)
        if found is not None:
            return _with_records(found.read(body, where, date), where)
        if is_layer_file(body):
            raise ConfigError(
                f"{where}: it has times of a model's layers, not of a machine",
                hint=f"make factors of it: plan calibrate {path} --plan PLAN",
            )
    else:
        names, rows = table_of(text, where)
        if rows and is_aiconfigurator(list(names)):
            return _with_records(read_aiconfigurator(rows, where, date), where)
    raise ConfigError(
        f"{where}: its format is unknown, known are {', '.join(NAMES)}",
        hint="give the file as its tool wrote it",
    )


def _require_text(path: Path) -> None:
    """Raises ConfigError for a Parquet file, which is no text."""
    if start_of(path, len(_PARQUET), Hints("check the path")) == _PARQUET:
        raise ConfigError(
            f"{path}: it is a Parquet file, needed is CSV text",
            hint="write it as CSV: pandas.read_parquet(FILE).to_csv(CSV, index=False)",
        )


def _with_records(imported: ImportedFile, where: str) -> ImportedFile:
    if not imported.records:
        raise ConfigError(
            f"{where}: no measurement in it has a place in a profile",
            hint="give a file with measured products, attention or collectives",
        )
    return imported
