"""Redistribution of a tensor: its collectives, their seconds and their temporary bytes.

On each axis of the mesh a tensor is whole, divided along one of its dims, or a partial sum
(EQUATIONS S2):

    whole   -> divided    a slice of the local tensor, nothing is sent
    partial -> divided    reduce-scatter of the local bytes
    divided -> another    all-to-all of the local bytes
    partial -> whole      all-reduce of the local bytes
    divided -> whole      all-gather to the bytes that are local afterwards

Inner axes, whose ranks are neighbours, reduce and cut first, and outer axes gather first: they send
as few bytes as can be. Where several axes divide one dim, the outer one cuts first, and the order
is that of torch's DTensor: to remove an outer cut, the cuts inside it are gathered before and made
again after. The executor takes the same steps (executor/sharding/moves.py); a test counts its
collectives. Between CPUs torch runs an all-gather in place of the all-to-all.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from parplan.costmodels.communication.collectives import Collective, collective_time
from parplan.costmodels.communication.mesh import place_axis
from parplan.costmodels.operators.sharding import PARTIAL, Place, placed_parts
from parplan.profiles.elementwise import Number, larger_of
from parplan.profiles.machines.shipped_profiles import Machine
from parplan.profiles.provenance import ZERO, Seconds


@dataclass(frozen=True, slots=True)
class RedistributionStep:
    """One collective of `num_bytes` over `axis`, counted as in `collective_time`.

    `left_bytes` are the local bytes after it.
    """

    collective: Collective
    axis: int
    num_bytes: Number
    left_bytes: Number


@dataclass(frozen=True, slots=True)
class Redistribution:
    """Collectives in order, their time, and the most bytes that one writes beside its input."""

    moves: tuple[RedistributionStep, ...]
    time: Seconds
    temporary_bytes: Number


def redistribute(
    num_bytes: Number, source: Place, target: Place, degrees: tuple[int, ...], machine: Machine
) -> Redistribution:
    """Prices the redistribution of a tensor of `num_bytes` in all over the axes of `degrees`.

    The innermost axis is last. A target is never PARTIAL: a whole gradient serves as well in a
    backward pass.
    """
    taken = tuple(moves(num_bytes, source, target, degrees))
    time = ZERO
    num_ranks = math.prod(degrees)
    for move in taken:
        stride = math.prod(degrees[move.axis + 1 :])
        where = place_axis(degrees[move.axis], stride, num_ranks, machine.cluster.gpus_per_node)
        time += collective_time(move.collective, move.num_bytes, where, machine)
    return Redistribution(
        taken, time, functools.reduce(larger_of, (move.left_bytes for move in taken), 0)
    )


def moves(
    num_bytes: Number, source: Place, target: Place, degrees: tuple[int, ...]
) -> Iterator[RedistributionStep]:
    """Yields the collectives from `source` to `target`. Axes of one rank take none."""
    here = [
        place if p > 1 else goal for p, place, goal in zip(degrees, source, target, strict=True)
    ]

    def local() -> Number:
        return -(-num_bytes // placed_parts(tuple(here), degrees))

    for axis, goal in steps(tuple(here), target):
        collective = _collective(here[axis], goal)
        before = local()
        here[axis] = goal
        if collective is not None:
            num_bytes_sent = local() if collective is Collective.ALL_GATHER else before
            yield RedistributionStep(collective, axis, num_bytes_sent, local())


def steps(source: Place, target: Place) -> Iterator[tuple[int, str | None]]:
    """Yields the axes that change from `source` to `target` in order, each with its new place."""
    here = list(source)
    for axis, goal in _order(source, target):
        if here[axis] != goal:
            here[axis] = goal
            yield axis, goal


def _order(source: Place, target: Place) -> Iterator[tuple[int, str | None]]:
    dims = [
        dim
        for place, goal in zip(source, target, strict=True)
        for dim in {place, goal}
        if dim not in (None, PARTIAL)
    ]
    if len(set(dims)) < len(dims):  # several axes divide one dim
        yield from _inward_out(source, target)
        yield from enumerate(target)
        return
    inward = list(reversed(range(len(source))))
    yield from ((axis, target[axis]) for axis in inward if target[axis] is not None)
    yield from ((axis, None) for axis in inward if source[axis] == PARTIAL and not target[axis])
    yield from enumerate(target)


def _inward_out(source: Place, target: Place) -> Iterator[tuple[int, str | None]]:
    """Yields the first walk, from the innermost axis: each goes to its target or becomes whole.

    It becomes whole where outer axes cut the target's dim in another way. Only a tensor that is
    divided somewhere is walked so: nested cuts are removed before they are made.
    """
    here = list(source)
    if all(place in (None, PARTIAL) for place in source):
        return
    for axis in reversed(range(len(here))):
        goal = target[axis]
        if goal is not None and any(
            (here[outer] == goal) != (target[outer] == goal) for outer in range(axis)
        ):
            goal = None
        here[axis] = goal
        yield axis, goal


def _collective(place: str | None, goal: str | None) -> Collective | None:
    """Returns the collective of one axis from `place` to another `goal`; None for a slice."""
    if place is None:
        return None
    if place == PARTIAL:
        return Collective.REDUCE_SCATTER if goal else Collective.ALL_REDUCE
    return Collective.ALL_TO_ALL if goal else Collective.ALL_GATHER
