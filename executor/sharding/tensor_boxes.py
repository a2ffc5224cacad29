"""A rank's elements of a tensor, cut into boxes for torch.distributed.checkpoint.

A run of elements of a matrix is the end of one row, some whole rows and the beginning of another:
at most three boxes, each of which is a view of the run. A rank's part of several matrices in one
tensor is a strip of each. Checkpoints store the boxes like the shards of any tensor, so they are
read whole or in any other parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard


@dataclass(frozen=True, slots=True)
class Box:
    """The offset of a box in a tensor and its shape, by dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


def boxes_of(shape: Sequence[int], first: int, last: int) -> Iterator[Box]:
    """Yields, in order, the fewest boxes with the elements `first` to `last` - 1 of `shape`."""
    if len(shape) == 1:
        yield Box((first,), (last - first,))
        return
    row = math.prod(shape[1:])
    begin, end = -(-first // row), last // row  # the whole rows
    if begin > end:
        yield from _in_row(shape, end, first, last)
        return
    if first < begin * row:
        yield from _in_row(shape, begin - 1, first, begin * row)
    if begin < end:
        yield Box((begin, *(0 for _ in shape[1:])), (end - begin, *shape[1:]))
    if end * row < last:
        yield from _in_row(shape, end, end * row, last)


def _in_row(shape: Sequence[int], index: int, first: int, last: int) -> Iterator[Box]:
    start = index * math.prod(shape[1:])
    for box in boxes_of(shape[1:], first - start, last - start):
        yield Box((index, *box.offset), (1, *box.shape))


class Boxes(Tensor):
    """This rank's elements `flat` of a tensor of `shape`; they lie in `boxes` one after the other.

    `along` is the dim of `flat` along which they lie; None where `flat` is a run of elements. It
    computes nothing. The methods with underscores are torch.distributed.checkpoint's protocol
    for tensors in parts.
    """

    flat: Tensor
    boxes: tuple[Box, ...]
    along: int | None

    def __new__(
        cls, flat: Tensor, shape: Sequence[int], boxes: tuple[Box, ...], along: int | None = None
    ) -> Self:
        wrapper = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, torch.Size(shape), dtype=flat.dtype, device=flat.device
        )
        wrapper.flat, wrapper.boxes = flat, boxes
        wrapper.along = along
        return wrapper  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Boxes:
        """Copies the attributes at `new_empty`, with which a checkpoint's copy begins."""
        if func is not torch.ops.aten.new_empty.default:
            raise NotImplementedError(f"{func} of a part of a tensor")
        return Boxes(args[0].flat, args[1], args[0].boxes, args[0].along)

    def parts(self) -> Iterator[tuple[ChunkStorageMetadata, Tensor]]:
        """Yields the place of each box and a view of it."""
        at = 0
        for box in self.boxes:
            along = self.along
            count = math.prod(box.shape) if along is None else box.shape[along]
            where = ChunkStorageMetadata(
                offsets=torch.Size(box.offset), sizes=torch.Size(box.shape)
            )
            part = self.flat.narrow(along or 0, at, count)
            yield where, part.view(box.shape) if along is None else part
            at += count

    def __create_write_items__(self, fqn: str, object: Tensor) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.flat)
        return [
            WriteItem(
                index=MetadataIndex(fqn, where.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=where, properties=properties, size=object.size()),
            )
            for where, _ in self.parts()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [where for where, _ in self.parts()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(part for where, part in self.parts() if where.offsets == index.offset)


def checkpointed(tensor: Tensor) -> Tensor:
    """The form in which a checkpoint holds a tensor.

    It is the tensor itself, except for several matrices in one DTensor of which every rank has a
    part of each: torch.distributed.checkpoint takes such a part for one box.
    """
    placement = tensor.placements[-1] if isinstance(tensor, DTensor) else None
    if not isinstance(tensor, DTensor) or not isinstance(placement, _StridedShard):
        return tensor
    part, dim = tensor.to_local(), placement.dim
    size = part.shape[dim] // placement.split_factor
    rank = tensor.device_mesh.get_local_rank(tensor.device_mesh.ndim - 1)
    shape = (*part.shape[:dim], size, *part.shape[dim + 1 :])
    matrix = tensor.shape[dim] // placement.split_factor
    boxes = (
        Box(
            tuple(number * matrix + rank * size if d == dim else 0 for d in range(part.ndim)), shape
        )
        for number in range(placement.split_factor)
    )
    return Boxes(part, tensor.shape, tuple(boxes), along=dim)
