"""The median step of a log beside its plan becomes a measured run, like a run.json."""

from __future__ import annotations

from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.stage_costs import step_costs
from parplan.costmodels.step import simulated_step
from parplan.costmodels.strategy import Strategy
from parplan.planner.calibration.measured_run import MeasuredRun
from parplan.planner.logs.logged_run import LoggedRun
from parplan.planner.logs.measured_row import step_seconds
from parplan.planner.plan.plan import Plan
from parplan.planner.runs.run_file import WHOLE_RANK
from parplan.planner.runs.timelines import Key
from parplan.profiles.documents.bounded import fingerprint_of
from parplan.profiles.documents.files import changed_on
from parplan.profiles.machines.driver_names import torch_name
from parplan.profiles.machines.user_profile import FINGERPRINT_DIGITS

_STEP: Key = ("step", WHOLE_RANK)


def measured_by_log(run: LoggedRun, plan: Plan) -> MeasuredRun:
    """Returns the measurement of a log that ran as `plan` says: the step as a whole."""
    fingerprint = fingerprint_of(run.path, FINGERPRINT_DIGITS)
    date = changed_on(run.path)
    step_s = step_seconds(run.middle, run, plan)
    return MeasuredRun(
        name=str(run.path),
        fingerprint=fingerprint,
        source=f"{run.format.framework} log {fingerprint} of {date}",
        date=date,
        device=torch_name(plan.cluster.device.name),
        plan=plan,
        step_s=step_s,
        parts={_STEP: step_s},
        priced_parts=_priced_step,
        allocator_share=_allocator_share(run),
    )


def _priced_step(strategy: Strategy, price_cache: PriceCache) -> dict[Key, float]:
    return {_STEP: simulated_step(strategy, step_costs(strategy, price_cache)).step_s}


def _allocator_share(run: LoggedRun) -> float | None:
    """Share that the allocator reserved beyond allocated bytes, None where one is not known."""
    if run.allocated_bytes is None or run.reserved_bytes is None:
        return None
    return round(run.reserved_bytes / run.allocated_bytes - 1, 4)
