"""A folder of checkpoints: `step-000120` is complete, `step-000120.tmp-...` is not.

The rename to the final name comes last. A checkpoint holds torch.distributed.checkpoint's files
(one per rank, and `.metadata`), the index of their tensors and the manifest, `checkpoint.json`. The
manifest describes the run, the number of steps, and the size and checksum of every file, by which a
damaged copy is detected. Files that the manifest does not name are not read.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    FileSystemReader,
    FileSystemWriter,
    Metadata,
)
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from parplan.executor.checkpoint.index import INDEX, index_document, metadata_of
from parplan.profiles.documents.bounded import MAX_UNPACKED_BYTES, read_bytes
from parplan.profiles.documents.reader import read_json
from parplan.profiles.errors import ConfigError

FORMAT = 2
DOCUMENT = "checkpoint.json"
PARTS = ("model", "training", "mesh", "pipeline", "options")  # mappings that describe a run
READ_BYTES = 1 << 24  # bytes read at a time for a checksum
_NAME = re.compile(r"step-(\d{6,})")

Document = Mapping[str, Any]


def checkpoint_name(step: int) -> str:
    """The name of the folder with the state after `step` optimizer steps."""
    return f"step-{step:06}"


def checkpoint_paths(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, newest first."""
    return sorted(
        (path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)),
        key=checkpoint_step,
        reverse=True,
    )


def checkpoint_step(path: Path) -> int:
    """The number of steps in the name of a checkpoint; -1 for another name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def read_document(path: Path) -> Document:
    """Reads the manifest of a checkpoint.

    Raises ValueError with the reason if the checkpoint is incomplete; checksums are not compared.
    """
    try:
        document: Any = read_json(path / DOCUMENT, DOCUMENT)
    except ConfigError as error:
        raise ValueError(error.message.removeprefix("cannot read ")) from None
    try:
        if document.get("format") != FORMAT:
            raise _OtherFormatError(document.get("format"))
        _require_manifest(document)
        wrong = [
            name
            for name, file in document["files"].items()
            if (path / name).stat().st_size != file["bytes"]
        ]
    except OSError as error:
        raise ValueError(f"{Path(error.filename).name}: {error.strerror}") from None
    except _OtherFormatError:
        raise
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise ValueError(f"{DOCUMENT} is not that of a checkpoint") from None
    if document["step"] != checkpoint_step(path) != -1:
        raise ValueError(
            f"{DOCUMENT} is of step {document['step']}, the folder's name says "
            f"{checkpoint_step(path)}"
        )
    if wrong:
        actual = (path / wrong[0]).stat().st_size
        written = document["files"][wrong[0]]["bytes"]
        raise ValueError(f"{wrong[0]} has {actual} bytes, {written} were written")
    return dict(document)


class _OtherFormatError(ValueError):
    """A checkpoint of another format; without checksums its files may be of different steps."""

    def __init__(self, saved: object) -> None:
        super().__init__(f"its format is {saved}, this parplan reads {FORMAT}, which has checksums")


def _require_manifest(document: Any) -> None:
    """Raises ValueError, KeyError, AttributeError or TypeError for a malformed manifest."""
    for name, file in document["files"].items():
        # A plain file name, so that nothing outside of the folder is read.
        if (
            name in (".", "..", "")
            or Path(name).name != name
            or type(file["bytes"]) is not int
            or type(file["crc32"]) is not str
        ):
            raise ValueError(name)
    if type(document["step"]) is not int or document["step"] < 0 or INDEX not in document["files"]:
        raise ValueError(INDEX)
    for part in PARTS:
        document[part].items()


def find_damage(
    path: Path, document: Document, share: int, num_shares: int, on_read: Callable[[], None]
) -> str:
    """Compares the files of one share of `num_shares` with the manifest; returns "" if they agree.

    The shares are about equal in bytes. `on_read` is called after every part that was read.
    """
    files = document["files"]
    by_size = sorted(files, key=lambda name: (-files[name]["bytes"], name))
    for name in by_size[share::num_shares]:
        try:
            checksum = _checksum_of(path / name, on_read)
        except OSError as error:
            return f"{name}: {error.strerror}"
        if checksum != files[name]["crc32"]:
            return f"{name} has the checksum {checksum}, {files[name]['crc32']} was written"
    return ""


def _checksum_of(path: Path, on_read: Callable[[], None] = lambda: None) -> str:
    checksum = 0
    with path.open("rb") as file:
        while part := file.read(READ_BYTES):
            checksum = zlib.crc32(part, checksum)
            on_read()
    return _text(checksum)


def _text(checksum: int) -> str:
    return f"{checksum:08x}"


def remove_temporaries(folder: Path) -> None:
    """Removes what dead runs left half written or half removed."""
    for path in folder.glob("step-*.tmp-*"):
        shutil.rmtree(path, ignore_errors=True)


def temporary_path(final: Path, label: str) -> Path:
    """The path of a checkpoint while it is incomplete or being removed."""
    return final.with_name(f"{final.name}.tmp-{label}")


class AtomicWriter(FileSystemWriter):
    """Writes into a temporary folder, which one rank renames when all files are on disk.

    It then removes all checkpoints but the `keep` newest. A failure before the rename fails on
    every rank, as torch.distributed.checkpoint does it.
    """

    def __init__(self, final: Path, document: Document, keep: int) -> None:
        super().__init__(temporary_path(final, "new"))
        self.fs = _SummedFiles()
        self.final = final
        self.document = document
        self.keep = keep

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes the files of this rank; each result carries the checksum of its file to rank 0.

        Raises the system's error where there is one, because torch hides it behind its own text.
        """
        try:
            results = super().write_data(plan, planner).wait()
        except RuntimeError as error:
            cause = error.__context__
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            raise cause or error from None
        done: Future[list[WriteResult]] = Future()
        done.set_result(
            [replace(result, storage_data=self._summed(result.storage_data)) for result in results]
        )
        return done

    def _summed(self, info: _StorageInfo) -> _Summed:
        return _Summed(
            info.relative_path,
            info.offset,
            info.length,
            crc32=self.fs.checksums[info.relative_path],
        )

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        checksums = {
            result.storage_data.relative_path: result.storage_data.crc32
            for rank in results
            for result in rank
        }
        super().finish(
            metadata,
            [
                [replace(result, storage_data=result.storage_data.plain) for result in rank]
                for rank in results
            ],
        )
        folder = Path(self.path)
        missing = sorted(name for name in checksums if not (folder / name).exists())
        if missing:
            raise FileNotFoundError(
                f"{missing[0]} is not in {folder}: every node must see the same folder"
            )
        _write_json(index_document(metadata), folder / INDEX, indent=None)
        _write_document(folder, self.document, checksums)
        _replace(folder, self.final)
        for old in checkpoint_paths(self.final.parent)[self.keep :]:
            _remove(old)


