"""Merak's partitioner: cuts a traced model into shards, runs of operators between legal cuts.

    target   2 L shards for L repeated blocks, their attention and their MLP; without blocks the
             number of legal cuts, at most 64
    quota    the parameters of all blocks (without blocks: of all but embeddings) over the target

By quota, a walk goes from one legal cut to the next, in the order in which the operators ran. The
shard ends at the cut whose parameters are nearest to the quota, and among cuts with equal
parameters at the one that hands on least. Embeddings, and operators before, between and behind the
runs of blocks, have shards of their own. By merging, neighbours join as long as that narrows what
they hand on (planner/traced/merged_neighbours.py). In both, a shard of less than a quarter of the
quota then goes to the neighbour with which it shares more. Named split points are always cuts.

No skip connection crosses a legal cut (planner/traced/boundary_values.py). Merak pulls readers of
an older value back into the shard that made it, which is the same. Source: Merak, arXiv 2206.04959,
section 3.1 (EQUATIONS G2).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import pairwise

from parplan.planner.traced.boundary_values import Values
from parplan.planner.traced.counted_operators import CountedOperators
from parplan.planner.traced.merged_neighbours import merged_neighbours
from parplan.planner.traced.repeated_blocks import OperatorRange, repeated_blocks, units
from parplan.planner.traced.split_points import split_places
from parplan.profiles.models.operator_graph import Tensor
from parplan.profiles.models.traced_model import TracedModel

MOST_WITHOUT_BLOCKS = 64  # shards of a model in which nothing repeats
SMALL = 0.25  # share of the quota; a shard with fewer parameters is merged
# share of the quota; cuts whose parameters differ by less are ranked by the bytes they hand on
NEAR = 0.05


class CutWay(StrEnum):
    """Ways to cut a model into shards.

    quota   equal parameters
    merge   narrow cuts: neighbours join as long as that narrows what they hand on
    """

    QUOTA = "quota"
    MERGE = "merge"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutting:
    """The way in which a model is cut into shards.

    cross_skips   skip connections may pass between stages
    splits        names of submodules at whose first operator a shard begins in any case
    """

    way: CutWay = CutWay.QUOTA
    cross_skips: bool = False
    splits: tuple[str, ...] = ()


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
    """A traced model cut into shards; `cuts[k]` has the values that shard k receives, by name.

    splits   the places of its named split points
    """

    model: TracedModel
    values: Values
    shards: tuple[Shard, ...]
    blocks: tuple[OperatorRange, ...]
    quota: float
    splits: tuple[int, ...] = ()

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


def shard(model: TracedModel, cutting: Cutting | None = None) -> Sharded:
    """Cuts `model` into shards. Raises ConfigError for split points that it cannot have."""
    cutting = cutting or Cutting()
    blocks = repeated_blocks(model)
    values = Values(model, units(model, blocks))
    cuts = values.legal_cuts(cross_skips=cutting.cross_skips)
    counted = CountedOperators(model, values, blocks)
    splits = split_places(counted, cuts, cutting.splits)
    quota = _quota(counted, cuts)
    if cutting.way is CutWay.MERGE:
        parts = merged_neighbours(values, cuts, splits)
        firsts = _embeddings_joined(counted, parts, quota, splits)
    else:
        segments = _segments(counted, cuts, splits)
        ends = (_walked(counted, first, stop, cuts, quota) for first, stop in segments)
        firsts = [0, *(end for each in ends for end in each)]
    sharded = _of_places(counted, _merged(counted, firsts, quota, splits), quota)
    return replace(sharded, splits=splits)


def cut_at(model: TracedModel, firsts: Sequence[int]) -> Sharded | None:
    """Returns `model` in shards that begin at given places, None where these are no legal cuts."""
    blocks = repeated_blocks(model)
    values = Values(model, units(model, blocks))
    cuts = values.legal_cuts(cross_skips=True)
    if firsts[0] != 0 or not set(firsts[1:]) <= set(cuts) or sorted(set(firsts)) != [*firsts]:
        return None
    counted = CountedOperators(model, values, blocks)
    return _of_places(counted, [*firsts, len(model.operators)], _quota(counted, cuts))


def _of_places(counted: CountedOperators, bounds: Sequence[int], quota: float) -> Sharded:
    shards = tuple(
        Shard(
            name=counted.name(first, end),
            first=first,
            end=end,
            parameters=counted.parameters(first, end),
            apart=counted.is_apart(first, end),
        )
        for first, end in pairwise(bounds)
    )
    return Sharded(
        model=counted.model,
        values=counted.values,
        shards=shards,
        blocks=tuple(counted.blocks),
        quota=quota,
    )


def _segments(
    counted: CountedOperators, cuts: Sequence[int], splits: Collection[int]
) -> Iterator[tuple[int, int]]:
    """Yields ranges that no shard may leave: runs of blocks, and the operators around them.

    They end at the split points too.
    """
    size, bounds = len(counted.model.operators), [0]
    for run in _runs(counted):
        for place in (run[0].first, run[-1].end):
            cut = counted.snapped(place, cuts)
            if cut is not None and cut > bounds[-1]:
                bounds.append(cut)
    yield from pairwise(sorted({*bounds, *splits, size}))


def _runs(counted: CountedOperators) -> Iterator[list[OperatorRange]]:
    """Yields runs of blocks between which no operator has parameters."""
    run: list[OperatorRange] = []
    for block in counted.blocks:
        if run and counted.parameters(run[-1].end, block.first):
            yield run
            run = []
        run.append(block)
    if run:
        yield run


def _quota(counted: CountedOperators, cuts: Sequence[int]) -> float:
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
    counted: CountedOperators, first: int, stop: int, cuts: Sequence[int], quota: float
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


def _next_end(
    counted: CountedOperators, first: int, cuts: Sequence[int], quota: float
) -> int | None:
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


def _merged(
    counted: CountedOperators, firsts: list[int], quota: float, splits: Collection[int]
) -> list[int]:
    """Merges shards that are too small, smallest first, and returns the bounds.

    Embeddings stay apart, and so do the sides of a split point.
    """
    fixed = {0, len(counted.model.operators), *splits}
    while len(firsts) > 2:
        small = sorted(
            (size, index)
            for index, (first, end) in enumerate(pairwise(firsts))
            if (size := counted.parameters(first, end)) < SMALL * quota
            and not counted.is_apart(first, end)
            and not {first, end} <= fixed
        )
        if not small:
            break
        _, index = small[0]
        sides = [side for side in (index, index + 1) if firsts[side] not in fixed]
        sides = _without_apart(counted, firsts, index, sides) or sides
        firsts.pop(max(sides, key=lambda side: counted.values.alive_bytes[firsts[side]]))
    return firsts


def _embeddings_joined(
    counted: CountedOperators, bounds: Sequence[int], quota: float, splits: Collection[int]
) -> list[int]:
    """Returns the bounds without those behind embeddings.

    Other embeddings join them, and small parts outside blocks.
    """
    kept, apart = [0], counted.is_apart(*bounds[:2])
    for first, end in pairwise(bounds[1:]):
        inside = any(block.first <= first < block.end for block in counted.blocks)
        small = counted.parameters(first, end) < SMALL * quota and not inside
        joins = small or counted.is_apart(first, end)
        if not (apart and joins) or first in splits:
            kept.append(first)
            apart = counted.is_apart(first, end)
    return [*kept, bounds[-1]]


def _without_apart(
    counted: CountedOperators, firsts: Sequence[int], index: int, sides: Iterable[int]
) -> list[int]:
    """Returns the sides of shard `index` that do not border on embeddings."""
    return [side for side in sides if not counted.is_apart(*_neighbour(firsts, index, side))]


def _neighbour(firsts: Sequence[int], index: int, side: int) -> tuple[int, int]:
    neighbour = index - 1 if side == index else index + 1
    return firsts[neighbour], firsts[neighbour + 1]
