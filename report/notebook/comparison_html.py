"""A comparison as a notebook shows it: the plans, and where their difference comes from."""

from __future__ import annotations

from parplan.costmodels.step_breakdown import NAMES
from parplan.planner.search.comparison import MEMORY_NAMES, ComparedPlan, Comparison
from parplan.profiles.units import gib
from parplan.report.notebook import html_pieces as html
from parplan.report.plans.plan_header import header
from parplan.report.searches.comparison_tables import (
    comparison_notes,
    layouts,
    overview,
    overview_names,
    part_rows,
    sides_of,
    times_of,
    verdicts,
)

_ONE_LINE = 10_000  # characters; a notebook breaks its lines itself


def comparison_html(comparison: Comparison) -> str:
    """Returns the tables of `plan compare`."""
    sides = sides_of(comparison)
    unit, times = times_of(comparison)
    memory = [tuple(map(gib, side.memory_bytes)) for side in sides]
    return html.whole(
        header(comparison.ours.plan, _ONE_LINE),
        html.table(overview_names(comparison), overview(comparison), texts=("plan",)),
        html.facts(layouts(comparison)),
        html.heading(f"Step of the mean GPU, and differences of the others, {unit}"),
        _parts(sides, part_rows("step", NAMES, times)),
        html.heading("Memory of the fullest GPU, and differences of the others, GiB"),
        _parts(sides, part_rows("total", MEMORY_NAMES, memory)),
        *map(html.line, verdicts(comparison)),
        html.folded("Notes", comparison_notes(comparison, pinned=False)),
    )


def _parts(sides: list[ComparedPlan], rows: list[tuple[str, ...]]) -> str:
    names = ("part", *(side.name for side in sides))
    return html.table(names, rows, texts=("part",), marked=[len(rows) - 1])