@dataclass
class _Summed(_StorageInfo):
    """The place of a tensor, with the checksum of its whole file."""

    crc32: str = ""

    @property
    def plain(self) -> _StorageInfo:
        return _StorageInfo(self.relative_path, self.offset, self.length)


class _SummedFiles(FileSystem):
    """A file system that records the checksum of every file it writes, by name."""

    def __init__(self) -> None:
        self.checksums: dict[str, str] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            summed = _SummedStream(stream)
            yield summed
        self.checksums[Path(path).name] = _text(summed.checksum)


class _SummedStream:
    """A stream that sums the checksum of the bytes written to it, in order."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.checksum = 0

    def write(self, part: Any) -> int:
        self.checksum = zlib.crc32(part, self.checksum)
        return int(self.stream.write(part))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class CheckedReader(FileSystemReader):
    """Reads the tensors of a checkpoint by parplan's index and loads no pickle."""

    def __init__(self, path: Path, document: Document) -> None:
        super().__init__(path)
        self.sizes = {name: file["bytes"] for name, file in document["files"].items()}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            body = read_bytes(Path(self.path) / INDEX, most_bytes=MAX_UNPACKED_BYTES)
            document = json.loads(body)
        except (ConfigError, ValueError, RecursionError):
            raise ValueError(f"{INDEX} is not that of a checkpoint") from None
        metadata = metadata_of(document, self.sizes)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class SafeLoadPlanner(DefaultLoadPlanner):
    """Loads only tensors and plain values; torch's planner would unpickle any object."""

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        set_element(
            self.original_state_dict,
            self.mappings[read_item.dest_index.fqn],
            torch.load(value, weights_only=True),
        )


def _write_document(folder: Path, document: Document, checksums: Mapping[str, str]) -> None:
    """Writes the manifest, the last file.

    Files missing in `checksums` are small and were written by this process.
    """
    files = {
        path.name: {
            "bytes": path.stat().st_size,
            "crc32": checksums.get(path.name) or _checksum_of(path),
        }
        for path in sorted(folder.iterdir())
    }
    _write_json({"format": FORMAT, **document, "files": files}, folder / DOCUMENT, indent=1)
    _sync(folder)


def _write_json(document: Document, path: Path, *, indent: int | None) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(document, file, indent=indent)
        file.flush()
        os.fsync(file.fileno())


def _replace(folder: Path, final: Path) -> None:
    """Gives `folder` its final name and removes a checkpoint that already has it.

    Such a checkpoint was incomplete, or the run did not resume from it.
    """
    if final.exists():
        _remove(final)
    folder.rename(final)
    _sync(final.parent)


def _remove(path: Path) -> None:
    """Removes a checkpoint; if killed, it leaves only a temporary folder."""
    doomed = temporary_path(path, "old")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Makes renames in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
