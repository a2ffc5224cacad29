"""The memory margin as a probability: what keeps a stated risk (EQUATIONS E2).

The excess of a measured run is the memory that it needed beyond its prediction, over the
prediction. A plan that fills its device but for a margin m runs out where its excess is above
m / (1 - m). The margin at a risk is that of the excess that one more run, like the measured ones,
is above with that probability: with n runs in order, of the run at place ceil((n + 1) (1 - risk))
(Lei et al. 2018, doi:10.1080/01621459.2017.1307116, section 2).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from parplan.planner.plan.traits import STACK
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.deviations import shipped_deviations
from parplan.profiles.machines.stack_terms import EVERY_STACK, LEAST_MARGIN, shipped_terms

DEFAULT_RISK = 0.05  # of a plan that fills its device but for the default margin, assumed
ENOUGH_RUNS = round(1 / DEFAULT_RISK) - 1  # the fewest that tell this risk by themselves


@dataclass(frozen=True, slots=True, kw_only=True)
class RiskMargin:
    """A share of a device, and the measured runs that it rests on, those of `stack`."""

    share: float
    rows: int
    stack: str


@functools.cache
def margin_at(risk: float, stack: str, *, without: str | None = None) -> RiskMargin:
    """Returns the margin with which a plan that fills it runs out with probability `risk`.

    The runs are those of the stack where they are enough to tell the risk, else those of every
    stack. `without` leaves an experiment out. The margin is at least 4 %, since most runs tell
    nothing of fragmentation.

    Raises ConfigError for a risk that the runs of every stack are too few to tell.
    """
    runs = [each for each in shipped_deviations() if each.experiment != without]
    every = [run.excess for run in runs if run.excess is not None]
    own = [run.excess for run in runs if run.excess is not None and STACK + stack in run.traits]
    for name, excesses in ((stack, own), (EVERY_STACK, every)):
        excess = _quantile(excesses, 1 - risk)
        if excess is not None:
            share = max(LEAST_MARGIN, round(excess / (1 + excess), 4))
            return RiskMargin(share=share, rows=len(excesses), stack=name)
    least = 1 / (len(every) + 1)
    raise ConfigError(
        f"--oom-risk is {risk:g}, {len(every):,} measured runs tell no risk below {least:.2g}",
        hint=f"use {math.ceil(1000 * least) / 10:g}%, or state --memory-margin",
    )


@functools.cache
def default_margin(stack: str) -> RiskMargin:
    """Returns the margin that a stack has where no option states one (EQUATIONS E2).

    It is that at the risk of 5 % where the stack has the 19 runs that tell this risk. Where it has
    fewer, the margin of the run with the largest excess is drawn towards the margin of all stacks,
    the more the fewer they are.
    """
    runs = [run for run in shipped_deviations() if STACK + stack in run.traits]
    own = [run.excess for run in runs if run.excess is not None]
    if len(own) >= ENOUGH_RUNS:
        return margin_at(DEFAULT_RISK, stack)
    every = shipped_terms().residuals[EVERY_STACK]
    if not own:
        return RiskMargin(share=every.memory_margin, rows=every.memory_rows, stack=EVERY_STACK)
    worst = max(LEAST_MARGIN, max(own) / (1 + max(own)))
    weight = len(own) / ENOUGH_RUNS
    share = round(weight * worst + (1 - weight) * every.memory_margin, 4)
    return RiskMargin(share=share, rows=len(own), stack=stack)


def _quantile(values: Iterable[float], share: float) -> float | None:
    """Returns the value that `share` of the values and of one more do not exceed, None if few."""
    ordered = sorted(values)
    place = math.ceil((len(ordered) + 1) * share - 1e-9)
    return ordered[place - 1] if 0 < place <= len(ordered) else None
