"""A measured run of a plan, whatever recorded it: the one input of the factors of a calibration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import median

from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.stage_costs import step_costs
from parplan.costmodels.strategy import Strategy
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.plan_strategy import prices_of_plan
from parplan.planner.runs.run_file import RunFile, run_fingerprint
from parplan.planner.runs.timelines import Key, parts_s

PricedParts = Callable[[Strategy, PriceCache], Mapping[Key, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """The measurements of one run beside its plan.

    name             the file, for messages
    source           the kind of the record, its fingerprint and its date, for the factors
    device           the device's name as torch or its driver says it
    step_s           the median step, None where only parts were measured
    parts            measured seconds of parts of the step
    priced_parts     returns the priced seconds of the same parts
    allocator_share  the most that the allocator reserved beyond allocated bytes, None if unknown
    """

    name: str
    fingerprint: str
    source: str
    date: str
    device: str
    plan: Plan
    step_s: float | None
    parts: Mapping[Key, float]
    priced_parts: PricedParts
    allocator_share: float | None = None


def plain_prices(plan: Plan) -> PriceCache:
    """Returns the prices of a plan without the calibration that it was made with."""
    return prices_of_plan(replace(plan, cluster=replace(plan.cluster, calibration=None)))


def in_proportion(seconds: float, priced_s: Mapping[Key, float]) -> dict[Key, float]:
    """Divides the seconds of parts that were measured together as their prices are."""
    return {key: seconds * each / sum(priced_s.values()) for key, each in priced_s.items()}


def run_measured(run: RunFile, name: str) -> MeasuredRun:
    """Returns the measurements of a run.json. Raises ConfigError for a traced module's."""
    fingerprint = run_fingerprint(run)
    return MeasuredRun(
        name=name,
        fingerprint=fingerprint,
        source=f"run {fingerprint} of {run.date}",
        date=run.date,
        device=run.environment.device,
        plan=run.the_plan(name),
        step_s=median(run.steps.seconds[-run.recorded_steps :]),
        parts={(part.work, part.stage): part.measured_s for part in run.parts if part.measured_s},
        priced_parts=lambda strategy, price_cache: parts_s(
            strategy, step_costs(strategy, price_cache)
        ),
        allocator_share=_allocator_share(run),
    )


def _allocator_share(run: RunFile) -> float | None:
    """Largest share that the allocator reserved beyond allocated bytes, None without CUDA."""
    peaks = [
        (rank.peak_allocated_bytes.measured, rank.peak_reserved_bytes.measured)
        for rank in run.ranks
    ]
    shares = [reserved / allocated - 1 for allocated, reserved in peaks if allocated and reserved]
    return round(max(shares), 4) if shares else None
