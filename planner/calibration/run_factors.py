"""Fits factors on prices to measured runs, and makes them a profile of the user's machine.

The unknowns are the logarithms of the factors x_c of a few causes c
(profiles/machines/calibration_factors.py). The equations are the parts of the runs: forward and
backward seconds of every stage, reduction and optimizer of every rank, waits for transfers,

    min over x of  sum_i (ln predicted_i(x) - ln measured_i)^2

by Gauss-Newton on the plans priced again, so that relative errors count alike. Prices are nearly
products of powers of the factors (exactly so when nothing is hidden under compute), so that two or
three iterations are enough.

A cause that no equation depends on has no factor. A single run at tp 2 tells only the sum of
tensor-parallel communication and the compute around it. Such a cause, or likewise data-parallel
communication, gets the geometric mean of the factors of the two passes; a second run at tp 1 (or
dp 1) tells them apart. Where there are fewer equations than causes, as of a log that tells the step
alone, the last causes follow the first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.stage_costs import step_costs
from parplan.costmodels.step import simulated_step
from parplan.costmodels.strategy import Strategy
from parplan.planner.calibration.measured_run import MeasuredRun
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.plan_strategy import strategy_of
from parplan.planner.runs.timelines import Key
from parplan.profiles.documents.schema import document
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.calibration_factors import CAUSES, Calibration, Factor
from parplan.profiles.machines.machine_catalog import cluster_document, cluster_names
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.machines.speeds import Profile
from parplan.profiles.machines.unequal_cluster import require_equal
from parplan.profiles.machines.user_profile import (
    PROFILE_VERSION,
    ProfiledRun,
    UserProfile,
    digest,
    prices_fingerprint,
)

PASSES = ("forward", "backward")
BETWEEN = ("tensor", "data")  # causes inside the passes, which the runs may not tell apart
# Effect of a doubled factor on the part that it moves most, in doublings; a smaller one counts as
# none.
LEAST_EFFECT = 0.02
# Condition number of the equations with normalized columns; beyond it a few percent of noise decide
# the factor.
MOST_CONDITION = 10.0
_STEP = 1e-4  # step in the logarithms, for the derivatives
_ITERATIONS = 25
_PRECISE = 1e-10

Row = tuple[int, Key]  # index of the run, part of its step


@dataclass(frozen=True, slots=True)
class PricedRun:
    """A run with its strategy, without a calibration that its plan was made with."""

    run: MeasuredRun
    strategy: Strategy

    @property
    def plan(self) -> Plan:
        return self.run.plan

    def parts_s(self, calibration: Calibration | None) -> Mapping[Key, float]:
        return self.run.priced_parts(self.strategy, _price_cache(self.plan, calibration))

    def step_s(self, calibration: Calibration | None) -> float:
        costs = step_costs(self.strategy, _price_cache(self.plan, calibration))
        return simulated_step(self.strategy, costs).step_s


def calibrate(runs: Sequence[MeasuredRun]) -> UserProfile:
    """Returns the profile that `runs` make.

    Raises ConfigError when they are not of one device, stack and precision.
    """
    priced = [PricedRun(run, strategy_of(run.plan, _price_cache(run.plan, None))) for run in runs]
    _require_alike(runs)
    calibration = _Equations(priced).solve()
    plan = priced[0].plan
    require_equal(plan.cluster, "a calibration")
    measured = plan.cluster.profile
    cluster = replace(plan.cluster, calibration=None, profile=None)
    shares = [run.allocator_share for run in runs if run.allocator_share is not None]
    return UserProfile(
        profile_version=PROFILE_VERSION,
        fingerprint=prices_fingerprint(plan.cluster, plan.training.stack),
        device=plan.cluster.device.name,
        calibration=calibration,
        allocator_share=max(shares, default=None),
        runs=tuple(_source(priced_run, calibration) for priced_run in priced),
        precision=plan.training.precision.value if measured else None,
        profile=measured,
        cluster=cluster_document(cluster) if measured else None,
    )


def _price_cache(plan: Plan, calibration: Calibration | None) -> PriceCache:
    return PriceCache(
        plan.model, plan.training, machine_for(replace(plan.cluster, calibration=calibration))
    )


def _require_alike(runs: Sequence[MeasuredRun]) -> None:
    first = runs[0].plan
    for run in runs:
        plan, name = run.plan, run.name
        for what, expected, value in (
            ("device", first.cluster.device.name, plan.cluster.device.name),
            ("software stack", first.training.stack.name, plan.training.stack.name),
            ("precision", first.training.precision.value, plan.training.precision.value),
        ):
            if expected != value:
                raise ConfigError(
                    f"{name}: its {what} is {value}, that of {runs[0].name} is {expected}",
                    hint="make one profile for each of them",
                )
        if measured_digest(plan.cluster.profile) != measured_digest(first.cluster.profile):
            raise ConfigError(
                f"{name}: its plan was made with other measured curves than that of {runs[0].name}",
                hint="make one profile for each of them",
            )
        device = plan.cluster.device.name
        if not _can_be(device, run.device):
            raise ConfigError(
                f"{name}: the plan is for {device}, the run was on {run.device}",
                hint="calibrate with a run on that device",
            )


def measured_digest(profile: Profile | None) -> str | None:
    """Returns a digest of the curves of a machine's profile, None without one."""
    return None if profile is None else digest(repr(document(profile)))


