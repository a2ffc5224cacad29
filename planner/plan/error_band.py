"""The error band of a plan, and the share of a device that a search keeps free.

The band of a plan is by its traits (conformal.py), from the runs in profiles/data/deviations.csv.
The band of a stack is the residuals of the stack in profiles/data/terms.yaml, or those of all
stacks where it has too few measured rows. The memory margin is by its runs (oom_risk.py).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from parplan.planner.plan.conformal import ConformalBands, Deviating
from parplan.planner.plan.oom_risk import ENOUGH_RUNS, default_margin, margin_at
from parplan.planner.plan.prediction import Band, ErrorBand
from parplan.planner.plan.traits import Run, family_of, traits_of
from parplan.planner.request import SearchOptions
from parplan.profiles.machines.deviations import shipped_deviations
from parplan.profiles.machines.stack_terms import (
    EVERY_STACK,
    LEAST_MARGIN,
    Terms,
    shipped_terms,
)
from parplan.profiles.models.spec import ModelSpec, TrainingSpec
from parplan.profiles.stack import Stack

# runs of no effect that each trait begins with: of 2 to 1,000 about those whose bands have the
# least interval score (Gneiting & Raftery 2007, equation 43) on runs that were left out
TIME_PRIOR_ROWS = 80.0
MEMORY_PRIOR_ROWS = 5.0


def stack_band(stack_name: str, terms: Terms | None = None) -> ErrorBand:
    """Returns the error band of predictions for a stack, on a device that was measured."""
    terms = shipped_terms() if terms is None else terms
    residuals = terms.residuals_of(stack_name)
    return ErrorBand(
        time=Band(
            share=residuals.time_band, rows=residuals.time_rows, stack=terms.time_stack(stack_name)
        ),
        memory=Band(
            share=residuals.memory_band,
            rows=residuals.memory_rows,
            stack=terms.memory_stack(stack_name),
        ),
    )


def error_band(run: Run) -> ErrorBand:
    """Returns the error band of a plan by its traits, from measured runs of every stack.

    The bands of a machine that nobody measured are those of measured ones, widened as runs on
    computed kernels were.
    """
    traits = traits_of(run)
    times, memories = shipped_bands()
    return ErrorBand(time=_band(times, traits), memory=_band(memories, traits))


def _band(bands: ConformalBands, traits: Sequence[str]) -> Band:
    return Band(
        share=round(bands.share(traits), 3),
        rows=bands.num_rows,
        stack=EVERY_STACK,
        like={trait: bands.rows_of.get(trait, 0) for trait in traits},
    )


@functools.cache
def shipped_bands() -> tuple[ConformalBands, ConformalBands]:
    """Returns the bands of step times and of peak memories, from profiles/data/deviations.csv."""
    runs = shipped_deviations()
    times = [Deviating(r.id, r.experiment, r.traits, r.time) for r in runs if r.time is not None]
    memories = [
        Deviating(r.id, r.experiment, r.traits, r.memory) for r in runs if r.memory is not None
    ]
    return ConformalBands(times, TIME_PRIOR_ROWS), ConformalBands(memories, MEMORY_PRIOR_ROWS)


def without_steps(model: ModelSpec, training: TrainingSpec) -> str | None:
    """Returns what no measured step has, so that a plan with it has no band, or None."""
    return next(
        (
            what
            for what, is_there in (
                ("models with a tower", model.tower),
                ("training in part", training.fine_tuning),
                ("packed documents", training.documents),
            )
            if is_there
        ),
        None,
    )


def memory_margin(stack: Stack, options: SearchOptions) -> float:
    """Returns the share of a device that is kept free: the request's, or else the stack's.

    Raises ConfigError for a risk that no measured runs tell.
    """
    if options.memory_margin is not None:
        return options.memory_margin
    if options.oom_risk is not None:
        return margin_at(options.oom_risk, family_of(stack)).share
    return default_margin(family_of(stack)).share


def margin_text(stack: Stack, options: SearchOptions) -> str:
    """Returns the source of a margin that no option states as text."""
    if options.oom_risk is not None:
        margin = margin_at(options.oom_risk, family_of(stack))
        whose = "every stack" if margin.stack == EVERY_STACK else margin.stack
        return f"from --oom-risk {options.oom_risk:g} and {margin.rows:,} measured runs of {whose}"
    margin = default_margin(family_of(stack))
    runs = f"{margin.rows:,} measured runs"
    if margin.stack == EVERY_STACK:
        return f"from {runs} of other stacks"
    if margin.share <= LEAST_MARGIN:
        return f"the least; {runs} ask for no more"
    return f"from {runs}" + (
        " and, as these are few, those of other stacks" if margin.rows < ENOUGH_RUNS else ""
    )
