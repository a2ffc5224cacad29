"""The error band of a plan, and the share of a device that a search keeps free.

Both come from the residuals in profiles/data/terms.yaml. They are those of the stack that runs the
plan, or those of all stacks where it has too few measured rows.
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
from parplan.profiles.models.spec import ModelSpec, TrainingSpec
from parplan.profiles.product_formats import is_before_blackwell
from parplan.profiles.stack import Stack


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


def error_band(machine: Machine, stack: Stack) -> ErrorBand | None:
    """Returns the error band of a plan, or None on a device without measured kernels.

    Kernels of a device with the same chip count as measured. The measured steps were priced by
    shipped curves, so there is no band for prices by a user's profile.
    """
    known = machine.cluster.profile is None and machine.profile.compute.forward.rows
    return stack_band(stack.name, shipped_terms()) if known else None


def without_steps(model: ModelSpec, training: TrainingSpec, capability: float | None) -> str | None:
    """Returns what the fitted steps have nothing of, so that a plan with it has no band, or None.

    Narrow products were measured in fp8 before Blackwell alone.
    """
    narrow = training.products
    return next(
        (
            what
            for what, is_there in (
                ("models with experts, whose routing is taken as balanced", model.num_experts),
                ("models with a tower", model.tower),
                ("training in part", training.fine_tuning),
                ("packed documents", training.documents),
                (
                    f"{narrow} products on this device",
                    narrow and not is_before_blackwell(capability),
                ),
            )
            if is_there
        ),
        None,
    )


def residuals_of(stack: Stack) -> Residuals:
    """Returns the residuals that give the error band and the default margin of a stack."""
    return shipped_terms().residuals_of(stack.name)


def memory_margin(stack: Stack, options: SearchOptions) -> float:
    """Returns the share of a device that is kept free: the request's, or else the stack's."""
    if options.memory_margin is None:
        return residuals_of(stack).memory_margin
    return options.memory_margin


def margin_text(stack: Stack) -> str:
    """Returns the source of the default margin of a stack as text."""
    residuals = residuals_of(stack)
    whose = shipped_terms().memory_stack(stack.name)
    runs = f"{residuals.memory_rows:,} measured runs" + (
        " of other stacks" if whose == EVERY_STACK else ""
    )
    if residuals.memory_margin <= LEAST_MARGIN:
        return f"the least; {runs} ask for no more"
    return f"from {runs}"
