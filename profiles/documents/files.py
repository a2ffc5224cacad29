"""Files that are written whole or not at all, and errors that name the file."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import IO

from parplan.profiles.errors import ConfigError


@contextmanager
def open_replacement(path: Path, *, hint: str) -> Iterator[IO[bytes]]:
    """Yields a binary file that takes the place of `path` once it is whole.

    A reader sees the old file or the new one, never a part. A symbolic link stays, and the file
    that it points to is replaced. A new file gets the mode that the umask leaves, a file that is
    replaced keeps its mode. A failure leaves the old file and nothing beside it. Raises ConfigError
    with `hint`.
    """
    try:
        target = _target(path)
        # a short name, since the name of `path` may be as long as allowed
        temporary = target.with_name(f".parplan-{os.getpid()}-{os.urandom(4).hex()}")
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with _removed_at_the_end(temporary, handle) as file:
            if target.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
            yield file
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(target)
    except OSError as error:
        raise _unwritable(path, error.strerror or str(error), hint) from None


def write_text(text: str, path: Path, *, hint: str) -> None:
    """Writes UTF-8 text as `open_replacement` does. Raises ConfigError with `hint`."""
    with open_replacement(path, hint=hint) as file:
        file.write(text.encode("utf-8"))


def write_result(result: str | bytes, path: Path, *, hint: str) -> Path | None:
    """Writes a result of a command as `write_text` does; an older file of that name is not lost.

    An older file with other bytes is kept beside it, as `plan.yaml.1` beside `plan.yaml`, under the
    first number that is free or has these bytes. A failure leaves the old file and nothing beside
    it. Returns the name that keeps it, None where there was none. Raises ConfigError with `hint`.
    """
    data = result.encode("utf-8") if isinstance(result, str) else result
    with ExitStack() as undo:
        try:
            kept = _kept_beside(path, data, undo)
        except OSError as error:
            reason = f"the file there cannot be kept: {error.strerror}"
            raise _unwritable(path, reason, hint) from None
        with open_replacement(path, hint=hint) as file:
            file.write(data)
        undo.pop_all()
    return kept


def _kept_beside(path: Path, data: bytes, undo: ExitStack) -> Path | None:
    """Gives the file at `path` a second name unless it has these bytes. Raises OSError.

    `undo` removes that name if it is new.
    """
    target = Path(os.path.realpath(path))
    if not target.is_file():
        return None
    old = target.read_bytes()
    if old == data:
        return None
    for number in count(1):
        kept = target.with_name(f"{target.name}.{number}")
        if kept.is_file() and kept.read_bytes() == old:
            break
        if not os.path.lexists(kept):
            undo.callback(kept.unlink, missing_ok=True)
            shutil.copy2(target, kept)
            break
    return kept if path.is_symlink() else path.with_name(kept.name)


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


@contextmanager
def _removed_at_the_end(temporary: Path, handle: int) -> Iterator[IO[bytes]]:
    """Yields the open file of `handle`; removes `temporary` unless it was renamed."""
    try:
        with open(handle, "wb") as file:
            yield file
    finally:
        temporary.unlink(missing_ok=True)


def _unwritable(path: Path, reason: str, hint: str) -> ConfigError:
    return ConfigError(f"cannot write {path}: {reason}", hint=hint)
