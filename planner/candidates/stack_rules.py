"""The schedules and kinds of recompute that a software stack runs.

A search uses no others, and a pin that the stack lacks is an error.
"""

from __future__ import annotations

from collections.abc import Sequence

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import ParallelLayout
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


def require_stack_runs(
    stack: Stack, schedules: Sequence[Schedule], levels: Sequence[Recompute]
) -> None:
    """Raises ConfigError for the first schedule or recompute that the stack does not run."""
    for option, names in (("schedule", schedules), ("recompute", levels)):
        has = _runs(stack, option)
        lacking = next((name.value for name in names if name.value not in has), None)
        if lacking is not None:
            able = [each for each in stack_names() if lacking in _runs(load_stack(each), option)]
            raise ConfigError(
                f"--{option} {lacking}: the stack {stack.name} does not run it, "
                f"it runs {', '.join(has) or 'none'}",
                hint=f"choose a --stack that does: {', '.join(able)}",
            )


def _runs(stack: Stack, option: str) -> tuple[str, ...]:
    return stack.schedules if option == "schedule" else stack.recompute
