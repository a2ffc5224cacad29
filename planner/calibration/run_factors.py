"""Runs -> a hardware profile of the user's own: the factors with which the prices give the times
that were measured.

The unknowns are the logarithms of the factors x_c of a few causes c
(profiles/machines/calibration_factors.py), the equations the parts of the
runs: forward and backward seconds of every stage, reduction and optimizer of every rank, waits for
transfers,

    min over x of  sum_i (ln predicted_i(x) - ln measured_i)^2

by Gauss-Newton on the plans priced again; relative errors count alike. Prices are nearly products
of powers of the factors (exactly so where nothing is hidden under anything), so that two or three
iterations are enough.

What no equation depends on is left alone. Where the equations cannot tell tensor-parallel or
data-parallel communication from the compute around it (a single run at tp 2 says only what both
take together), it gets the geometric mean of the factors of the two passes; a run at tp 1 (or dp 1)
beside it tells them apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.step import StepCosts, simulated_step, step_costs
from parplan.costmodels.strategy import Strategy
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.plan_strategy import strategy_of
from parplan.planner.runs.run_file import RunFile, run_fingerprint
from parplan.planner.runs.timelines import Key, parts_s
from parplan.profiles.catalog import cluster_document, cluster_names
from parplan.profiles.documents.schema import document
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.calibration_factors import CAUSES, UNCHANGED, Calibration, Factor
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.machines.speeds import Profile
from parplan.profiles.machines.user_profile import (
    PROFILE_VERSION,
    ProfiledRun,
    UserProfile,
    digest,
    prices_fingerprint,
)

PASSES = ("forward", "backward")
BETWEEN = ("tensor", "data")  # what runs inside the passes, and may not be told from them
# of a doubled factor on the part that it moves most, in doublings: below it the runs say nothing of
# it
LEAST_EFFECT = 0.02
# of the equations with columns of one length; beyond it a few percent of noise decide the factor
MOST_CONDITION = 10.0
_STEP = 1e-4  # of the logarithms, for the derivatives
_ITERATIONS = 25
_PRECISE = 1e-10

Row = tuple[int, Key]  # of which run, which part


@dataclass(frozen=True, slots=True)
class PricedRun:
    """A run with its plan, without the calibration that the plan may have been made with."""

    run: RunFile
    plan: Plan
    strategy: Strategy

    def costs(self, calibration: Calibration | None) -> StepCosts:
        return step_costs(self.strategy, _price_cache(self.plan, calibration))

    def parts_s(self, calibration: Calibration | None) -> dict[Key, float]:
        return parts_s(self.strategy, self.costs(calibration))

    def step_s(self, calibration: Calibration | None) -> float:
        return simulated_step(self.strategy, self.costs(calibration)).step_s


def calibrate(runs: Sequence[RunFile], names: Sequence[str]) -> UserProfile:
    """The profile that `runs`, which `names` say where from, make. Raises ConfigError: not of one
    device, stack and precision.
    """
    priced = [_priced(run, name) for run, name in zip(runs, names, strict=True)]
    _require_alike(priced, names)
    calibration = _Equations(priced).solve()
    plan = priced[0].plan
    measured = plan.cluster.profile
    return UserProfile(
        profile_version=PROFILE_VERSION,
        fingerprint=prices_fingerprint(plan.cluster, plan.training.stack),
        device=plan.cluster.device.name,
        calibration=calibration,
        allocator_share=allocator_share(runs),
        runs=tuple(_source(one, calibration) for one in priced),
        precision=plan.training.precision.value if measured else None,
        profile=measured,
        cluster=cluster_document(replace(plan.cluster, calibration=None, profile=None))
        if measured
        else None,
    )


def _price_cache(plan: Plan, calibration: Calibration | None) -> PriceCache:
    return PriceCache(
        plan.model, plan.training, machine_for(replace(plan.cluster, calibration=calibration))
    )


def _priced(run: RunFile, name: str) -> PricedRun:
    plan = run.the_plan(name)
    return PricedRun(run, plan, strategy_of(plan, _price_cache(plan, None)))


def _require_alike(priced: Sequence[PricedRun], names: Sequence[str]) -> None:
    first = priced[0].plan
    for one, name in zip(priced, names, strict=True):
        plan = one.plan
        for what, expected, found in (
            ("device", first.cluster.device.name, plan.cluster.device.name),
            ("software stack", first.training.stack.name, plan.training.stack.name),
            ("precision", first.training.precision.value, plan.training.precision.value),
        ):
            if expected != found:
                raise ConfigError(
                    f"{name}: its {what} is {found}, that of {names[0]} is {expected}",
                    hint="make one profile for each of them",
                )
        if measured_digest(plan.cluster.profile) != measured_digest(first.cluster.profile):
            raise ConfigError(
                f"{name}: its plan was made with other measured curves than that of {names[0]}",
                hint="make one profile for each of them",
            )
        if not _ran_on(plan.cluster.device.name, one.run.environment.device):
            raise ConfigError(
                f"{name}: the plan is for {plan.cluster.device.name}, the run was on "
                f"{one.run.environment.device}",
                hint="calibrate with a run on that device",
            )


def measured_digest(profile: Profile | None) -> str | None:
    """Of the curves that a machine's own profile has, None without one."""
    return None if profile is None else digest(repr(document(profile)))


def _ran_on(device: str, found: str) -> bool:
    """Whether a run on what torch calls `found` (NVIDIA A100-SXM4-80GB) can be one on `device`; of
    names of one's own only if a CPU.
    """
    chip = device.split("-")[0]
    if chip in {name.split("-")[0] for name in cluster_names()}:
        return chip in found.lower().replace(" ", "")
    return found != "cpu"


