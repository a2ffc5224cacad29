"""A front as a notebook shows it: its points, fastest first."""

from __future__ import annotations

from parplan.planner.search.pareto import ParetoFront
from parplan.report.notebook import html_pieces as html
from parplan.report.plans.plan_header import header
from parplan.report.plans.summary_context import SummaryContext
from parplan.report.searches.front_table import TEXTS, front_facts, front_names, front_rows

_ONE_LINE = 10_000  # characters; a notebook breaks its lines itself


def front_html(front: ParetoFront) -> str:
    """Returns the table of `plan --objective pareto`, and what its figures are."""
    return html.whole(
        header(front.points[0].plan, _ONE_LINE),
        html.table(front_names(front), front_rows(front), texts=TEXTS),
        html.facts(front_facts(front, (), SummaryContext())),
    )
