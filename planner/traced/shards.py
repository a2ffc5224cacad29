"""Merak's partitioner: cuts a traced model into shards, runs of operators between legal cuts.

    target   2 L shards for L repeated blocks, their attention and their MLP; without blocks the
             number of legal cuts, at most 64
    quota    the parameters of all blocks (without blocks: of all but embeddings) over the target
    walk     from one legal cut to the next, in the order in which the operators ran; the shard ends
             at the cut whose parameters are nearest to the quota, and among cuts with equal
             parameters at the one that hands on least
    apart    embeddings, and operators before, between and behind the runs of blocks, have shards
             of their own
    merge    a shard of less than a quarter of the quota goes to the neighbour with which it shares
             more, so that no cut grows

No skip connection crosses a legal cut (planner/traced/boundary_values.py). Merak pulls readers of
an older value back into the shard that made it, which is the same. Source: Merak, arXiv 2206.04959,
section 3.1 (EQUATIONS G2).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from parplan.planner.traced.boundary_values import Values
from parplan.planner.traced.repeated_blocks import OperatorRange, repeated_blocks, units
from parplan.profiles.models.operator_graph import OperatorKind, Tensor
from parplan.profiles.models.traced_model import TracedModel

MOST_WITHOUT_BLOCKS = 64  # shards of a model in which nothing repeats
SMALL = 0.25  # share of the quota; a shard with fewer parameters is merged
# share of the quota; cuts whose parameters differ by less are ranked by the bytes they hand on
NEAR = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Operators [first, end) of the trace.

    name        modules that the operators belong to
    parameters  number of its parameters, each counted once
    apart       true for embeddings, which are never merged
    """

    name: str
    first: int
    end: int
    parameters: int
    apart: bool = False


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """A traced model cut into shards; `cuts[k]` has the values that shard k receives, by name."""

    model: TracedModel
    values: Values
    shards: tuple[Shard, ...]
    blocks: tuple[OperatorRange, ...]
    quota: float

    @cached_property
    def cuts(self) -> tuple[tuple[tuple[str, Tensor], ...], ...]:
        return tuple(
            self.values.alive(shard.first) if number else ()
            for number, shard in enumerate(self.shards)
        )

    @cached_property
    def shard_of(self) -> tuple[int, ...]:
        """The number of each place's shard."""
        return tuple(
            number
            for number, shard in enumerate(self.shards)
            for _ in range(shard.first, shard.end)
        )

    @cached_property
    def shared(self) -> tuple[tuple[str, int, tuple[int, ...]], ...]:
        """Name, elements and shards of the parameters that several shards hold."""
        held: dict[str, dict[int, int]] = {}
        for place, traced in enumerate(self.model.operators):
            for parameter in traced.operator.parameters:
                held.setdefault(parameter.name, {})[self.shard_of[place]] = parameter.num_elements
        return tuple(
            (name, next(iter(shards.values())), tuple(sorted(shards)))
            for name, shards in held.items()
            if len(shards) > 1
        )


def shard(model: TracedModel, *, cross_skips: bool = False) -> Sharded:
    """Cuts `model` into shards; with `cross_skips`, skip connections may pass between stages."""
    blocks = repeated_blocks(model)
    values = Values(model, units(model, blocks))
    cuts = values.legal_cuts(cross_skips=cross_skips)
    counted = _Counted(model, values, blocks)
    segments = list(_segments(counted, cuts))
    quota = _quota(counted, segments, cuts)
    ends = [end for first, stop in segments for end in _walked(counted, first, stop, cuts, quota)]
    firsts = _merged(counted, [0, *ends], quota)
    shards = tuple(
        Shard(
            name=counted.name(first, end),
            first=first,
            end=end,
            parameters=counted.parameters(first, end),
            apart=counted.is_apart(first, end),
        )
        for first, end in pairwise(firsts)
    )
    return Sharded(model=model, values=values, shards=shards, blocks=blocks, quota=quota)


class _Counted:
    """Parameters by range, ranks of cuts, and names, for the walk over a model."""

    def __init__(self, model: TracedModel, values: Values, blocks: Sequence[OperatorRange]) -> None:
        self.model = model
        self.values = values
        self.blocks = blocks
        self.paths = [traced.path.split(".") if traced.path else [] for traced in model.operators]
        self.holds = [
            {p.name: p.num_elements for p in traced.operator.parameters}
            for traced in model.operators
        ]
        self.embeds = [traced.operator.kind is OperatorKind.EMBEDDING for traced in model.operators]

    def parameters(self, first: int, end: int, *, embeddings: bool = True) -> int:
        """Number of parameters of operators [first, end), each counted once."""
        elements: dict[str, int] = {}
        for place in range(first, end):
            if embeddings or not self.embeds[place]:
                elements.update(self.holds[place])
        return sum(elements.values())

    def is_apart(self, first: int, end: int) -> bool:
        """True if operators [first, end) have embeddings and no block begins among them."""
        return any(self.embeds[first:end]) and not any(
            first <= block.first < end for block in self.blocks
        )

    def depth(self, place: int) -> int:
        """Number of modules that enclose both sides of a cut; a better place has fewer."""
        before, behind = self.paths[place - 1], self.paths[place]
        return next(
            (index for index, (a, b) in enumerate(zip(before, behind, strict=False)) if a != b),
            min(len(before), len(behind)),
        )

    def rank(self, place: int) -> tuple[int, int, int]:
        """Returns a key that orders cuts of equal parameters, the best first."""
        return self.values.alive_bytes[place], self.depth(place), place

    def name(self, first: int, end: int) -> str:
        """Names the module of the operators [first, end) with parameters, or its parts."""
        paths = [
            self.paths[place] for place in range(first, end) if self.holds[place]
        ] or self.paths[first:end]
        common = _prefix(paths)
        whole = [
            place
            for place in range(len(self.paths))
            if self.holds[place] and self.paths[place][: len(common)] == common
        ]
        if common and all(first <= place < end for place in whole):
            return ".".join(common)
        depth = len(common) + 1 if common else None
        parts = list(
            dict.fromkeys(
                ".".join(path[len(common) : depth]) for path in paths if len(path) > len(common)
            )
        )
        inner = f"{parts[0]} to {parts[-1]}" if len(parts) > 2 else ", ".join(parts)
        if not common:
            return inner or f"operators {first} to {end - 1}"
        return ".".join(common) + (f" ({inner})" if inner else "")


