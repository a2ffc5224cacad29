"""The index of a checkpoint: which tensors it holds and where each part lies in its files, as JSON.

    {"model.block0.qkv.weight": {"dtype": "float32", "shape": [96, 32], "parts": [{"offset": [0, 0],
    "shape": [48, 32],
                                                                                   "file":
                                                                                   "__0_0.distcp",
                                                                                   "start": 0,
                                                                                   "bytes": 7361}]},
     "an.object": {"file": "__0_0.distcp", "start": 7361, "bytes": 512}}

torch.distributed.checkpoint writes the same as a pickle, `.metadata`. Reading a pickle runs what it
names, so it is never read here; it is there for torch's own tools.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

INDEX = "index.json"
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}

Places = dict[MetadataIndex, _StorageInfo]


def index_document(metadata: Metadata) -> dict[str, Any]:
    """What `metadata`, of a checkpoint that is written, says of every name."""
    return {
        name: _entry(name, found, metadata.storage_data)
        for name, found in metadata.state_dict_metadata.items()
    }


def _entry(
    name: str, found: TensorStorageMetadata | BytesStorageMetadata, places: Places
) -> dict[str, Any]:
    if isinstance(found, BytesStorageMetadata):
        return _place(places[MetadataIndex(name)])
    parts = [
        {
            "offset": list(part.offsets),
            "shape": list(part.sizes),
            **_place(places[MetadataIndex(name, part.offsets)]),
        }
        for part in found.chunks
    ]
    return {
        "dtype": str(found.properties.dtype).removeprefix("torch."),
        "shape": list(found.size),
        "parts": parts,
    }


def _place(info: _StorageInfo) -> dict[str, Any]:
    return {"file": info.relative_path, "start": info.offset, "bytes": info.length}


def metadata_of(document: Any, sizes: Mapping[str, int]) -> Metadata:
    """What torch.distributed.checkpoint needs to know of an index; `sizes` are the bytes of the
    checkpoint's files.

    Raises ValueError for what is not an index of parts inside of those files.
    """
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: Places = {}
    try:
        for name, entry in document.items():
            if "parts" not in entry:
                tensors[name], places[MetadataIndex(name)] = (
                    BytesStorageMetadata(),
                    _info(entry, sizes),
                )
                continue
            shape = _size(entry["shape"])
            chunks = [
                ChunkStorageMetadata(_size(part["offset"], shape), _size(part["shape"], shape))
                for part in entry["parts"]
            ]
            tensors[name] = TensorStorageMetadata(
                TensorProperties(dtype=_DTYPES[entry["dtype"]]), shape, chunks
            )
            for chunk, part in zip(chunks, entry["parts"], strict=True):
                places[MetadataIndex(name, chunk.offsets)] = _info(part, sizes)
    except (KeyError, TypeError, AttributeError, ValueError):
        raise ValueError(f"{INDEX} is not that of a checkpoint") from None
    return Metadata(state_dict_metadata=tensors, storage_data=places)  # type: ignore[arg-type]


def _size(found: Any, inside: torch.Size | None = None) -> torch.Size:
    """A list of lengths, or of places inside of a tensor. Raises ValueError."""
    if not all(type(length) is int and 0 <= length < 2**63 for length in found):
        raise ValueError(found)
    if inside is not None and (
        len(found) != len(inside) or any(a > b for a, b in zip(found, inside, strict=True))
    ):
        raise ValueError(found)
    return torch.Size(found)


def _info(entry: Mapping[str, Any], sizes: Mapping[str, int]) -> _StorageInfo:
    file, start, num_bytes = entry["file"], entry["start"], entry["bytes"]
    _size([start, num_bytes])
    if start + num_bytes > sizes[file]:
        raise ValueError(file)
    return _StorageInfo(file, start, num_bytes)
