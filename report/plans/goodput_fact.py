"""The lines of a summary that say what failures leave of the time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from parplan.costmodels.usage.goodput import Failures, Goodput
from parplan.planner.plan.plan_goodput import plan_goodput
from parplan.planner.plan.traced_plan import AnyPlan
from parplan.profiles.units import counted, format_bytes, format_number
from parplan.report.text import percent

_UNITS = ((86_400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


def span_text(seconds: float) -> str:
    """Formats a time span in the unit that a person would choose: `3.1 h`, `45 min`."""
    scale, unit = next((pair for pair in _UNITS if seconds >= 2 * pair[0]), _UNITS[-1])
    return f"{format_number(seconds / scale, 2 if seconds < 100 * scale else 3)} {unit}"


def goodput_facts(plan: AnyPlan, failures: Failures | None) -> Iterator[tuple[str, str, str]]:
    """Yields the line, none where no failures are stated."""
    if failures is None:
        return
    result = plan_goodput(plan, failures)
    size = format_bytes(failures.storage_bytes_per_s * result.checkpoint_s)
    spares = counted(result.spare_nodes, "spare node") if result.spare_nodes else "no spare nodes"
    yield (
        "goodput",
        f"{percent(result.share)} of the time (analytic)",
        f"a failure every {span_text(result.failure_s)}, a checkpoint of {size} in "
        f"{span_text(result.checkpoint_s)} every {span_text(result.interval_s)}, {spares}",
    )


def goodput_document(result: Goodput) -> dict[str, Any]:
    """Returns a goodput as JSON values, with its kind."""
    figures = {name: round(value, 6) for name, value in asdict(result).items()}
    return {"share": round(result.share, 6), "kind": "analytic", **figures}
