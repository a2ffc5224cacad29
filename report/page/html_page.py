"""The page as HTML: the template, the charts and the libraries that draw them, in one text."""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from parplan.costmodels.communication.mesh import Axis
from parplan.profiles.documents.texts import escaped_lines
from parplan.report.page.candidate_chart import front_chart, front_marks
from parplan.report.page.chart_theme import LIMIT, Row, unchecked_charts
from parplan.report.page.figures import PlanFigures
from parplan.report.page.machine_tables import (
    KIND_TEXTS,
    assumptions_table,
    kinds_table,
    links_table,
    sent_texts,
    sources,
)
from parplan.report.page.memory_charts import (
    CLASS_COLOURS,
    curve_chart,
    curve_palette,
    curve_rows,
    stage_chart,
)
from parplan.report.page.mesh_chart import (
    axes_of,
    axis_palette,
    mesh_cells,
    mesh_chart,
    stage_palette,
)
from parplan.report.page.page_tables import (
    FiguredPlan,
    key_figures,
    memory_table,
    overview_table,
    redundancy_table,
    step_table,
    waits_table,
)
from parplan.report.page.plan_front import front_notes, front_table
from parplan.report.page.reported_plan import ReportedPlan
from parplan.report.page.rival_tables import (
    baselines_table,
    differences_table,
    robust_table,
    runners_table,
)
from parplan.report.page.step_charts import (
    difference_chart,
    difference_palette,
    waterfall,
    waterfall_chart,
)
from parplan.report.page.timeline_chart import drawn_timeline, timeline_chart
from parplan.report.plans.memory_table import layers_text, rows
from parplan.report.plans.notes import notes
from parplan.report.plans.plan_header import header
from parplan.report.plans.step_lines import REDUNDANT
from parplan.report.searches.comparison_tables import comparison_notes, meaning, verdicts
from parplan.report.shared_colours import css_variables

if TYPE_CHECKING:
    from jinja2 import Environment

_TEMPLATE = "page.html"
_STYLE = "page.css"
_SCRIPT = "page.js"
_WIDE = 10_000  # characters; the browser breaks lines
_DEVICE = {"memory of a device": LIMIT}


def render_page(plans: Sequence[ReportedPlan], library: str) -> str:
    """Returns the page of one plan or of several side by side.

    library    the javascript that draws the charts
    """
    with unchecked_charts():
        return _rendered(plans, library)


def _rendered(plans: Sequence[ReportedPlan], library: str) -> str:
    figured = [
        FiguredPlan(each, PlanFigures(each.document, index)) for index, each in enumerate(plans)
    ]
    charts: dict[str, Row] = {}
    front = front_table(figured)
    if front or len(plans) > 1 or plans[0].plan.search.runners_up:
        charts["front"] = front_chart(plans)
    views = [_view(index, each, charts) for index, each in enumerate(figured)]
    longest_s = max(each.plan.predicted.step_time_s.value for each in plans)
    for index, each in enumerate(plans):
        charts[f"step-{index}"] = waterfall_chart(waterfall(each.plan), longest_s)
    return (
        _environment()
        .get_template(_TEMPLATE)
        .render(
            title=" and ".join(dict.fromkeys(each.title for each in plans)),
            overview=overview_table(figured),
            plans=views,
            front=front,
            front_notes=list(front_notes(plans)),
            front_marks=front_marks(plans),
            kinds=KIND_TEXTS,
            charts=charts,
            style=f"{css_variables()}\n{_text(_STYLE)}",
            script=_text(_SCRIPT),
            library=library,
        )
    )


def _environment() -> Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FunctionLoader(_text),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["inline"] = lambda text: Markup(text.replace("</script", "<\\/script"))
    environment.filters["json"] = lambda value: Markup(_json(value).replace("<", "\\u003c"))
    environment.filters["packed"] = lambda value: Markup(_packed(value))
    return environment


def _shown(value: object) -> object:
    """Returns a value as the page has it; control characters of a text are escaped."""
    return escaped_lines(value) if type(value) is str else value


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _packed(value: object) -> str:
    """Returns a value as JSON in gzip in base64, a fifth of its size; the same gives the same."""
    return b64encode(gzip.compress(_json(value).encode("utf-8"), mtime=0)).decode("ascii")


def _text(name: str) -> str:
    return files("parplan.report.page").joinpath(name).read_text(encoding="utf-8")


