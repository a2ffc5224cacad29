"""A long step is drawn from both ends, and the spans between are counted."""

from __future__ import annotations

from parplan.planner.runs.run_file import WorkSpan
from parplan.planner.runs.timelines import Timeline
from parplan.report.page.chart_theme import MOST_ROWS
from parplan.report.page.timeline_chart import LEFT_OUT, MOST_SPANS, drawn_timeline


def timeline(num_ranks: int, num_spans: int) -> Timeline:
    spans = tuple(
        WorkSpan(work="F", stage=0, micro_batch=index, start_s=float(index), end_s=index + 0.5)
        for index in range(num_spans)
    )
    return Timeline(float(num_spans), (), (spans,) * num_ranks, {})


def test_a_short_step_is_drawn_whole():
    drawn = drawn_timeline(timeline(4, 100))

    assert len(drawn.rows) == 400
    assert drawn.note == ""


def test_of_a_long_step_the_spans_between_are_one_with_their_number():
    num_ranks, num_spans = 64, 1000
    drawn = drawn_timeline(timeline(num_ranks, num_spans))

    between = [row for row in drawn.rows if row["w"] == LEFT_OUT]
    assert MOST_SPANS * 0.95 <= len(drawn.rows) - len(between) <= MOST_SPANS
    assert len(between) == len({row["r"] for row in drawn.rows}) == MOST_ROWS
    first = [row for row in drawn.rows if row["r"] == 0]
    counted = int(between[0]["t"].split(" x forward")[0])
    assert len(first) - 1 + counted == num_spans
    assert (first[0]["a"], max(row["b"] for row in first)) == (0.0, num_spans - 0.5)
    assert {0, num_ranks - 1} <= {row["r"] for row in drawn.rows}
    assert "32 of 64 pipeline ranks are drawn" in drawn.note
    assert "between them the passes go on alike" in drawn.note
    assert drawn.palette.keys() == {"forward", "not drawn one by one"}
