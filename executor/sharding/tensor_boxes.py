"""A rank's elements of a tensor, cut into boxes for torch.distributed.checkpoint.

A run of elements of a matrix is the end of one row, some whole rows and the beginning of another:
at most three boxes, each of which is a view of the run. A rank's part of several matrices in one
tensor is a strip of each, which cuts the boxes further. Checkpoints store the boxes like the shards
of any tensor, so they are read whole or in any other parts.
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
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


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


@dataclass(frozen=True, slots=True)
class Strips:
    """Two orders of a tensor of `matrices` matrices, each of which `ranks` ranks divide.

    Along dim `dim` the user's module, and a checkpoint, has one matrix after the other. A DTensor
    has one rank's part after the other, which is a strip of each matrix.
    """

    dim: int
    matrices: int
    ranks: int

    def by_rank(self, by_matrix: Tensor) -> Tensor:
        """Returns a tensor in the order of the ranks."""
        return self._swapped(by_matrix, self.matrices, self.ranks)

    def by_matrix(self, by_rank: Tensor) -> Tensor:
        """Returns a tensor in the order of the matrices."""
        return self._swapped(by_rank, self.ranks, self.matrices)

    def _swapped(self, x: Tensor, first: int, second: int) -> Tensor:
        strips = x.unflatten(self.dim, (first, second, -1)).transpose(self.dim, self.dim + 1)
        return strips.flatten(self.dim, self.dim + 2)

    def boxes(self, shape: Sequence[int], by_rank: Box) -> Iterator[tuple[int, Box]]:
        """Yields the strips in a box of a tensor of `shape` in the order of the ranks.

        Each has its offset in the box along `dim`, and its box in the order of the matrices.
        """
        size = shape[self.dim] // (self.ranks * self.matrices)
        first, last = by_rank.offset[self.dim], by_rank.offset[self.dim] + by_rank.shape[self.dim]
        at = first
        while at < last:
            strip, skipped = divmod(at, size)
            rank, matrix = divmod(strip, self.matrices)
            count = min(last - at, size - skipped)
            where = (matrix * self.ranks + rank) * size + skipped
            yield (
                at - first,
                Box(_with(by_rank.offset, self.dim, where), _with(by_rank.shape, self.dim, count)),
            )
            at += count


def _with(sizes: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*sizes[:dim], size, *sizes[dim + 1 :])


class Boxes(Tensor):
    """This rank's elements `flat` of a tensor of `shape`; they lie in `boxes` one after the other.

    With `strips` the boxes are in the order of the ranks. It computes nothing. The methods with
    underscores are torch.distributed.checkpoint's protocol for tensors in parts.
    """

    flat: Tensor
    boxes: tuple[Box, ...]
    strips: Strips | None

    def __new__(
        cls,
        flat: Tensor,
        shape: Sequence[int],
        boxes: tuple[Box, ...],
        strips: Strips | None = None,
    ) -> Self:
        wrapper = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, torch.Size(shape), dtype=flat.dtype, device=flat.device
        )
        wrapper.flat, wrapper.boxes = flat, boxes
        wrapper.strips = strips
        return wrapper  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Boxes:
        """Copies the attributes at `new_empty`, with which a checkpoint's copy begins."""
        if func is not torch.ops.aten.new_empty.default:
            raise NotImplementedError(f"{func} of a part of a tensor")
        return Boxes(args[0].flat, args[1], args[0].boxes, args[0].strips)

    def parts(self) -> Iterator[tuple[ChunkStorageMetadata, Tensor]]:
        """Yields the place of each box, or strip of one, and a view of it."""
        at = 0
        for box in self.boxes:
            count = math.prod(box.shape)
            view = self.flat.narrow(0, at, count).view(box.shape)
            at += count
            if self.strips is None:
                yield _metadata(box), view
                continue
            for offset, strip in self.strips.boxes(self.shape, box):
                dim = self.strips.dim
                yield _metadata(strip), view.narrow(dim, offset, strip.shape[dim])

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


def _metadata(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offset), sizes=torch.Size(box.shape))


def checkpointed(tensor: Tensor, strips: Strips | None) -> Tensor:
    """The form in which a checkpoint holds a tensor that has `strips`, or a state of it.

    It is the tensor itself where no strips are divided: factors of the other dim have none, and
    scales of 8-bit moments that go across strips stay in the order of the ranks.
    """
    if strips is None or not isinstance(tensor, DTensor):
        return tensor
    is_divided = tensor.placements[-1].is_shard(strips.dim)
    if not is_divided or tensor.shape[strips.dim] % (strips.ranks * strips.matrices):
        return tensor
    part = tensor.to_local()
    _, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    boxes = (Box(tuple(offset), tuple(part.shape)),) if part.numel() else ()
    return Boxes(part.view(-1), tensor.shape, boxes, strips)
