"""The rounds of messages in which the ranks of several pools add their gradients.

A gradient of a parameter lies in other parts in each pool. A part is a box of the whole tensor, as
a checkpoint writes it, and has one owner in its pool among the ranks that hold it. The rows of
every parameter are divided over the P pools, and each pool adds those of its share:

    1. owners send the rows that another pool adds to the owners of these rows there
    2. these add them and send the sums back
    3. owners send their whole part to the other ranks of their pool that hold it

A pool sends (P - 1) / P of its gradients in the first round and as many in the second, which are
the bytes of a ring (EQUATIONS P10). A sum is made on one rank, so all pools have the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from parplan.executor.pools.joined_ranks import PoolPlace
from parplan.executor.sharding.tensor_boxes import Box
from parplan.profiles.units import MIB

BUCKET_BYTES = 100 * MIB  # gradients of a rank that are under way at once, tables aside
GRADIENT_BYTES = 4  # as buckets count them; those of 16 bits are under way in half of it

Holder = tuple[int, int]  # a rank of the job, and the number of a part on it
Layout = Sequence[tuple[str, Box]]  # the parts of a rank: the parameter, and its box there


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """A box that a rank sends or gets, in the order in which two ranks agree.

    where   the box in the whole parameter
    of      number of the part of this rank that it lies in
    """

    name: str
    where: tuple[tuple[int, int], ...]
    of: int


@dataclass(frozen=True, slots=True)
class Round:
    """The pieces that this rank sends to every rank, and those that it gets from every rank."""

    sent: tuple[tuple[Piece, ...], ...]
    arriving: tuple[tuple[Piece, ...], ...]


def rounds_of(layouts: Sequence[Layout], place: PoolPlace) -> Iterator[tuple[Round, Round, Round]]:
    """Yields the rounds of one rank, bucket by bucket: to sum, back, and to copies.

    layouts   the parts of each rank of the job
    """
    holders: list[dict[str, dict[Box, list[Holder]]]] = [{} for _ in place.sizes]
    for rank, layout in enumerate(layouts):
        for number, (name, box) in enumerate(layout):
            if math.prod(box.shape):
                boxes = holders[place.pool_of(rank)].setdefault(name, {})
                boxes.setdefault(box, []).append((rank, number))
    owners = [_owners(each) for each in holders]
    most = max(sum(math.prod(box.shape) for _, box in layout) for layout in layouts)
    buckets = max(1, -(-most * GRADIENT_BYTES // BUCKET_BYTES))
    names = sorted(holders[place.pool])
    for first in range(buckets):
        chosen = names[first::buckets]
        yield (*_between_pools(chosen, owners, place), _inside(chosen, holders, owners, place))


def _owners(pool: Mapping[str, Mapping[Box, Sequence[Holder]]]) -> dict[str, dict[Box, Holder]]:
    """Returns by parameter and box the holder that exchanges it: ranks have about equal shares."""
    load: dict[int, int] = {}
    owners: dict[str, dict[Box, Holder]] = {}
    parts = [(math.prod(box.shape), name, box) for name, boxes in pool.items() for box in boxes]
    for size, name, box in sorted(parts, key=lambda each: (-each[0], each[1], each[2].offset)):
        owner = min(pool[name][box], key=lambda holder: (load.get(holder[0], 0), holder))
        load[owner[0]] = load.get(owner[0], 0) + size
        owners.setdefault(name, {})[box] = owner
    return owners


def _between_pools(
    names: Sequence[str],
    owners: Sequence[Mapping[str, Mapping[Box, Holder]]],
    place: PoolPlace,
) -> tuple[Round, Round]:
    """Returns the rounds in which a rank sends pieces to be added, and gets the sums back."""
    added: list[list[Piece]] = [[] for _ in range(sum(place.sizes))]
    sent: list[list[Piece]] = [[] for _ in added]
    for name in names:
        mine = [
            (box, part)
            for box, (rank, part) in owners[place.pool][name].items()
            if rank == place.rank
        ]
        rows = max(box.offset[0] + box.shape[0] for box in owners[place.pool][name])
        for pool, theirs in enumerate(owners):
            if pool == place.pool:
                continue
            for (box, number), (other, (rank, _)) in itertools.product(mine, theirs[name].items()):
                for lists, adding in ((added, place.pool), (sent, pool)):
                    where = _common(box, other, _rows_of(adding, rows, len(owners)))
                    if where is not None:
                        lists[rank].append(Piece(name, where, number))
    to_sum = Round(_in_order(sent), _in_order(added))
    return to_sum, Round(to_sum.arriving, to_sum.sent)


def _inside(
    names: Sequence[str],
    holders: Sequence[Mapping[str, Mapping[Box, Sequence[Holder]]]],
    owners: Sequence[Mapping[str, Mapping[Box, Holder]]],
    place: PoolPlace,
) -> Round:
    """Returns the round in which owners send whole parts to the other ranks that hold them."""
    sent: list[list[Piece]] = [[] for _ in range(sum(place.sizes))]
    arriving: list[list[Piece]] = [[] for _ in sent]
    for name in names:
        for box, everyone in holders[place.pool][name].items():
            owner = owners[place.pool][name][box]
            where = tuple((a, a + n) for a, n in zip(box.offset, box.shape, strict=True))
            for holder in everyone:
                if holder != owner and owner[0] == place.rank:
                    sent[holder[0]].append(Piece(name, where, owner[1]))
                if holder != owner and holder[0] == place.rank:
                    arriving[owner[0]].append(Piece(name, where, holder[1]))
    return Round(_in_order(sent), _in_order(arriving))


def _rows_of(pool: int, rows: int, pools: int) -> tuple[int, int]:
    """Returns the rows of a parameter that a pool adds."""
    return rows * pool // pools, rows * (pool + 1) // pools


def _common(one: Box, other: Box, rows: tuple[int, int]) -> tuple[tuple[int, int], ...] | None:
    """Returns the box that two boxes have in common in given rows, None if there is none."""
    ranges = [
        (max(a, b), min(a + n, b + m))
        for a, n, b, m in zip(one.offset, one.shape, other.offset, other.shape, strict=True)
    ]
    ranges[0] = max(ranges[0][0], rows[0]), min(ranges[0][1], rows[1])
    return tuple(ranges) if all(a < b for a, b in ranges) else None


def _in_order(pieces: Sequence[list[Piece]]) -> tuple[tuple[Piece, ...], ...]:
    return tuple(tuple(sorted(each)) for each in pieces)


def elements_of(pieces: Iterable[Piece]) -> int:
    return sum(math.prod(b - a for a, b in piece.where) for piece in pieces)
