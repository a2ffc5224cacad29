"""Writing a file whole or not at all, and whether that could be done."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from profiles.errors import ConfigError


def write_text(text: str, path: Path, *, hint: str) -> None:
    """Write atomically: a reader sees the old file or the new one, never a part. Raises ConfigError with `hint`."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", text=True)
        temporary = Path(name)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.chmod(0o644)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", hint=hint) from None


def require_writable(path: Path, *, hint: str = "choose another file with --output, or - for stdout") -> None:
    """Raises ConfigError when a file could not be put at `path`: found before the search, not after it."""
    folder = path.parent
    if not folder.is_dir():
        reason = "not a folder" if folder.exists() else "no such folder"
        raise ConfigError(f"cannot write {path}: {folder}: {reason}", hint=hint)
    if path.exists() and not path.is_file():
        raise ConfigError(f"cannot write {path}: {'a folder' if path.is_dir() else 'not a regular file'}", hint=hint)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot write {path}: no permission to write in {folder}", hint=hint)
