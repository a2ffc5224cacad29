"""From one placement of a tensor to another: the collectives that run, their seconds and their temporary bytes.

On each axis of the mesh a tensor is whole, divided along one of its dims, or a partial sum (EQUATIONS S):

    whole   -> divided    a slice of what is there, nothing is sent
    partial -> divided    reduce-scatter of the local bytes
    divided -> another    all-to-all of the local bytes
    partial -> whole      all-reduce of the local bytes
    divided -> whole      all-gather to what is local afterwards

in this order, which keeps what later steps move small. A dim that several axes divide is cut by the outer axis first: to
take away an outer cut, the cuts inside it are gathered before and made again after, as torch's DTensor does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from costmodels.collectives import Collective, collective_time
from costmodels.mesh import place_axis
from costmodels.sharding import PARTIAL, Place, placed_parts
from profiles.measured import Machine
from profiles.provenance import ZERO, Seconds


@dataclass(frozen=True, slots=True)
class Move:
    """One collective over the axis `axis` of `num_bytes`, counted as `collective_time` counts them; it leaves `left_bytes`."""

    collective: Collective
    axis: int
    num_bytes: int
    left_bytes: int


@dataclass(frozen=True, slots=True)
class Redistribution:
    """The collectives in order, their time, and the most bytes that a step writes beside its input."""

    moves: tuple[Move, ...]
    time: Seconds
    temporary_bytes: int


def redistribute(num_bytes: int, source: Place, target: Place, degrees: tuple[int, ...], machine: Machine) -> Redistribution:
    """A tensor of `num_bytes` in all, from `source` to `target` over the axes of `degrees`, innermost last.

    A target is never PARTIAL: in a backward pass a whole gradient serves as well.
    """
    found = tuple(moves(num_bytes, source, target, degrees))
    time, total = ZERO, math.prod(degrees)
    for move in found:
        stride = math.prod(degrees[move.axis + 1 :])
        where = place_axis(degrees[move.axis], stride, total, machine.cluster.gpus_per_node)
        time += collective_time(move.collective, move.num_bytes, where, machine)
    return Redistribution(found, time, max((move.left_bytes for move in found), default=0))


def moves(num_bytes: int, source: Place, target: Place, degrees: tuple[int, ...]) -> Iterator[Move]:
    """The collectives from `source` to `target`, in order; axes of one rank take none."""
    here = [place if p > 1 else goal for p, place, goal in zip(degrees, source, target, strict=True)]

    def local() -> int:
        return -(-num_bytes // placed_parts(tuple(here), degrees))

    for axis in _cuts_in_the_way(here, target):
        here[axis] = None
        yield Move(Collective.ALL_GATHER, axis, local(), local())
    while (following := _next_axis(here, target)) is not None:
        collective, before = _collective(here[following], target[following]), local()
        here[following] = target[following]
        if collective is not None:
            yield Move(collective, following, local() if collective is Collective.ALL_GATHER else before, local())


def _cuts_in_the_way(here: list[str | None], target: Place) -> list[int]:
    """Axes, innermost first, whose cut is inside one of the same dim that comes or goes."""
    return [
        axis for axis in reversed(range(len(here)))
        if here[axis] not in (None, PARTIAL)
        and any((here[outer] == here[axis]) != (target[outer] == here[axis]) for outer in range(axis))]


def _next_axis(here: list[str | None], target: Place) -> int | None:
    """The axis to change next: the cheapest kind of step first; a cut waits for those outside it of the same dim."""
    open_axes = [axis for axis in range(len(here)) if here[axis] != target[axis]]
    ready = [
        axis for axis in open_axes
        if target[axis] is None or all(target[axis] not in (here[outer], target[outer]) for outer in open_axes if outer < axis)]

    def order(axis: int) -> tuple[int, int]:
        kind = _ORDER[_collective(here[axis], target[axis])]
        return kind, -axis if target[axis] is None else axis

    return min(ready, key=order, default=None)


_ORDER = {
    kind: rank for rank, kind in enumerate(
        (None, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL, Collective.ALL_REDUCE, Collective.ALL_GATHER))}


def _collective(place: str | None, goal: str | None) -> Collective | None:
    """What one axis runs from `place` to `goal`, which differ; None: a slice."""
    if place is None:
        return None
    if place == PARTIAL:
        return Collective.REDUCE_SCATTER if goal else Collective.ALL_REDUCE
    return Collective.ALL_TO_ALL if goal else Collective.ALL_GATHER
