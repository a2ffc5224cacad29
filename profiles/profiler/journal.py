"""The journal of a running profile: every finished record on disk at once, so that it can resume.

A text file beside the output: a header (what was measured on, and what was requested), then one
line for each finished record: JSON, a tab, and the CRC-32 of the JSON. A line is one write and one
fsync. A crash can tear the last line, which is then cut off; a damaged line in the middle loses
only its record, which is measured again.
"""

from __future__ import annotations

import fcntl
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parplan.profiles.documents.bounded import MAX_BYTES
from parplan.profiles.documents.reader import parse_json
from parplan.profiles.documents.schema import document, parse
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.measurements import Record

JOURNAL_VERSION = 1
_START = b'{"journal_version":'


def journal_path(output: Path) -> Path:
    """The path of the journal of a profile file."""
    return output.with_name(output.name + ".journal")


@dataclass(slots=True, kw_only=True, eq=False)
class Journal:
    """An open journal, locked by this process.

    `records` are by the key of their case; `notes` report dropped lines.
    """

    path: Path
    handle: int
    records: dict[str, Record] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def append(self, record: Record) -> None:
        """Writes the record to disk and replaces an earlier one of its case. Raises ConfigError."""
        _write(self.handle, _line(document(record)), self.path)
        self.records[record.case.key] = record

    def close(self) -> None:
        """Closes the file and leaves it for a later session."""
        if self.handle >= 0:
            os.close(self.handle)
        self.handle = -1

    def delete(self) -> None:
        """Removes the file after its records have been written elsewhere."""
        self.path.unlink(missing_ok=True)
        self.close()


def open_journal(path: Path, request: Mapping[str, Any], *, restart: bool = False) -> Journal:
    """Opens the journal at `path`; starts a new one if there is none or with `restart`.

    `request` describes the conditions of its records (device, versions, precision, ...) in plain
    JSON values, without dates and budgets, because a journal with another request is refused.

    Raises ConfigError for a file that is not readable, not a journal, in use, of another version or
    of another request.
    """
    journal = Journal(path=path, handle=_locked(path))
    try:
        lines = [] if restart else _whole_lines(journal)
        if lines:
            _check_header(lines[0], request, path)
            _read(journal, lines[1:])
        else:
            os.ftruncate(journal.handle, 0)
            _write(
                journal.handle,
                _line({"journal_version": JOURNAL_VERSION, "asked": dict(request)}),
                path,
            )
    except ConfigError:
        journal.close()
        raise
    return journal


def _locked(path: Path) -> int:
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}", hint="choose another -o"
        ) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ConfigError(
            f"{path} is in use: another session measures into it",
            hint="wait for it, or choose another -o",
        ) from None
    except OSError:  # the file system has no locks
        pass
    return handle


def _whole_lines(journal: Journal) -> list[bytes]:
    """Returns its lines and cuts a torn last line off the file. Raises ConfigError."""
    body = _content(journal)
    start = body[: len(_START)]
    if start != _START[: len(start)]:
        raise _no_journal(journal.path)
    *lines, rest = body.split(b"\n")
    if not rest and len(lines) > 1 and _body(lines[-1]) is None:
        rest = lines.pop() + b"\n"
    if rest and lines:
        os.ftruncate(journal.handle, len(body) - len(rest))
        journal.notes.append(
            f"{journal.path}: the last line was torn; what it was of is measured again"
        )
    return lines


def _content(journal: Journal) -> bytes:
    with open(journal.handle, "rb", closefd=False) as file:
        file.seek(0)
        body = file.read(MAX_BYTES + 1)
    if len(body) > MAX_BYTES:
        raise _no_journal(journal.path)
    return body


def _check_header(line: bytes, request: Mapping[str, Any], path: Path) -> None:
    header = _body(line)
    if not isinstance(header, dict) or not isinstance(header.get("asked", {}), dict):
        raise _no_journal(path)
    version = header.get("journal_version")
    if version != JOURNAL_VERSION:
        raise ConfigError(
            f"{path}: journal_version is {version}, this parplan reads {JOURNAL_VERSION}",
            hint=_again(),
        )
    before = header.get("asked", {})
    now = json.loads(json.dumps(dict(request)))
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            raise ConfigError(
                f"{path}: what it holds was measured for {name} {before.get(name)}, asked is "
                f"{now.get(name)}",
                hint=_again(),
            )


def _again() -> str:
    return "measure anew with --restart, or choose another -o"


def _no_journal(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} is not a journal of plan profile, or its first line is damaged", hint=_again()
    )


def _read(journal: Journal, lines: list[bytes]) -> None:
    for number, line in enumerate(lines, start=2):
        where = f"{journal.path}, line {number}"
        try:
            record = parse(
                Record, _body(line), where
            )  # a damaged line gives None, which is no record
        except ConfigError:
            journal.notes.append(f"{where}: damaged; what it was of is measured again")
        else:
            journal.records[record.case.key] = record


def _line(content: Any) -> bytes:
    body = json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
    return body + f"\t{zlib.crc32(body):08x}\n".encode()


def _body(line: bytes) -> Any:
    """The content of a line, None if it is damaged."""
    body, _, checksum = line.rpartition(b"\t")
    if checksum != f"{zlib.crc32(body):08x}".encode():
        return None
    try:
        return parse_json(body.decode(), "journal")
    except (UnicodeDecodeError, ConfigError):  # another program's line with a checksum
        return None


def _write(handle: int, line: bytes, path: Path) -> None:
    try:
        written = os.write(handle, line)
        os.fsync(handle)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}",
            hint="make room, and run the command again: it goes on",
        ) from None
    if written < len(line):
        raise ConfigError(
            f"cannot write {path}: no room", hint="make room, and run the command again: it goes on"
        )
