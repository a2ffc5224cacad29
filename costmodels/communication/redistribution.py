"""From one placement of a tensor to another: the collectives that run, their seconds and their
temporary bytes.

On each axis of the mesh a tensor is whole, divided along one of its dims, or a partial sum
(EQUATIONS S2):

    whole   -> divided    a slice of what is there, nothing is sent
    partial -> divided    reduce-scatter of the local bytes
    divided -> another    all-to-all of the local bytes
    partial -> whole      all-reduce of the local bytes
    divided -> whole      all-gather to what is local afterwards

axis by axis in the order of torch's DTensor, which a test counts. A dim that several axes divide is
cut by the outer axis
first: to take away an outer cut, the cuts inside it are gathered before and made again after.
Between CPUs torch runs an all-gather where this says all-to-all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from parplan.costmodels.communication.collectives import Collective, collective_time
from parplan.costmodels.communication.mesh import place_axis
from parplan.costmodels.operators.sharding import PARTIAL, Place, placed_parts
from parplan.profiles.machines.shipped_profiles import Machine
from parplan.profiles.provenance import ZERO, Seconds


@dataclass(frozen=True, slots=True)
class RedistributionStep:
    """One collective over the axis `axis` of `num_bytes`, counted as `collective_time` counts them;
    it leaves `left_bytes`.
    """

    collective: Collective
    axis: int
    num_bytes: int
    left_bytes: int


@dataclass(frozen=True, slots=True)
class Redistribution:
    """The collectives in order, their time, and the most bytes that a step writes beside its
    input.
    """

    moves: tuple[RedistributionStep, ...]
    time: Seconds
    temporary_bytes: int


def redistribute(
    num_bytes: int, source: Place, target: Place, degrees: tuple[int, ...], machine: Machine
) -> Redistribution:
    """A tensor of `num_bytes` in all, from `source` to `target` over the axes of `degrees`,
    innermost last.

    A target is never PARTIAL: in a backward pass a whole gradient serves as well.
    """
    found = tuple(moves(num_bytes, source, target, degrees))
    time, total = ZERO, math.prod(degrees)
    for move in found:
        stride = math.prod(degrees[move.axis + 1 :])
        where = place_axis(degrees[move.axis], stride, total, machine.cluster.gpus_per_node)
        time += collective_time(move.collective, move.num_bytes, where, machine)
    return Redistribution(found, time, max((move.left_bytes for move in found), default=0))


def moves(
    num_bytes: int, source: Place, target: Place, degrees: tuple[int, ...]
) -> Iterator[RedistributionStep]:
    """The collectives from `source` to `target`, in the order of torch's DTensor; axes of one rank
    take none.
    """
    here = [
        place if p > 1 else goal for p, place, goal in zip(degrees, source, target, strict=True)
    ]

    def local() -> int:
        return -(-num_bytes // placed_parts(tuple(here), degrees))

    for axis, goal in (
        *_inward_out(tuple(here), target),
        *((axis, goal) for axis, goal in enumerate(target)),
    ):
        if here[axis] == goal:
            continue
        collective, before = _collective(here[axis], goal), local()
        here[axis] = goal
        if collective is not None:
            yield RedistributionStep(
                collective,
                axis,
                local() if collective is Collective.ALL_GATHER else before,
                local(),
            )


def _inward_out(source: Place, target: Place) -> Iterator[tuple[int, str | None]]:
    """The first walk, from the innermost axis: to its target, or whole where axes outside cut the
    target's dim in another way.

    Only a tensor that is divided somewhere is walked so: cuts inside one another are then taken
    away before they are made.
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
    """What one axis runs from `place` to `goal`, which differ; None: a slice."""
    if place is None:
        return None
    if place == PARTIAL:
        return Collective.REDUCE_SCATTER if goal else Collective.ALL_REDUCE
    return Collective.ALL_TO_ALL if goal else Collective.ALL_GATHER
