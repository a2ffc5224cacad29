"""The HTML of each kind of record that a notebook shows, and the record as a table of pandas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import singledispatch
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from parplan.planner.plan.plan import Plan
from parplan.planner.plan.traced_plan import AnyPlan, TracedPlan
from parplan.planner.search.comparison import Comparison
from parplan.planner.search.pareto import ParetoFront
from parplan.profiles.documents.schema import document
from parplan.profiles.errors import ConfigError
from parplan.report.notebook.comparison_html import comparison_html
from parplan.report.notebook.front_html import front_html
from parplan.report.notebook.plan_html import plan_html
from parplan.report.searches.comparison_document import comparison_document
from parplan.report.searches.front_document import front_document

if TYPE_CHECKING:
    from pandas import DataFrame


@singledispatch
def html_of(shown: object) -> str:
    """Returns the HTML of a plan, a front or a comparison."""
    raise TypeError(f"{type(shown).__name__} has no HTML")


@singledispatch
def frame_of(shown: object) -> DataFrame:
    """Returns a plan, a front or a comparison as a DataFrame.

    Raises ConfigError where pandas is not installed.
    """
    raise TypeError(f"{type(shown).__name__} has no table")


@html_of.register(Plan)
@html_of.register(TracedPlan)
def _(plan: AnyPlan) -> str:
    return plan_html(plan)


@html_of.register(ParetoFront)
def _(front: ParetoFront) -> str:
    return front_html(front)


@html_of.register(Comparison)
def _(comparison: Comparison) -> str:
    return comparison_html(comparison)


@frame_of.register(Plan)
@frame_of.register(TracedPlan)
def _(plan: AnyPlan) -> DataFrame:
    """One row for each pipeline stage: GiB of its GPU by class."""
    return _frame(
        [
            {name if name == "stage" else f"{name}_gib": value for name, value in row.items()}
            for row in document(plan.predicted.memory_gib)
        ]
    )


@frame_of.register(ParetoFront)
def _(front: ParetoFront) -> DataFrame:
    """One row for each point, with the columns of `plan --objective pareto --json`."""
    return _frame(document(front_document(front))["points"])


@frame_of.register(Comparison)
def _(comparison: Comparison) -> DataFrame:
    """One row for each plan, ours first, with the columns of `plan compare --json`."""
    body = document(comparison_document(comparison))
    ours = {"name": comparison.ours.name, "fits": True, **body["ours"]}
    return _frame([ours, *body["baselines"]])


def _frame(rows: Sequence[Mapping[str, Any]]) -> DataFrame:
    """Returns rows as a table; mappings in a row become columns `outer_inner`."""
    if find_spec("pandas") is None:
        raise ConfigError(
            "to_pandas needs pandas: it is not installed", hint="pip install 'parplan[notebook]'"
        )
    from pandas import json_normalize

    return json_normalize(list(rows), sep="_")