def _view(index: int, each: FiguredPlan, charts: dict[str, Row]) -> Mapping[str, Any]:
    """Returns the parts of one plan for the template, and adds its charts by their ids."""
    reported = each.reported
    return {
        "index": index,
        "name": reported.name,
        "header": header(reported.plan, _WIDE),
        "key_figures": list(key_figures(each)),
        "missing": reported.missing,
        "snippets": reported.snippets,
        "notes": list(notes(reported.plan)),
        **_mesh(index, each, charts),
        **_timeline(index, each, charts),
        **_memory(index, each, charts),
        "step": step_table(each),
        **_baselines(index, each, charts),
        "runners": runners_table(each),
        "robust": robust_table(each),
        "choice": reported.plan.search.preference,
        "assumptions": assumptions_table(each),
        "numbers": kinds_table(each),
        "sources": list(sources(each)),
    }


def _mesh(index: int, each: FiguredPlan, charts: dict[str, Row]) -> Mapping[str, Any]:
    plan = each.reported.plan
    cells = mesh_cells(plan)
    charts[f"mesh-{index}"] = mesh_chart(plan, cells)
    layers: dict[str, str] = {}
    for row in rows(plan):
        text = row.shards or layers_text(row, short=False)
        layers |= {str(rank): text for rank in range(row.first, row.last + 1)}
    return {
        "mesh": {
            "ranks": cells.num_ranks,
            "perCell": cells.ranks_per_cell,
            "perBlock": cells.cells_per_block,
            "blocks": cells.num_blocks,
            "perNode": plan.cluster.gpus_per_node,
            "axes": axes_of(plan.mesh),
            "pipeline": {"degree": plan.mesh.pp, "stride": plan.mesh.stride(Axis.PP)},
            "layers": layers,
            "sent": sent_texts(each.reported),
        },
        "axis_palette": axis_palette(plan.mesh),
        "stage_palette": stage_palette(plan.mesh),
        "links": links_table(each),
    }


def _timeline(index: int, each: FiguredPlan, charts: dict[str, Row]) -> Mapping[str, Any]:
    timeline = each.reported.timeline
    if timeline is None:
        return {"timeline": None, "waits": waits_table(each)}
    drawn = drawn_timeline(timeline)
    charts[f"timeline-{index}"] = timeline_chart(drawn)
    return {"timeline": drawn, "waits": waits_table(each)}


def _memory(index: int, each: FiguredPlan, charts: dict[str, Row]) -> Mapping[str, Any]:
    reported = each.reported
    predicted = reported.document["predicted"]
    capacity = predicted["memory_gib"][0]["capacity"]
    charts[f"memory-{index}"] = stage_chart(predicted["memory_gib"], "GiB of one GPU", capacity)
    whole = predicted["redundancy_gib"]
    redundant = whole["stages"]
    if redundant:
        charts[f"redundancy-{index}"] = stage_chart(redundant, "redundant GiB of one GPU")
    curves: dict[str, str] = {}
    if reported.timeline:
        base = [stage["total"] - stage["activations"] for stage in predicted["memory_gib"]]
        moments = curve_rows(reported.held, base, reported.timeline.step_s)
        curves = curve_palette(moments)
        charts[f"curve-{index}"] = curve_chart(moments, capacity)
    return {
        "memory": memory_table(each),
        "class_palette": {**CLASS_COLOURS, **_DEVICE},
        "curve_palette": {**curves, **_DEVICE} if curves else {},
        "redundancy": redundancy_table(each),
        "redundant_palette": {n: CLASS_COLOURS[n] for n in REDUNDANT if redundant},
        "below_zero": min(row[name] for row in [whole, *redundant] for name in REDUNDANT) < 0,
    }


def _baselines(index: int, each: FiguredPlan, charts: dict[str, Row]) -> Mapping[str, Any]:
    comparison = each.reported.comparison
    if comparison is None:
        return {"baselines": None}
    compared = each.reported.document["comparison"]["baselines"]
    if any(baseline["fits"] for baseline in compared):
        charts[f"difference-{index}"] = difference_chart(compared)
    return {
        "baselines": baselines_table(each),
        "differences": differences_table(each),
        "difference_palette": difference_palette(compared),
        "verdicts": list(verdicts(comparison)),
        "about": [
            *comparison_notes(comparison, pinned=False),
            *(
                f"{row.name}: {meaning(row.baseline)}"
                for row in comparison.rows
                if row.baseline is not None
            ),
        ],
    }
