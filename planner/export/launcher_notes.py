"""Memory of the switches of a launcher's plan that prices leave out."""

from __future__ import annotations

from collections.abc import Iterator

from parplan.planner.export.fields.settings import settings_of
from parplan.planner.export.targets import TARGETS
from parplan.planner.plan.plan import Plan


def unpriced_memory(plan: Plan) -> Iterator[str]:
    """Yields a sentence for each switch of a plan of `--for`, with the memory that has no price."""
    target = TARGETS.get(plan.search.launcher or "")
    if target is None:
        return
    settings = settings_of(plan)
    for switch in target.switches:
        if getattr(settings, switch.fact) and not switch.idle(settings):
            yield (
                f"{switch.name} is on, which {target.name} has off by default: the price leaves "
                f"out {switch.unpriced}"
            )
