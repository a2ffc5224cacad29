"""The rounds of an exchange of gradients, on numbers in place of ranks."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from parplan.executor.pools import gradient_rounds
from parplan.executor.pools.gradient_rounds import elements_of, rounds_of
from parplan.executor.pools.joined_ranks import PoolPlace
from parplan.executor.sharding.tensor_boxes import Box

WHOLE = {"table": (12, 4), "weight": (6, 8), "bias": (6,)}


def cut(name, dim, number, parts):
    """Box `number` of a parameter that is cut into `parts` along a dim; whole for a bias."""
    shape = list(WHOLE[name])
    dim = min(dim, len(shape) - 1)
    size = shape[dim] // parts
    shape[dim] = size
    return name, Box(
        tuple(number * size if d == dim else 0 for d in range(len(shape))), tuple(shape)
    )


def whole(name):
    return cut(name, 0, 0, 1)


LAYOUTS = {
    "stages beside shards": (
        (2, 2),
        [
            [whole("table")],
            [whole("weight"), whole("bias")],
            *([cut(name, 0, rank, 2) for name in WHOLE] for rank in range(2)),
        ],
    ),
    "copies beside columns": (
        (3, 2),
        [
            *([whole(name) for name in WHOLE] for _ in range(3)),
            *([cut(name, 1, rank, 2) for name in WHOLE] for rank in range(2)),
        ],
    ),
    "three pools": (
        (1, 2, 3),
        [
            [whole(name) for name in WHOLE],
            *([cut(name, 1, rank, 2) for name in WHOLE] for rank in range(2)),
            *([cut(name, 0, rank, 3) for name in WHOLE] for rank in range(3)),
        ],
    ),
    "a table on both ends": (
        (1, 2),
        [
            [whole("table"), whole("table"), whole("weight"), whole("bias")],
            [whole("table"), whole("bias")],
            [whole("table"), whole("weight")],
        ],
    ),
}


def held(layouts, sizes):
    """Parts of gradients by rank: pool p has 10^p in every element of its own gradient."""
    place = PoolPlace(sizes=sizes, rank=0)
    return [
        [np.full(box.shape, 10 ** place.pool_of(rank)) for _, box in layout]
        for rank, layout in enumerate(layouts)
    ]


def exchanged(sizes, layouts, buckets=1):
    """The parts of all ranks after an exchange, and the elements that pools sent to others."""
    values = held(layouts, sizes)
    places = [PoolPlace(sizes=sizes, rank=rank) for rank in range(sum(sizes))]
    by_rank = [list(rounds_of(layouts, place)) for place in places]
    assert {len(each) for each in by_rank} == {buckets}
    sent = [0] * len(sizes)
    for bucket, number in itertools.product(range(buckets), range(3)):
        rounds = [each[bucket][number] for each in by_rank]
        messages = {
            (a, b): [view(values[a], layouts[a], piece).copy() for piece in rounds[a].sent[b]]
            for a, b in itertools.product(range(len(places)), repeat=2)
        }
        for (a, b), arrived in messages.items():
            if places[a].pool != places[b].pool:
                sent[places[a].pool] += elements_of(rounds[a].sent[b])
            for piece, value in zip(rounds[b].arriving[a], arrived, strict=True):
                target = view(values[b], layouts[b], piece)
                target[...] = target + value if number == 0 else value
    return values, sent


def view(parts, layout, piece):
    offset = layout[piece.of][1].offset
    ranges = zip(piece.where, offset, strict=True)
    return parts[piece.of][tuple(slice(a - by, b - by) for (a, b), by in ranges)]


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_part_has_the_sum_over_pools_and_pools_send_the_bytes_of_a_ring(name):
    sizes, layouts = LAYOUTS[name]

    values, sent = exchanged(sizes, layouts)

    total = sum(10**pool for pool in range(len(sizes)))
    assert all((part == total).all() for parts in values for part in parts)
    gradients = sum(math.prod(shape) for shape in WHOLE.values())
    assert sent == [2 * (len(sizes) - 1) * gradients // len(sizes)] * len(sizes)


def test_gradients_beyond_a_bucket_go_in_several(monkeypatch):
    monkeypatch.setattr(gradient_rounds, "BUCKET_BYTES", 200)
    sizes, layouts = LAYOUTS["stages beside shards"]

    values, sent = exchanged(sizes, layouts, buckets=2)

    assert all((part == 11).all() for parts in values for part in parts)
    assert sent == [102, 102]


def test_ranks_with_copies_share_the_parts_that_they_exchange():
    sizes, layouts = LAYOUTS["copies beside columns"]

    rounds = [next(rounds_of(layouts, PoolPlace(sizes=sizes, rank=rank))) for rank in range(3)]

    sent = [sum(map(elements_of, to_sum.sent)) for to_sum, _, _ in rounds]
    assert sorted(sent) == [3, 24, 24]  # half the rows of bias, weight and table
