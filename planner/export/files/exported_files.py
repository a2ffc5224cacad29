"""Writes the files of an export, whole or not at all, and never over somebody else's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from parplan.planner.export.files.head import MARK
from parplan.profiles.documents.bounded import Hints, start_of
from parplan.profiles.documents.files import require_writable, write_results
from parplan.profiles.errors import ConfigError

_HEAD_BYTES = 4000


def write_files(files: Mapping[str, str], folder: Path, *, force: bool) -> dict[Path, Path | None]:
    """Writes the files into a folder, and returns their paths with those of older files.

    An older file that differs is kept under a name of its own, as `write_result` does.
    force    replace files that no plan was exported to
    Raises ConfigError for such a file, and where a file cannot be written: then none is.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make {folder}: {error.strerror}", hint="choose another folder with -o"
        ) from None
    paths = {folder / name: text for name, text in files.items()}
    for path in paths:
        require_writable(path, hint="choose another folder with -o")
        if path.exists() and not force and MARK not in _start_of(path):
            raise ConfigError(
                f"{path} is there, and no plan was exported to it",
                hint="choose another folder with -o, or replace it with --force",
            )
    return write_results(paths, hint="choose another folder with -o")


def _start_of(path: Path) -> str:
    """Returns the first characters of a file. Raises ConfigError where it is not readable."""
    start = start_of(path, _HEAD_BYTES, Hints("choose another folder with -o"))
    return start.decode("utf-8", errors="replace")
