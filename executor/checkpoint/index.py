"""The index of a checkpoint, as JSON: its tensors, and the place of each part in its files.

    {"model.block0.qkv.weight": {"dtype": "float32", "shape": [96, 32], "parts": [
        {"offset": [0, 0], "shape": [48, 32], "file": "__0_0.distcp", "start": 0, "bytes": 7361}]},
     "an.object": {"file": "__0_0.distcp", "start": 7361, "bytes": 512}}

torch.distributed.checkpoint writes the same as a pickle, `.metadata`. Loading a pickle can run any
code that it names, so parplan never reads it; it serves torch's tools.
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
    """Returns the index of a written checkpoint with this `metadata`."""
    return {
        name: _entry(name, entry, metadata.storage_data)
        for name, entry in metadata.state_dict_metadata.items()
    }


def _entry(
    name: str, entry: TensorStorageMetadata | BytesStorageMetadata, places: Places
) -> dict[str, Any]:
    if isinstance(entry, BytesStorageMetadata):
        return _place(places[MetadataIndex(name)])
    parts = [
        {
            "offset": list(part.offsets),
            "shape": list(part.sizes),
            **_place(places[MetadataIndex(name, part.offsets)]),
        }
        for part in entry.chunks
    ]
    return {
        "dtype": str(entry.properties.dtype).removeprefix("torch."),
        "shape": list(entry.size),
        "parts": parts,
    }


def _place(info: _StorageInfo) -> dict[str, Any]:
    return {"file": info.relative_path, "start": info.offset, "bytes": info.length}


def metadata_of(document: Any, sizes: Mapping[str, int]) -> Metadata:
    """Returns the metadata of an index for torch.distributed.checkpoint.

    `sizes` are the bytes of the checkpoint's files. Raises ValueError for a document that is not an
    index of parts inside those files.
    """
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: Places = {}
    try:
        for name, entry in document.items():
            if "parts" not in entry:
                tensors[name] = BytesStorageMetadata()
                places[MetadataIndex(name)] = _info(entry, sizes)
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


def _size(lengths: Any, inside: torch.Size | None = None) -> torch.Size:
    """Checks a list of lengths, or of offsets inside a tensor. Raises ValueError."""
    if not all(type(length) is int and 0 <= length < 2**63 for length in lengths):
        raise ValueError(lengths)
    if inside is not None and (
        len(lengths) != len(inside) or any(a > b for a, b in zip(lengths, inside, strict=True))
    ):
        raise ValueError(lengths)
    return torch.Size(lengths)


def _info(entry: Mapping[str, Any], sizes: Mapping[str, int]) -> _StorageInfo:
    file = entry["file"]
    start = entry["start"]
    num_bytes = entry["bytes"]
    _size([start, num_bytes])
    if start + num_bytes > sizes[file]:
        raise ValueError(file)
    return _StorageInfo(file, start, num_bytes)
