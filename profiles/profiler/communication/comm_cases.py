"""The cases that `profiles/profile_comm.py` measures on a world, most informative first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.measurements import Case, CasePass
from parplan.profiles.profiler.communication.group_shapes import (
    Shape,
    World,
    group_shapes,
    pair_shapes,
)
from parplan.profiles.units import KIB

ALL_REDUCE = "all_reduce"
POINT_TO_POINT = "point_to_point"
OVERLAP = "overlap"
COMMUNICATOR = "communicator"
PARTED = ("all_gather", "reduce_scatter", "all_to_all")  # their tensor has a part for each rank
COLLECTIVES = (ALL_REDUCE, *PARTED)
TIMED = (*COLLECTIVES, POINT_TO_POINT)
SIZES = ("bytes", "nodes", "ranks_per_node", "groups")  # the sizes of timed cases
_LEVEL = {ALL_REDUCE: 0, POINT_TO_POINT: 1, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 2}
_OVERLAP_LEVEL = 1
SMALLEST_BYTES = KIB
STEP = 4
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


def ladder(largest_bytes: int) -> tuple[int, ...]:
    """The sizes 1 KiB, 4 KiB, ... and the largest. Raises ConfigError if that is below 1 KiB."""
    if largest_bytes < SMALLEST_BYTES:
        raise ConfigError(
            f"--largest is {largest_bytes} bytes, it must be at least 1 KiB",
            hint="for example --largest 64MiB",
        )
    sizes = []
    size = SMALLEST_BYTES
    while size < largest_bytes:
        sizes.append(size)
        size *= STEP
    return (*sizes, largest_bytes)


def size_levels(count: int) -> tuple[int, ...]:
    """The level of each of `count` sizes: 0 for the ends, 1 the middle, 2 the quarters, ..."""
    levels = [0] * count
    spans = [(0, count - 1)]
    level = 0
    while spans:
        level += 1
        halves = [(low, (low + high) // 2, high) for low, high in spans if high - low > 1]
        for _, middle, _ in halves:
            levels[middle] = level
        spans = [span for low, middle, high in halves for span in ((low, middle), (middle, high))]
    return tuple(levels)


def comm_cases(
    world: World, *, largest_bytes: int, precision: str, product: int
) -> tuple[Case, ...]:
    """Every case on this world, most informative first.

    `product` is the number of rows and columns of the product in overlap cases.
    """
    cases = [
        *_timed(world, ladder(largest_bytes), precision),
        *_overlaps(world, largest_bytes, precision, product),
    ]
    cases += [
        (level, 0, _communicator(shape, precision))
        for level, shape in _shapes(group_shapes(world))
        if shape.groups == 1
    ]
    return tuple(case for _, _, case in sorted(cases, key=lambda item: item[:2]))


def _shapes(levels: Iterable[tuple[Shape, ...]]) -> Iterator[tuple[int, Shape]]:
    return ((level, shape) for level, shapes in enumerate(levels) for shape in shapes)


def _timed(world: World, sizes: tuple[int, ...], precision: str) -> Iterator[tuple[int, int, Case]]:
    levels = size_levels(len(sizes))
    for work in TIMED:
        for shape_level, shape in _shapes(
            pair_shapes(world) if work == POINT_TO_POINT else group_shapes(world)
        ):
            for size_level, n_bytes in zip(levels, sizes, strict=True):
                yield (
                    shape_level + size_level + _LEVEL[work],
                    1 + shape_level,
                    timed_case(work, n_bytes, shape, precision),
                )


def timed_case(work: str, n_bytes: int, shape: Shape, precision: str) -> Case:
    """One collective or message.

    Bytes are counted as nccl-tests does and rounded up to whole elements of every rank.
    """
    step = ELEMENT_BYTES.get(precision, 1) * (shape.num_ranks if work in PARTED else 1)
    rounded = -(-n_bytes // step) * step
    sizes = (rounded, shape.nodes, shape.ranks_per_node, shape.groups)
    named = tuple(zip(SIZES, sizes, strict=True))
    return Case(
        work=work,
        sizes=named,
        precision=precision,
        passes=(CasePass(name="time", curve=work, sizes=sizes),),
    )


def _overlaps(
    world: World, largest_bytes: int, precision: str, product: int
) -> Iterator[tuple[int, int, Case]]:
    """Yields an all-reduce under products, on whole nodes and on the whole world."""
    for shape in group_shapes(world)[0]:
        sizes = (largest_bytes, product, product, product, shape.nodes, shape.ranks_per_node)
        named = tuple(zip(("bytes", "m", "n", "k", "nodes", "ranks_per_node"), sizes, strict=True))
        yield _OVERLAP_LEVEL, 0, Case(work=OVERLAP, sizes=named, precision=precision, passes=())


def _communicator(shape: Shape, precision: str) -> Case:
    named = (("nodes", shape.nodes), ("ranks_per_node", shape.ranks_per_node))
    return Case(work=COMMUNICATOR, sizes=named, precision=precision, passes=())


def shape_of(case: Case) -> Shape:
    """The shape of any case of this file."""
    sizes = dict(case.sizes)
    return Shape(
        nodes=sizes["nodes"], ranks_per_node=sizes["ranks_per_node"], groups=sizes.get("groups", 1)
    )
