"""The schedules, kinds of recompute and orders of mesh axes that a software stack runs.

A search uses no others, and a pin that the stack lacks is an error.
"""

from __future__ import annotations

from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.request import Constraints
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.machine_catalog import load_stack, stack_names
from parplan.profiles.stack import Stack


def lacking_schedule(layout: ParallelLayout, stack: Stack) -> str | None:
    """Returns why the stack does not run the pipeline of a layout, or None.

    1F1B with too few micro-batches to fill the pipeline is GPipe: every forward pass comes before
    the first backward pass on rank 0.
    """
    unfilled = layout.schedule is Schedule.GPIPE and layout.num_micro_batches < layout.mesh.pp
    runs = (
        Schedule.ONE_F_ONE_B
        if unfilled and Schedule.GPIPE.value not in stack.schedules
        else layout.schedule
    )
    if layout.mesh.pp == 1 or runs.value in stack.schedules:
        return None
    return f"{stack.name} does not run {layout.schedule}"


# fields of a stack that limit a choice, by the field of the choice's pin
_RUNS = {
    "schedule": "schedules",
    "recompute": "recompute",
    "mesh_order": "mesh_orders",
    "context_form": "context_forms",
}


# degrees that need a fact of the stack where they are more than 1
_DIVIDES = {"cp": ("context_forms", "sequences"), "etp": ("divides_experts", "single experts")}


def require_stack_runs(stack: Stack, pins: Constraints) -> None:
    """Raises ConfigError for the first pinned choice that the stack does not run."""
    for name, (field, what) in _DIVIDES.items():
        degrees = getattr(pins, name) or (1,)
        if 1 not in degrees and not getattr(stack, field):
            able = [each for each in stack_names() if getattr(load_stack(each), field)]
            raise ConfigError(
                f"--{name} {','.join(map(str, degrees))}: the stack {stack.name} divides no {what}",
                hint=f"choose a --stack that does: {', '.join(able)}",
            )
    for name, field in _RUNS.items():
        has = getattr(stack, field)
        pinned = getattr(pins, name) or ()
        lacking = next((value for value in pinned if value not in has), None)
        if lacking is not None:
            able = [each for each in stack_names() if lacking in getattr(load_stack(each), field)]
            raise ConfigError(
                f"--{name.replace('_', '-')} {lacking}: the stack {stack.name} does not run it, "
                f"it runs {', '.join(has) or 'none'}",
                hint=f"choose a --stack that does: {', '.join(able)}",
            )
