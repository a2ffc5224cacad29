"""The pipeline timeline of a page: what each pipeline rank does at each moment of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from parplan.planner.runs.run_file import WorkSpan
from parplan.planner.runs.timelines import Timeline
from parplan.report.page.chart_theme import (
    MOST_ROWS,
    MUTED,
    PAGE,
    ROW_PIXELS,
    Row,
    colour_scale,
    colours,
    named_data,
    specification,
)

MOST_SPANS = 6_000  # spans in one drawing; a browser moves them without delay
_WIDEST_PIXELS, _FEW_PIXELS = 56, 200  # of a row, and of all rows where they are few
_OUTLINED = 1_500  # with more spans, outlines would hide the colours
LEFT_OUT = "..."
WORK = {
    "F": "forward",
    "B": "backward",
    "R": "recompute ahead",
    "I": "backward of inputs",
    "W": "backward of weights",
    "reduce": "gradient reduction",
    "tied": "tied embedding",
    "optimizer": "optimizer",
    LEFT_OUT: "not drawn one by one",
}
_PALETTE = {**colours([work for work in WORK if work != LEFT_OUT]), LEFT_OUT: MUTED}


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnTimeline:
    """The rows of the chart, and a sentence on what they leave out, empty for nothing."""

    rows: tuple[Row, ...]
    step_s: float
    num_ranks: int
    note: str

    @property
    def palette(self) -> dict[str, str]:
        """The colour of each kind of work that is drawn, by its name."""
        drawn = {row["w"] for row in self.rows}
        return {WORK[work]: colour for work, colour in _PALETTE.items() if work in drawn}


def drawn_ranks(num_ranks: int, most: int = MOST_ROWS) -> list[int]:
    """Returns at most `most` pipeline ranks, evenly spread from the first to the last."""
    drawn = min(num_ranks, most)
    return sorted({round(row * (num_ranks - 1) / max(1, drawn - 1)) for row in range(drawn)})


def drawn_timeline(timeline: Timeline) -> DrawnTimeline:
    """Returns what is drawn of a timeline.

    Of a long step the beginning and the end are drawn, and one span stands for the passes between.
    """
    ranks = drawn_ranks(len(timeline.spans))
    edge_s = _edge_s([timeline.spans[rank] for rank in ranks], timeline.step_s)
    rows: list[Row] = []
    for rank in ranks:
        rows += _rank_rows(rank, timeline.spans[rank], edge_s, timeline.step_s)
    notes = []
    if len(ranks) < len(timeline.spans):
        notes.append(f"{len(ranks)} of {len(timeline.spans)} pipeline ranks are drawn.")
    if any(row["w"] == LEFT_OUT for row in rows):
        notes.append(
            f"The first and the last {edge_s:.3g} s are drawn; between them the passes go on alike."
        )
    return DrawnTimeline(
        rows=tuple(rows), step_s=timeline.step_s, num_ranks=len(ranks), note=" ".join(notes)
    )


def _edge_s(spans: Iterable[Sequence[WorkSpan]], step_s: float) -> float:
    """Seconds from either end of the step that hold at most MOST_SPANS spans together."""
    reach = sorted(_from_edge_s(span, step_s) for of_rank in spans for span in of_rank)
    return step_s if len(reach) <= MOST_SPANS else reach[MOST_SPANS]


def _from_edge_s(span: WorkSpan, step_s: float) -> float:
    return min(span.start_s, step_s - span.end_s)


def _rank_rows(rank: int, spans: Sequence[WorkSpan], edge_s: float, step_s: float) -> list[Row]:
    rows: list[Row] = []
    between: list[WorkSpan] = []
    for span in spans:
        if _from_edge_s(span, step_s) < edge_s:
            rows.append(_row(rank, span))
        else:
            between.append(span)
    if between:
        counts = Counter(WORK[span.work] for span in between)
        rows.append(
            {
                "r": rank,
                "w": LEFT_OUT,
                "t": ", ".join(f"{count:,} x {name}" for name, count in counts.items()),
                "a": round(between[0].start_s, 6),
                "b": round(between[-1].end_s, 6),
            }
        )
    return rows


def _row(rank: int, span: WorkSpan) -> Row:
    """Returns a span with short names, of which a page has thousands."""
    return {
        "r": rank,
        "w": span.work,
        "s": span.stage,
        "m": span.micro_batch,
        "a": round(span.start_s, 6),
        "b": round(span.end_s, 6),
    }


def timeline_chart(drawn: DrawnTimeline) -> Row:
    """Returns the chart: drag to move, wheel with Ctrl to zoom; the page adds buttons and keys."""
    import altair as alt

    outline = 0.6 if len(drawn.rows) < _OUTLINED else 0
    part = "datum.s < 0 ? 'all layers' : 'stage ' + datum.s + ', micro-batch ' + datum.m"
    scale = alt.Scale(domain=[0, drawn.step_s], nice=False)
    chart = (
        alt.Chart(named_data("spans"))
        .transform_calculate(work=f"{WORK}[datum.w]", part=f"isValid(datum.t) ? datum.t : {part}")
        .mark_rect(stroke=PAGE, strokeWidth=outline, aria=False, clip=True)
        .encode(
            x=alt.X(
                "a:Q",
                title="seconds into the step",
                scale=scale,
                axis=alt.Axis(grid=False, tickCount=6),
            ),
            x2="b:Q",
            y=alt.Y("r:O", title="pipeline rank"),
            color=alt.Color("work:N", scale=colour_scale(drawn.palette), legend=None),
            fillOpacity=alt.condition("datum.m % 2 == 1", alt.value(0.7), alt.value(1.0)),
            tooltip=[
                alt.Tooltip("work:N"),
                alt.Tooltip("part:N"),
                alt.Tooltip("r:O", title="pipeline rank"),
                alt.Tooltip("a:Q", title="from, s", format=".4f"),
                alt.Tooltip("b:Q", title="to, s", format=".4f"),
            ],
        )
        .add_params(
            alt.selection_interval(
                name="zoom",
                bind="scales",
                encodings=["x"],
                zoom="wheel![event.ctrlKey || event.metaKey]",
            )
        )
    )
    row_pixels = min(_WIDEST_PIXELS, max(ROW_PIXELS, _FEW_PIXELS // drawn.num_ranks))
    return specification(chart, drawn.num_ranks * row_pixels, spans=drawn.rows)