def _can_be(device: str, torch_name: str) -> bool:
    """True if `torch_name` (NVIDIA A100-SXM4-80GB) can be `device`, which users may name freely."""
    chip = device.split("-")[0]
    if chip in {name.split("-")[0] for name in cluster_names()}:
        return chip in torch_name.lower().replace(" ", "")
    return torch_name != "cpu"


def _source(priced_run: PricedRun, calibration: Calibration) -> ProfiledRun:
    run = priced_run.run
    return ProfiledRun(
        fingerprint=run.fingerprint,
        date=run.date,
        model=run.plan.model.name,
        mesh=str(run.plan.mesh),
        measured_s=run.step_s,
        priced_s=priced_run.step_s(None),
        calibrated_s=priced_run.step_s(calibration),
    )


class _Equations:
    """The parts of the runs as functions of the logarithms of the factors.

    Methods take the `free` causes with logarithms `x`, and `tied` causes, which follow the passes.
    """

    def __init__(self, priced: Sequence[PricedRun]) -> None:
        self.priced = priced
        plan = priced[0].plan
        self.none = Calibration(
            stack=plan.training.stack.name, precision=plan.training.precision.value
        )
        self.rows, self.measured = self._rows()

    def _rows(self) -> tuple[list[Row], np.ndarray]:
        """Returns the parts with a price and a measurement above zero, and log measurements."""
        measured_s: dict[Row, float] = {}
        for index, priced_run in enumerate(self.priced):
            prices = priced_run.parts_s(None)
            for part, seconds in priced_run.run.parts.items():
                if seconds > 0.0 and prices.get(part, 0.0) > 0.0:
                    measured_s[index, part] = seconds
        if not measured_s:
            raise ConfigError(
                "the runs measured no part of a step that has a price",
                hint="run the plan with --steps 5 or more, or check that --plan is of that run",
            )
        return list(measured_s), np.log(np.array(list(measured_s.values())))

    def calibration(self, logarithms: Mapping[str, float]) -> Calibration:
        factors: dict[str, Any] = {
            cause: Factor(value=math.exp(x), measured=True, source="")
            for cause, x in logarithms.items()
        }
        return replace(self.none, **factors)

    def predicted(self, free: Sequence[str], tied: Sequence[str], x: np.ndarray) -> np.ndarray:
        """Returns the logarithms of the predicted parts."""
        calibration = self.calibration(self._all(free, tied, x))
        prices = [priced_run.parts_s(calibration) for priced_run in self.priced]
        logarithms: np.ndarray = np.log(np.array([prices[run][key] for run, key in self.rows]))
        return logarithms

    @staticmethod
    def _all(free: Sequence[str], tied: Sequence[str], x: np.ndarray) -> dict[str, float]:
        logarithms = {cause: float(value) for cause, value in zip(free, x, strict=True)}
        passes = [logarithms[cause] for cause in PASSES if cause in logarithms]
        mean = sum(passes) / len(passes) if passes else 0.0
        return logarithms | dict.fromkeys(tied, mean)

    def jacobian(self, free: Sequence[str], tied: Sequence[str], x: np.ndarray) -> np.ndarray:
        base = self.predicted(free, tied, x)
        columns = [
            (self.predicted(free, tied, x + _STEP * unit) - base) / _STEP
            for unit in np.eye(len(free))
        ]
        return np.array(columns).T

    def solve(self) -> Calibration:
        """Returns the factors of the causes that the runs exercised, with their sources."""
        effect = self.jacobian(CAUSES, (), np.zeros(len(CAUSES)))
        exercised = [
            cause
            for cause, column in zip(CAUSES, effect.T, strict=True)
            if np.abs(column).max() > LEAST_EFFECT
        ]
        free, tied = self._told_apart(exercised)
        x = self._least_squares(free, tied)
        runs = ", ".join(priced_run.run.source for priced_run in self.priced)
        together = f"{runs}: together with compute, not told apart"
        factors: dict[str, Any] = {}
        for cause, logarithm in self._all(free, tied, x).items():
            value = float(f"{math.exp(logarithm):.6g}")
            source = together if cause in tied else runs
            factors[cause] = Factor(value=value, measured=True, source=source)
        return replace(self.none, **factors)

    def _told_apart(self, exercised: Sequence[str]) -> tuple[list[str], list[str]]:
        """Splits the causes into free ones, and ones tied to the passes."""
        free = list(exercised)
        tied: list[str] = []
        for cause in (None, *BETWEEN):
            if cause in free:
                free.remove(cause)
                tied.append(cause)
            if self._condition(free, tied) <= MOST_CONDITION:
                break
        while len(free) > len(self.rows):  # the step as a whole: one factor for all
            tied.append(free.pop())
        return free, tied

    def _condition(self, free: Sequence[str], tied: Sequence[str]) -> float:
        if len(free) > len(self.rows):
            return math.inf
        matrix = self.jacobian(free, tied, np.zeros(len(free)))
        singular = np.linalg.svd(matrix / np.linalg.norm(matrix, axis=0), compute_uv=False)
        return float(singular[0] / singular[-1]) if singular[-1] > 0 else math.inf

    def _least_squares(self, free: Sequence[str], tied: Sequence[str]) -> np.ndarray:
        x = np.zeros(len(free))
        for _ in range(_ITERATIONS):
            short = self.measured - self.predicted(free, tied, x)
            change = np.linalg.lstsq(self.jacobian(free, tied, x), short, rcond=None)[0]
            x = x + np.clip(change, -2.0, 2.0)  # at most a factor of 7 in one iteration
            if np.abs(change).max() < _PRECISE:
                break
        return x
