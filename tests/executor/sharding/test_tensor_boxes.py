"""Parts of tensors in checkpoints: boxes that make up a run of elements.

They are read from and copied as any tensor.
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from parplan.executor.chunks.regions import OwnedPart, Region, own_part
from parplan.executor.sharding.tensor_boxes import Box, Boxes, Strips, boxes_of

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        pytest.param(0, 20, [Box((0, 0), (4, 5))], id="all"),
        pytest.param(
            3,
            14,
            [Box((0, 3), (1, 2)), Box((1, 0), (1, 5)), Box((2, 0), (1, 4))],
            id="from-a-row-to-a-row",
        ),
        pytest.param(6, 9, [Box((1, 1), (1, 3))], id="inside-a-row"),
        pytest.param(5, 15, [Box((1, 0), (2, 5))], id="whole-rows"),
    ],
)
def test_a_run_of_a_matrix_is_at_most_three_boxes(first, last, expected):
    assert list(boxes_of((4, 5), first, last)) == expected


@settings(max_examples=50)
@given(SHAPES, st.data())
def test_boxes_have_the_elements_of_the_run_in_order(shape, data):
    count = math.prod(shape)
    first = data.draw(st.integers(0, count - 1))
    last = data.draw(st.integers(first + 1, count))
    whole = torch.arange(count).view(shape)

    actual = []
    for box in boxes_of(shape, first, last):
        actual.append(
            whole[
                tuple(slice(at, at + size) for at, size in zip(box.offset, box.shape, strict=True))
            ]
        )

    assert torch.cat([part.flatten() for part in actual]).tolist() == list(range(first, last))


class Ranks:
    """A group of as many ranks."""

    def __init__(self, number: int) -> None:
        self.size = lambda: number


@settings(max_examples=50)
@given(st.integers(0, 30), st.integers(1, 30), st.integers(1, 20))
def test_the_ranks_parts_of_a_parameter_are_all_of_it(offset, elements, chunk_elements):
    ranks = -(-(offset + elements) // chunk_elements)
    region = Region(first=3, elements=ranks * chunk_elements, at=0, group=Ranks(ranks))
    parts = [own_part(3 + offset, elements, region, rank) for rank in range(ranks)]

    owned = [
        (rank * chunk_elements + part.at + i, part.first + i)
        for rank, part in enumerate(parts)
        for i in range(part.count)
    ]
    assert owned == [(offset + element, element) for element in range(elements)]
    assert own_part(offset, elements, region, ranks) == OwnedPart(0, 0, 0)


def parts_of(shape: tuple[int, ...], *borders: int) -> list[Boxes]:
    return [
        Boxes(torch.zeros(last - first), shape, tuple(boxes_of(shape, first, last)))
        for first, last in pairwise(borders)
    ]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_parts_are_read_from_a_checkpoint_that_has_the_whole(tmp_path):
    whole = torch.arange(35.0).view(5, 7)
    dcp.save({"model": {"weight": whole}}, checkpoint_id=tmp_path, no_dist=True)

    parts = parts_of((5, 7), 0, 11, 16, 35)
    for part in parts:
        dcp.load({"model": {"weight": part}}, checkpoint_id=tmp_path, no_dist=True)

    assert torch.equal(torch.cat([part.flat for part in parts]), whole.flatten())


def test_a_part_is_staged_with_memory_of_its_own():
    boxes = tuple(boxes_of((4, 5), 3, 14))
    part = Boxes(torch.zeros(11), (4, 5), boxes, Strips(0, matrices=2, ranks=2))
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
    )

    staged = stager.stage({"weight": part})["weight"]
    part.flat.fill_(7)

    assert (type(staged), staged.shape, staged.boxes) == (Boxes, part.shape, part.boxes)
    assert staged.strips == part.strips
    assert torch.equal(staged.flat, torch.zeros(11))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("dim", [0, 1])
def test_runs_of_several_matrices_in_one_are_read_in_the_order_of_the_ranks(dim, tmp_path):
    """Every element has one rank, and runs of 11 elements begin and end inside strips."""
    strips = Strips(dim, matrices=3, ranks=2)
    shape = tuple(12 if d == dim else 5 for d in range(2))
    whole = torch.arange(60.0).view(shape)
    dcp.save({"model": {"weight": whole}}, checkpoint_id=tmp_path, no_dist=True)

    for rank, part in enumerate(strips.by_rank(whole).chunk(2, dim)):
        begin = tuple(rank * 6 if d == dim else 0 for d in range(2))
        for first in range(0, 30, 11):
            last = min(first + 11, 30)
            boxes = tuple(
                Box(tuple(map(sum, zip(begin, box.offset, strict=True))), box.shape)
                for box in boxes_of(part.shape, first, last)
            )
            read = Boxes(torch.zeros(last - first), shape, boxes, strips)
            dcp.load({"model": {"weight": read}}, checkpoint_id=tmp_path, no_dist=True)
            assert torch.equal(read.flat, part.flatten()[first:last])


def test_a_ranks_part_of_several_matrices_is_a_strip_of_each():
    strips = Strips(0, matrices=3, ranks=2)
    by_matrix = torch.tensor([0, 1, 10, 11, 20, 21])

    by_rank = strips.by_rank(by_matrix)

    assert by_rank.tolist() == [0, 10, 20, 1, 11, 21]
    assert strips.by_matrix(by_rank).tolist() == by_matrix.tolist()


def test_a_part_computes_nothing():
    (part,) = parts_of((4, 5), 3, 14)

    with pytest.raises(NotImplementedError, match="of a part of a tensor"):
        part.add(1)
