"""A folder of checkpoints: `step-000120` is complete, for it got that name last; `step-000120.tmp-...` is not.

A checkpoint holds torch.distributed.checkpoint's files (one of each rank, `.metadata`) and `checkpoint.json`: what was
trained, and the size of every file, so that a copy that is not whole is told from one that is.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from profiles.errors import ConfigError
from profiles.reader import read_json

FORMAT = 1
DOCUMENT = "checkpoint.json"
_NAME = re.compile(r"step-(\d{6,})")

Document = Mapping[str, Any]


def checkpoint_name(step: int) -> str:
    """The folder of the state after `step` optimizer steps."""
    return f"step-{step:06}"


def checkpoint_paths(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, the newest first."""
    return sorted((path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)), key=checkpoint_step, reverse=True)


def checkpoint_step(path: Path) -> int:
    """The number of steps in the name of a checkpoint; -1 where there is none."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def read_document(path: Path) -> Document:
    """`checkpoint.json` of a checkpoint. Raises ValueError with what is wrong if the checkpoint is not whole."""
    try:
        document = read_json(path / DOCUMENT, DOCUMENT)
    except ConfigError as error:
        raise ValueError(error.message.removeprefix("cannot read ")) from None
    try:
        wrong = [name for name, n_bytes in document["files"].items() if (path / name).stat().st_size != n_bytes]
    except OSError as error:
        raise ValueError(f"{Path(error.filename).name}: {error.strerror}") from None
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ValueError(f"{DOCUMENT} is not that of a checkpoint") from None
    if document.get("format") != FORMAT:
        raise ValueError(f"its format is {document.get('format')}, this parplan reads {FORMAT}")
    if wrong:
        raise ValueError(f"{wrong[0]} has {(path / wrong[0]).stat().st_size} bytes, {document['files'][wrong[0]]} were written")
    return dict(document)


def remove_temporaries(folder: Path) -> None:
    """Remove what dead runs left half written, or half removed."""
    for path in folder.glob("step-*.tmp-*"):
        shutil.rmtree(path, ignore_errors=True)


def temporary(final: Path, label: str) -> Path:
    """Where a checkpoint lies until it is whole, or while it is removed."""
    return final.with_name(f"{final.name}.tmp-{label}")


class AtomicWriter(FileSystemWriter):
    """Writes into a temporary folder; its last act, on one rank and when the files of all are on disk, is the rename.

    Then it removes all but the `keep` newest. What fails before fails on every rank, as torch.distributed.checkpoint has it.
    """

    def __init__(self, final: Path, document: Document, keep: int) -> None:
        super().__init__(temporary(final, "new"))
        self.final = final
        self.document = document
        self.keep = keep

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """As torch has it, but with the system's error where there is one: torch raises its own text over it."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            found = error.__context__
            while found is not None and not isinstance(found, OSError):
                found = found.__context__
            raise found or error from None

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        folder = Path(self.path)
        names = {result.storage_data.relative_path for rank in results for result in rank}
        missing = sorted(name for name in names if not (folder / name).exists())
        if missing:
            raise FileNotFoundError(f"{missing[0]} is not in {folder}: every node must see the same folder")
        _write_document(folder, self.document)
        _replace(folder, self.final)
        for old in checkpoint_paths(self.final.parent)[self.keep:]:
            _remove(old)


class CheckedReader(FileSystemReader):
    """Compares what it reads with the checksum that is written with every tensor, which torch.load does not."""

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        data = io.BytesIO(super()._slice_file(file, sinfo).read())
        if zipfile.ZipFile(data).testzip() is not None:
            raise ValueError(f"{sinfo.relative_path} is damaged near byte {sinfo.offset}")
        data.seek(0)
        return data


def _write_document(folder: Path, document: Document) -> None:
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    with (folder / DOCUMENT).open("w", encoding="utf-8") as file:
        json.dump({"format": FORMAT, **document, "files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync(folder)


def _replace(folder: Path, final: Path) -> None:
    """Give `folder` its final name; one that has it (it was not whole, or the run did not start from it) makes room."""
    if final.exists():
        _remove(final)
    folder.rename(final)
    _sync(final.parent)


def _remove(path: Path) -> None:
    """Remove a checkpoint; killed meanwhile, it leaves a temporary and not half a checkpoint."""
    doomed = temporary(path, "old")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Make the names in `folder` last."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
