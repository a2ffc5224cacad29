"""The error band of the ratio of two plans' steps, for one model, machine and stack.

Most of an error is common to such plans, so that the prices know better which of them is faster
than how long either takes. The band is conformal as that of a step (conformal.py), from pairs of
measured runs of one grid: that which was predicted to be the fastest, and each other one. Some
differ in their sequence length, precision or release too, which widens the band. With m the
measured and p the predicted seconds of a pair,

    d = (m_other / m_fastest) / (p_other / p_fastest) - 1         (EQUATIONS E3)

The traits of a pair are those of its fastest run and the degrees in which the two differ. A stack
whose own pairs ask for a wider band has it, since few pairs move the effect of a trait little.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from parplan.costmodels.communication.mesh import Mesh
from parplan.planner.plan.conformal import ConformalBands, Deviating
from parplan.planner.plan.pipeline_plan import PipelinePlan
from parplan.planner.plan.prediction import ErrorBand
from parplan.planner.plan.traits import STACK
from parplan.profiles.machines.deviations import shipped_deviations

# Pairs of no effect that each trait begins with. The interval score (Gneiting & Raftery 2007,
# equation 43) of pairs that were left out is within 1 % of its least from 20 to 320; 20 tells most.
PRIOR_PAIRS = 20.0

Shape = tuple[str, ...]


class Shaped(Protocol):
    """A plan, or a runner-up of one."""

    @property
    def mesh(self) -> Mesh: ...

    @property
    def pipeline(self) -> PipelinePlan: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GridRun:
    """A measured run of a grid, with measured / predicted - 1 of its step.

    grid    the runs of one source, model, machine and number of tokens of a step; empty for none
    """

    id: str
    experiment: str
    grid: str
    traits: tuple[str, ...]
    shape: Shape
    predicted_s: float
    deviation: float


def shape_of(mesh: Mesh, micro_batch_size: int) -> Shape:
    """Returns the degrees that tell a plan from others of its model, machine and stack."""
    return (
        f"tp {mesh.tp}",
        f"pp {mesh.pp}",
        f"cp {mesh.cp}",
        f"ep {mesh.ep}",
        f"micro-batch {micro_batch_size}",
    )


def differences(one: Shape, other: Shape) -> tuple[str, ...]:
    """Returns a trait for each degree in which two shapes differ."""
    return tuple(
        f"another {mine.split()[0]}"
        for mine, theirs in zip(one, other, strict=True)
        if mine != theirs
    )


def pairs_of(runs: Iterable[GridRun]) -> list[Deviating]:
    """Returns the fastest run of each grid, as it was predicted, beside each other one."""
    grids: dict[str, list[GridRun]] = {}
    for run in runs:
        if run.grid:
            grids.setdefault(run.grid, []).append(run)
    found = []
    for grid in grids.values():
        fastest = min(grid, key=lambda run: run.predicted_s)
        found += [
            Deviating(
                id=f"{fastest.id} {other.id}",
                experiment=fastest.experiment,
                traits=(*fastest.traits, *differences(fastest.shape, other.shape)),
                deviation=(1 + other.deviation) / (1 + fastest.deviation) - 1,
            )
            for other in grid
            if other.predicted_s != fastest.predicted_s  # repeats compare no plans
        ]
    return found


@functools.cache
def shipped_ratio_bands() -> ConformalBands:
    """Returns the bands of ratios, from the grids of profiles/data/deviations.csv."""
    return ConformalBands(
        pairs_of(
            GridRun(
                id=run.id,
                experiment=run.experiment,
                grid=run.grid,
                traits=run.traits,
                shape=run.shape,
                predicted_s=run.predicted_s,
                deviation=run.time,
            )
            for run in shipped_deviations()
            if run.time is not None and run.predicted_s is not None
        ),
        PRIOR_PAIRS,
        own=STACK,
    )


def ratio_share(band: ErrorBand, one: Shape, other: Shape) -> float:
    """Returns the band of another plan's step over that of the plan whose error band is `band`.

    It is +- a share of the predicted ratio. The error band holds the traits of the plan.
    """
    return shipped_ratio_bands().share((*band.time.like, *differences(one, other)))


def ratio_shares(band: ErrorBand, one: Shape, others: Sequence[Shape]) -> list[float]:
    """Returns the band of the ratio of each other plan's step to that of one."""
    return [ratio_share(band, one, other) for other in others]


def plan_shape(plan: Shaped) -> Shape:
    """Returns the shape of a plan or of a runner-up."""
    return shape_of(plan.mesh, plan.pipeline.micro_batch_size)
