"""How far measurements were from predictions: the error band of a plan, and the share of a device
that a search keeps free.

Both come from the residuals in profiles/data/terms.yaml: of the stack that runs the plan, or of all
stacks where it has too few measured rows of its own.
"""

from __future__ import annotations

from parplan.planner.plan.prediction import Band, ErrorBand
from parplan.planner.request import SearchOptions
from parplan.profiles.machines.shipped_profiles import Machine
from parplan.profiles.machines.stack_terms import (
    EVERY_STACK,
    LEAST_MARGIN,
    Residuals,
    Terms,
    shipped_terms,
)
from parplan.profiles.stack import Stack


def stack_band(stack_name: str, terms: Terms | None = None) -> ErrorBand:
    """The error band of predictions for a stack, on a device that was measured."""
    terms = shipped_terms() if terms is None else terms
    found = terms.residuals_of(stack_name)
    return ErrorBand(
        time=Band(share=found.time_band, rows=found.time_rows, stack=terms.time_stack(stack_name)),
        memory=Band(
            share=found.memory_band, rows=found.memory_rows, stack=terms.memory_stack(stack_name)
        ),
    )


def error_band(machine: Machine, stack: Stack) -> ErrorBand | None:
    """The error band of a plan, or None where no kernel of the device, nor of one with the same
    chip, was measured.

    The measured steps were priced by shipped curves: of prices by a machine's own profile they say
    nothing.
    """
    known = machine.cluster.profile is None and machine.profile.compute.forward.rows
    return stack_band(stack.name, shipped_terms()) if known else None


def residuals_of(stack: Stack) -> Residuals:
    """The residuals that the band and the default margin of a stack are taken from."""
    return shipped_terms().residuals_of(stack.name)


def memory_margin(stack: Stack, options: SearchOptions) -> float:
    """The share of a device that is kept free: what was asked for, or what the stack's measured
    runs ask for.
    """
    return (
        residuals_of(stack).memory_margin
        if options.memory_margin is None
        else options.memory_margin
    )


def margin_text(stack: Stack) -> str:
    """Where the default margin of a stack comes from."""
    found, whose = residuals_of(stack), shipped_terms().memory_stack(stack.name)
    runs = f"{found.memory_rows:,} measured runs" + (
        " of other stacks" if whose == EVERY_STACK else ""
    )
    return (
        f"the least; {runs} ask for no more"
        if found.memory_margin <= LEAST_MARGIN
        else f"from {runs}"
    )