def _prefix(paths: Sequence[Sequence[str]]) -> list[str]:
    """Returns the modules that all paths begin with."""
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return shared


def _segments(counted: _Counted, cuts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields ranges that no shard may leave: runs of blocks, and the operators around them."""
    size, bounds = len(counted.model.operators), [0]
    for run in _runs(counted):
        for place in (run[0].first, run[-1].end):
            cut = _snapped(counted, place, cuts)
            if cut is not None and cut > bounds[-1]:
                bounds.append(cut)
    yield from pairwise((*bounds, size) if bounds[-1] < size else bounds)


def _runs(counted: _Counted) -> Iterator[list[OperatorRange]]:
    """Yields runs of blocks between which no operator has parameters."""
    run: list[OperatorRange] = []
    for block in counted.blocks:
        if run and counted.parameters(run[-1].end, block.first):
            yield run
            run = []
        run.append(block)
    if run:
        yield run


def _snapped(counted: _Counted, place: int, cuts: Sequence[int]) -> int | None:
    """Returns the legal cut nearest to a place, None if all have parameters between."""
    index = bisect_left(cuts, place)
    near = [
        cut
        for cut in cuts[max(0, index - 1) : index + 1]
        if not any(counted.holds[min(cut, place) : max(cut, place)])
    ]
    return min(near, key=lambda cut: abs(cut - place), default=None)


def _quota(counted: _Counted, segments: Sequence[tuple[int, int]], cuts: Sequence[int]) -> float:
    """Parameters of a shard: those of L blocks over 2 L.

    Without blocks, parameters outside embeddings are divided by the number of shards.
    """
    if counted.blocks:
        return sum(counted.parameters(block.first, block.end) for block in counted.blocks) / (
            2 * len(counted.blocks)
        )
    whole = counted.parameters(0, len(counted.model.operators), embeddings=False)
    return max(1.0, whole / max(1, min(len(cuts) + 1, MOST_WITHOUT_BLOCKS)))


def _walked(
    counted: _Counted, first: int, stop: int, cuts: Sequence[int], quota: float
) -> Iterator[int]:
    """Yields the ends of the shards of a segment."""
    inside = [cut for cut in cuts if first < cut < stop]
    while inside and counted.parameters(first, stop, embeddings=False) > quota:
        end = _next_end(counted, first, inside, quota)
        if end is None or not any(counted.holds[end:stop]):
            break
        yield end
        first, inside = end, [cut for cut in inside if cut > end]
    yield stop


def _next_end(counted: _Counted, first: int, cuts: Sequence[int], quota: float) -> int | None:
    """Returns the cut with parameters since `first` nearest to the quota, None if all have few."""
    sizes: dict[int, int] = {}
    names: dict[str, int] = {}
    place = first
    for cut in cuts:
        for index in range(place, cut):
            if not counted.embeds[index]:
                names.update(counted.holds[index])
        place, sizes[cut] = cut, sum(names.values())
        if (
            sizes[cut]
            > min((size for size in sizes.values() if size > quota), default=quota) + NEAR * quota
        ):
            break
    enough = [cut for cut, size in sizes.items() if size >= SMALL * quota]
    if not enough:
        return None
    nearest = min((sizes[cut] for cut in enough), key=lambda size: abs(size - quota))
    return min(
        (cut for cut in enough if abs(sizes[cut] - nearest) <= NEAR * quota), key=counted.rank
    )


def _merged(counted: _Counted, firsts: list[int], quota: float) -> list[int]:
    """Merges shards that are too small, smallest first, and returns the bounds.

    Embeddings stay apart.
    """
    while len(firsts) > 2:
        small = sorted(
            (size, index)
            for index, (first, end) in enumerate(pairwise(firsts))
            if (size := counted.parameters(first, end)) < SMALL * quota
            and not counted.is_apart(first, end)
        )
        if not small:
            break
        _, index = small[0]
        sides = [side for side in (index, index + 1) if 0 < side < len(firsts) - 1]
        sides = _without_apart(counted, firsts, index, sides) or sides
        firsts.pop(max(sides, key=lambda side: counted.values.alive_bytes[firsts[side]]))
    return firsts


def _without_apart(
    counted: _Counted, firsts: Sequence[int], index: int, sides: Iterable[int]
) -> list[int]:
    """Returns the sides of shard `index` that do not border on embeddings."""
    return [side for side in sides if not counted.is_apart(*_neighbour(firsts, index, side))]


def _neighbour(firsts: Sequence[int], index: int, side: int) -> tuple[int, int]:
    neighbour = index - 1 if side == index else index + 1
    return firsts[neighbour], firsts[neighbour + 1]