def allocator_share(runs: Sequence[RunFile]) -> float | None:
    """The largest share that the allocator held beyond what was allocated; None where no run saw a
    CUDA allocator.
    """
    peaks = [
        (rank.peak_allocated_bytes.measured, rank.peak_reserved_bytes.measured)
        for run in runs
        for rank in run.ranks
    ]
    shares = [reserved / allocated - 1 for allocated, reserved in peaks if allocated and reserved]
    return round(max(shares), 4) if shares else None


def _source(one: PricedRun, calibration: Calibration) -> ProfiledRun:
    return ProfiledRun(
        fingerprint=run_fingerprint(one.run),
        date=one.run.date,
        model=one.plan.model.name,
        mesh=str(one.plan.mesh),
        measured_s=median(one.run.steps.seconds[-one.run.recorded_steps :]),
        priced_s=one.step_s(None),
        calibrated_s=one.step_s(calibration),
    )


class _Equations:
    """The parts of the runs as functions of the logarithms of the factors."""

    def __init__(self, priced: Sequence[PricedRun]) -> None:
        self.priced = priced
        plan = priced[0].plan
        self.none = Calibration(
            stack=plan.training.stack.name, precision=plan.training.precision.value
        )
        self.rows, self.measured = self._rows()

    def _rows(self) -> tuple[list[Row], np.ndarray]:
        """The parts with a price and a measurement above zero."""
        found: dict[Row, float] = {}
        for index, one in enumerate(self.priced):
            prices = one.parts_s(None)
            for part in one.run.parts:
                if part.measured_s and prices.get((part.work, part.stage), 0.0) > 0.0:
                    found[index, (part.work, part.stage)] = part.measured_s
        if not found:
            raise ConfigError(
                "the runs measured no part of a step that has a price",
                hint="run the plan with --steps 5 or more",
            )
        return list(found), np.log(np.array(list(found.values())))

    def calibration(self, logarithms: Mapping[str, float]) -> Calibration:
        factors: dict[str, Any] = {
            cause: Factor(value=math.exp(x), measured=True, source="")
            for cause, x in logarithms.items()
        }
        return replace(self.none, **factors)

    def predicted(self, own: Sequence[str], tied: Sequence[str], x: np.ndarray) -> np.ndarray:
        """Logarithms of the parts."""
        calibration = self.calibration(self._all(own, tied, x))
        prices = [one.parts_s(calibration) for one in self.priced]
        found: np.ndarray = np.log(np.array([prices[index][key] for index, key in self.rows]))
        return found

    @staticmethod
    def _all(own: Sequence[str], tied: Sequence[str], x: np.ndarray) -> dict[str, float]:
        found = {cause: float(value) for cause, value in zip(own, x, strict=True)}
        passes = [found[cause] for cause in PASSES if cause in found]
        return found | dict.fromkeys(tied, sum(passes) / len(passes) if passes else 0.0)

    def jacobian(self, own: Sequence[str], tied: Sequence[str], x: np.ndarray) -> np.ndarray:
        base = self.predicted(own, tied, x)
        columns = [
            (self.predicted(own, tied, x + _STEP * unit) - base) / _STEP
            for unit in np.eye(len(own))
        ]
        return np.array(columns).T

    def solve(self) -> Calibration:
        """The factors of what the runs exercised, with where each comes from."""
        effect = self.jacobian(CAUSES, (), np.zeros(len(CAUSES)))
        exercised = [
            cause
            for cause, column in zip(CAUSES, effect.T, strict=True)
            if np.abs(column).max() > LEAST_EFFECT
        ]
        own, tied = self._told_apart(exercised)
        x = self._least_squares(own, tied)
        runs = ", ".join(run_fingerprint(one.run) for one in self.priced)
        sources = dict.fromkeys(own, f"run {runs}") | dict.fromkeys(
            tied, f"run {runs}: together with compute, not told apart"
        )
        factors: dict[str, Any] = {
            cause: Factor(
                value=float(f"{math.exp(value):.6g}"), measured=True, source=sources[cause]
            )
            for cause, value in self._all(own, tied, x).items()
        }
        return replace(self.none, **factors)

    def _told_apart(self, exercised: Sequence[str]) -> tuple[list[str], list[str]]:
        """The causes that have a factor of their own, and those that follow the passes."""
        own, tied = list(exercised), list[str]()
        for cause in (None, *BETWEEN):
            if cause in own:
                own.remove(cause)
                tied.append(cause)
            if self._condition(own, tied) <= MOST_CONDITION:
                break
        return own, tied

    def _condition(self, own: Sequence[str], tied: Sequence[str]) -> float:
        if len(own) > len(self.rows):
            return math.inf
        matrix = self.jacobian(own, tied, np.zeros(len(own)))
        singular = np.linalg.svd(matrix / np.linalg.norm(matrix, axis=0), compute_uv=False)
        return float(singular[0] / singular[-1]) if singular[-1] > 0 else math.inf

    def _least_squares(self, own: Sequence[str], tied: Sequence[str]) -> np.ndarray:
        x = np.zeros(len(own))
        for _ in range(_ITERATIONS):
            short = self.measured - self.predicted(own, tied, x)
            change = np.linalg.lstsq(self.jacobian(own, tied, x), short, rcond=None)[0]
            x = x + np.clip(change, -2.0, 2.0)  # a factor of 7 at a time, so that a price stays one
            if np.abs(change).max() < _PRECISE:
                break
        return x


def unexercised(calibration: Calibration) -> tuple[str, ...]:
    """The causes that the runs said nothing of."""
    return tuple(cause for cause in CAUSES if calibration.factor(cause) == UNCHANGED)
