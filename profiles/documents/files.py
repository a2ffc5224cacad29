"""Files that are written whole or not at all, and errors that name the file."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import IO

from parplan.profiles.documents.bounded import fingerprint_of
from parplan.profiles.errors import ConfigError
from parplan.profiles.interrupts import deferred_signals

_DIGITS = 64  # hexadecimal digits of a SHA-256
_WRITTEN: ContextVar[list[Path] | None] = ContextVar("written", default=None)


@contextmanager
def noting_written() -> Iterator[list[Path]]:
    """Yields a list of the files that the block has written so far, for an early end of it."""
    written: list[Path] = []
    token = _WRITTEN.set(written)
    try:
        yield written
    finally:
        _WRITTEN.reset(token)


@contextmanager
def open_replacement(path: Path, *, hint: str) -> Iterator[IO[bytes]]:
    """Yields a binary file that takes the place of `path` once it is whole.

    A reader sees the old file or the new one, never a part. A symbolic link stays, and the file
    that it points to is replaced. A new file gets the mode that the umask leaves, a file that is
    replaced keeps its mode. A failure leaves the old file and nothing beside it. Raises ConfigError
    with `hint`.
    """
    with ExitStack() as undo, _explained(path, hint):
        target = _target(path)
        with _staged(target, undo) as (file, temporary):
            yield file
        with deferred_signals():
            os.replace(temporary, target)
            _note(path)


def write_text(text: str, path: Path, *, hint: str) -> None:
    """Writes UTF-8 text as `open_replacement` does. Raises ConfigError with `hint`."""
    with open_replacement(path, hint=hint) as file:
        file.write(text.encode("utf-8"))


def write_result(result: str | bytes, path: Path, *, hint: str) -> Path | None:
    """Writes the one file of a result as `write_results` does.

    Returns the name that keeps an older file, None where there was none. Raises ConfigError.
    """
    return write_results({path: result}, hint=hint)[path]


def write_results(results: Mapping[Path, str | bytes], *, hint: str) -> dict[Path, Path | None]:
    """Writes the files of a result as `open_replacement` does, all of them or none.

    An older file of one of these names is not lost: if it has other bytes, it is kept beside, as
    `plan.yaml.1` beside `plan.yaml`, under the first number that is free or has these bytes. Ctrl-C
    comes before the first file is in its place or after the last one. A failure leaves all old
    files and nothing beside them.

    Returns the names that keep older files, None where there was none. Raises ConfigError with
    `hint`.
    """
    kept = {}
    with ExitStack() as undo:
        whole = {}
        for path, result in results.items():
            data = result.encode("utf-8") if isinstance(result, str) else result
            with _explained(path, hint):
                target = _target(path)
                with _staged(target, undo) as (file, temporary):
                    file.write(data)
            whole[path] = target, temporary, data
        with deferred_signals():
            for path, (target, temporary, data) in whole.items():
                kept[path] = _kept_beside(path, target, data, undo, hint)
                with _explained(path, hint):
                    os.replace(temporary, target)
            undo.pop_all()
            _note(*results)
    return kept


@contextmanager
def only_writer(path: Path, *, hint: str) -> Iterator[None]:
    """Runs the block while no other process is in such a block for a file of the same folder.

    A file that is read, changed and replaced loses no change of another command then. A file system
    without locks lets all of them go on. Raises ConfigError with `hint`.
    """
    with _explained(path, hint):
        handle = os.open(_target(path).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def _staged(target: Path, undo: ExitStack) -> Iterator[tuple[IO[bytes], Path]]:
    """Yields a temporary file beside `target`, which is on the disk at the end, and its path.

    `undo` removes it unless it was renamed. Raises OSError.
    """
    # a short name, since the name of `target` may be as long as allowed
    temporary = target.with_name(f".parplan-{os.getpid()}-{os.urandom(4).hex()}")
    undo.callback(temporary.unlink, missing_ok=True)
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    with open(handle, "wb") as file:
        if target.exists():
            os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
        yield file, temporary
        file.flush()
        os.fsync(file.fileno())


def _kept_beside(path: Path, target: Path, data: bytes, undo: ExitStack, hint: str) -> Path | None:
    """Gives the file that `path` names a second name unless it has these bytes.

    `undo` puts the file back to its first name, and removes a file where there was none. Raises
    ConfigError.
    """
    if not target.is_file():
        undo.callback(target.unlink, missing_ok=True)
        return None
    try:
        old = _fingerprint(target)
        if old == hashlib.sha256(data).hexdigest():
            return None
        for number in count(1):
            kept = target.with_name(f"{target.name}.{number}")
            if kept.is_file() and _fingerprint(kept) == old:
                undo.callback(_give_back, kept, target)
                break
            if not os.path.lexists(kept):
                undo.callback(_restore, kept, target, old)
                shutil.copy2(target, kept)
                break
    except OSError as error:
        reason = f"the file there cannot be kept: {error.strerror}"
        raise _unwritable(path, reason, hint) from None
    except ConfigError as error:
        reason = f"the file there cannot be kept: {error.message}"
        raise _unwritable(path, reason, hint) from None
    return kept if path.is_symlink() else path.with_name(kept.name)


def _fingerprint(path: Path) -> str:
    """Returns the SHA-256 of a file of any size, which is read in parts. Raises ConfigError."""
    return fingerprint_of(path, _DIGITS)


def _restore(kept: Path, target: Path, old: str) -> None:
    """Puts a file back under its first name, and keeps the second where the disk lets it not.

    old: the file's fingerprint, which tells a whole copy from a part of one
    """
    with suppress(OSError, ConfigError):
        if _fingerprint(kept) == old:
            os.replace(kept, target)
    with suppress(OSError, ConfigError):
        if _fingerprint(target) == old:
            kept.unlink(missing_ok=True)


def _give_back(kept: Path, target: Path) -> None:
    """Puts a file that another name keeps back under its first name, if the disk lets it."""
    again = target.with_name(f".parplan-{os.getpid()}-{os.urandom(4).hex()}")
    with suppress(OSError):
        os.link(kept, again)
        os.replace(again, target)


def _note(*paths: Path) -> None:
    """Notes files that are written by the names that the user knows."""
    written = _WRITTEN.get()
    if written is not None:
        written += paths


@contextmanager
def _explained(path: Path, hint: str) -> Iterator[None]:
    """Turns an OSError of the block into the ConfigError that `path` cannot be written."""
    try:
        yield
    except OSError as error:
        raise _unwritable(path, error.strerror or str(error), hint) from None


def changed_on(path: Path) -> str:
    """Returns the day of a file's last change (UTC), such as 2026-11-23."""
    return datetime.fromtimestamp(path.stat().st_mtime, UTC).date().isoformat()


def require_writable(
    path: Path, *, hint: str = "choose another file with --output, or - for stdout"
) -> None:
    """Raises ConfigError when a file could not be put at `path`.

    A command calls it before its search, so that a wrong path costs no search.
    """
    try:
        target = _target(path)
        folder = target.parent
        if not folder.is_dir():
            shown = folder if path.is_symlink() else path.parent
            raise _unwritable(
                path, f"{shown}: {'not a folder' if folder.exists() else 'no such folder'}", hint
            )
        if not os.access(folder, os.W_OK | os.X_OK):
            raise _unwritable(path, f"no permission to write in {folder}", hint)
    except OSError as error:
        raise _unwritable(path, error.strerror or str(error), hint) from None


def require_regular(path: Path, *, hint: str) -> None:
    """Raises ConfigError unless a regular file, neither pipe nor device, is at `path`."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", hint=hint) from None
    if not stat.S_ISREG(mode):
        raise ConfigError(f"cannot read {path}: {_kind(mode)}", hint=hint)


@contextmanager
def explained_file_errors() -> Iterator[None]:
    """Turns an OSError that names a file into a ConfigError.

    Such an error is about the machine's files and no bug of the program.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        raise ConfigError(
            f"{os.fsdecode(error.filename)}: {error.strerror}", hint="check that path"
        ) from None


def _target(path: Path) -> Path:
    """Returns the file behind all links of `path`.

    Raises OSError: a folder or a device is there, or the name cannot be that of a file.
    """
    target = Path(os.path.realpath(path))
    try:
        mode = target.stat().st_mode
    # a new file, or one in a folder that does not exist, which opening it reports
    except (FileNotFoundError, NotADirectoryError):
        return target
    if not stat.S_ISREG(mode):
        raise OSError(None, _kind(mode))
    return target


def _kind(mode: int) -> str:
    return "a folder" if stat.S_ISDIR(mode) else "not a regular file"


def _unwritable(path: Path, reason: str, hint: str) -> ConfigError:
    return ConfigError(f"cannot write {path}: {reason}", hint=hint)
