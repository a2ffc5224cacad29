"""The front as a table, as JSON values and as a picture."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from rich.console import Console

from parplan.planner.objective import Objective
from parplan.planner.search.pareto import ParetoFront, plan_paths
from parplan.profiles.documents.schema import document
from parplan.profiles.errors import ConfigError
from parplan.report.names import search_text
from parplan.report.plans.summary import MOST_LINES, print_summary
from parplan.report.plans.summary_context import SummaryContext
from parplan.report.plots.front_plot import draw_front, end_names, front_steps
from parplan.report.progress_bars import front_bar
from parplan.report.searches.drawn_points import print_points
from parplan.report.searches.front_document import front_document
from parplan.report.searches.front_table import (
    front_zero_text,
    print_front,
    recompute_counts,
)
from parplan.report.text import console, gib_text
from tests.helpers.cases import mostly_slow
from tests.helpers.instances import PINS, random_instance
from tests.helpers.planning import find_front


@cache
def front() -> ParetoFront:
    instance = random_instance(1)
    return find_front(instance.model, instance.cluster, instance.training, constraints=PINS)


def printed(of: ParetoFront, context: SummaryContext | None = None) -> str:
    out = io.StringIO()
    print_front(
        of,
        plan_paths(Path("plan.yaml"), len(of.points)),
        Console(file=out, width=160),
        context or SummaryContext(whole=True),
    )
    return out.getvalue()


def test_the_table_has_a_row_for_every_point_with_its_three_values():
    text = printed(front(), SummaryContext(elapsed_s=1.5, whole=True))

    rows = re.findall(r"^ +(\d+) +[\d.,]+ (?:s|ms|us) .*\d+ x \d+ x \d+ .*$", text, re.MULTILINE)
    assert [int(number) for number in rows] == list(range(1, len(front().points) + 1))
    assert f"{front().num_searches} searches in 1.5 s" in text
    assert f"no plan fits within {gib_text(front().nothing_within_gib)} GiB" in text
    assert f"plan-01.yaml to plan-{len(front().points):02}.yaml" in text
    assert "not measured" in text
    assert "incomplete" not in text


@pytest.mark.parametrize("columns", [None, 80])
def test_no_line_is_wider_than_columns_asks_for_or_than_100_in_a_pipe(columns, monkeypatch):
    long = Counter({f"{letter} operators of many names": 10 for letter in "abcd"})
    monkeypatch.setattr(
        "parplan.report.searches.front_table.recompute_counts",
        lambda _: ", ".join(f"{count} {text}" for text, count in long.items()),
    )
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", str(columns))
    out = io.StringIO()

    print_front(
        front(),
        plan_paths(Path("plan.yaml"), len(front().points)),
        console(out),
        SummaryContext(whole=True),
    )

    head, table = out.getvalue().split(" redund.", 1)
    lines = f"{head.splitlines()[-1]} redund.{table}".splitlines()
    assert max(map(len, lines)) <= (columns or 100)
    assert table.count("operators") >= len(front().points)


@pytest.mark.parametrize("width", [60, 80, 100])
def test_the_short_form_draws_the_front_in_few_lines(width):
    many = replace(front(), points=front().points * 4, stopped="time limit")
    for of in (front(), many, replace(front(), points=front().points[:1])):
        out = io.StringIO()
        print_front(
            of,
            plan_paths(Path("plan.yaml"), len(of.points)),
            Console(file=out, width=width),
            SummaryContext(assumed=("--gpu a100-80gb", "--precision bf16")),
        )
        lines = out.getvalue().splitlines()
        rows = [line for line in lines if re.match(r"  +\d+ +[\d.]+ (?:s|ms|us) ", line)]

        assert len(lines) <= MOST_LINES
        assert max(map(len, lines)) <= width
        assert ("incomplete" in out.getvalue()) == (of is many)
        assert len(rows) >= min(len(of.points), 2)
        assert rows[-1].split()[0] == str(len(of.points))


def test_the_drawing_says_that_far_slower_points_stand_at_the_edge(monkeypatch):
    assert "far slower at the top" not in printed(replace(front(), points=front().points[:2]))

    monkeypatch.setattr("parplan.report.plots.front_plot.FAR", 1.0)
    assert "by number; far slower at the top\n" in printed(front())


def test_points_are_drawn_by_number_in_ascii_where_the_output_is_no_unicode():
    points = [(float(60 - 5 * number), 10.0 + number**2) for number in range(12)]
    drawn = {}
    for encoding in ("utf-8", "ascii"):
        raw = io.BytesIO()
        stream = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
        print_points(points, ("GiB", "s"), Console(file=stream, width=60), height=8)
        drawn[encoding] = raw.getvalue().decode(encoding)

    assert drawn["ascii"].isascii()
    assert not drawn["utf-8"].isascii()
    lines = drawn["ascii"].splitlines()
    assert max(map(len, lines)) <= 60
    area = [line.split("|")[1] for line in lines if line.count("|") == 2]
    assert len(area) == 8
    assert area[-1].rstrip().endswith("1")  # the fastest: below, with the most memory
    assert area[0].lstrip()[0] == "2"  # the twelfth: above, with the least
    marks = sorted(mark for line in area for mark in line if mark != " ")
    assert set(marks) == set("0123456789")


def test_blocks_that_recompute_operators_are_told_from_the_operators():
    plan = next(point.plan for point in front().points)
    layers = {
        name: replace(layer, recompute=("norm_1", "fc1"))
        for name, layer in plan.layer_plans.items()
    }
    names = ("norm_1", "fc1", "qkv", "attention_core")
    mixed = {
        name: replace(layer, recompute=names[: 4 - 2 * (i % 2)])
        for i, (name, layer) in enumerate(layers.items())
    }

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "parplan.report.searches.front_table.recompute_text",
            lambda layer, _: ", ".join((*layer.recompute, "more than a short name")),
        )
        patch.setattr(
            "parplan.report.searches.front_table.blocks_by_plan", lambda _: dict.fromkeys(mixed, 5)
        )
        assert recompute_counts(replace(plan, layer_plans=layers)) == "2 operators"
        assert re.fullmatch(
            r"\d+ with [24] operators(, \d+ with [24] operators)?",
            recompute_counts(replace(plan, layer_plans=mixed)),
        )


def test_an_incomplete_front_says_so_and_why():
    assert "incomplete" in printed(replace(front(), stopped="Ctrl-C"))
    assert "early (Ctrl-C): the front is incomplete" in printed(replace(front(), stopped="Ctrl-C"))


def test_ties_are_marked_with_the_leaner_point():
    ties = {number: front().leaner_tie(point) for number, point in enumerate(front().points, 1)}
    marked = re.findall(r"^ +(\d+) .*tie with (\d+)$", printed(front()), re.MULTILINE)

    assert {int(number): int(leaner) for number, leaner in marked} == {
        number: leaner for number, leaner in ties.items() if leaner
    }


def test_without_a_band_no_tie_is_known():
    first = front().points[0]
    unknown = replace(
        first, plan=replace(first.plan, predicted=replace(first.plan.predicted, error_band=None))
    )

    assert "unknown: no measured steps on this device" in printed(
        replace(front(), points=(unknown,))
    )


def test_what_found_a_point_is_its_objective_and_its_limit():
    record = front().points[0].plan.search
    base = replace(record.front, memory_limit_gib=None, max_slowdown=None)

    def text(objective: Objective, **limit: float) -> str:
        return search_text(replace(record, objective=objective, front=replace(base, **limit)))

    assert text(Objective.THROUGHPUT) == "fastest"
    assert text(Objective.THROUGHPUT, memory_limit_gib=40.04) == "fastest within 40.0 GiB"
    assert text(Objective.MEMORY, max_slowdown=0.05) == "leanest within 5 %"
    assert text(Objective.MEMORY, max_slowdown=0.0) == "leanest within 0 %"
    assert text(Objective.MEMORY) == "leanest"


def test_recompute_and_zero_are_short_and_count_all_blocks():
    for point in front().points:
        counts = [
            int(number)
            for number in re.findall(
                r"(\d+) (?:none|selective|full|\d+ operators)", recompute_counts(point.plan)
            )
        ]
        assert not counts or sum(counts) == point.plan.model.num_layers
        assert re.fullmatch(r"[0-3](, [0-3])*", front_zero_text(point.plan))


def test_the_document_is_json_with_every_point_and_its_file():
    paths = plan_paths(Path("plan.yaml"), len(front().points))
    body = json.loads(json.dumps(document(front_document(front(), paths, 2.0))))

    assert (body["objective"], body["complete"], body["stopped"]) == ("pareto", True, None)
    assert [row["plan_file"] for row in body["points"]] == [str(path) for path in paths]
    for row, point in zip(body["points"], front().points, strict=True):
        assert (
            row["step_time_s"]["value"],
            row["peak_memory_gib"],
            row["redundancy_gib"],
        ) == point.values
        assert row["gap"] == point.plan.search.gap
        assert row["found_by"]["objective"] in ("throughput", "memory")
    assert front_document(replace(front(), stopped="Ctrl-C"), paths, 2.0).complete is False


def test_the_summary_of_a_point_says_its_place_on_the_front():
    out = io.StringIO()
    print_summary(front().points[1].plan, Console(file=out, width=160), SummaryContext(whole=True))

    assert re.search(
        rf"^  front +\S.* point 2 of {len(front().points)}, fastest first$",
        out.getvalue(),
        re.MULTILINE,
    )


def test_the_step_line_goes_through_the_points_that_are_fastest_within_their_peak():
    steps = front_steps(front())

    assert front().points[0] in steps
    for point in front().points:
        beaten = any(
            rival.peak_memory_gib <= point.peak_memory_gib
            and rival.step_time_s <= point.step_time_s
            for rival in front().points
            if rival is not point
        )
        assert (point in steps) != beaten


@pytest.mark.parametrize(
    ("name", "start"),
    mostly_slow(
        [("front.png", b"\x89PNG"), ("front.svg", b"<?xml"), ("front.pdf", b"%PDF")],
        {("front.svg", b"<?xml")},
    ),
)
def test_the_picture_is_in_the_format_of_its_suffix(tmp_path, name, start):
    draw_front(front(), tmp_path / name)

    assert (tmp_path / name).read_bytes().startswith(start)


def drawn(of: ParetoFront, path: Path) -> str:
    """Returns the words in the picture, which stay text with svg.fonttype none."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw_front(of, path)
    return path.read_text()


def test_the_picture_names_axes_units_and_limits(tmp_path):
    words = drawn(front(), tmp_path / "front.svg")

    assert "peak memory of the fullest GPU, GiB (predicted, analytic)" in words
    assert f"step time, s (predicted, {front().points[0].plan.predicted.step_time_s.kind})" in words
    assert "redundant memory over all GPUs, GiB" in words
    assert f"usable, {front().usable_gib:.1f} GiB" in words
    assert "the GPU has 79.2 GiB" in words
    assert "incomplete" not in words
    assert "plans, incomplete" in drawn(replace(front(), stopped="Ctrl-C"), tmp_path / "part.svg")


def test_the_ends_are_named_by_what_they_are():
    points, names = front().points, end_names(front())
    by_end = {
        end: points[number - 1]
        for number, name in names.items()
        for end in re.split(", (?=least)", name)
    }

    assert names[1].startswith("fastest")
    assert ("the default plan" in names[1]) == (search_text(points[0].plan.search) == "fastest")
    assert by_end["least peak memory"].peak_memory_gib == min(
        point.peak_memory_gib for point in points
    )
    assert by_end["least redundant"].redundancy_gib == min(point.redundancy_gib for point in points)


@pytest.mark.slow
def test_a_far_slower_point_stands_at_the_edge_with_its_time(tmp_path):
    first, last = front().points[0], front().points[-1]
    far_s = 100 * first.step_time_s
    predicted = replace(
        last.plan.predicted, step_time_s=replace(last.plan.predicted.step_time_s, value=far_s)
    )
    of = replace(
        front(),
        points=(*front().points[:-1], replace(last, plan=replace(last.plan, predicted=predicted))),
    )

    assert "plan, beyond the scale" in drawn(of, tmp_path / "far.svg")


@pytest.mark.slow
def test_one_point_can_be_drawn(tmp_path):
    draw_front(replace(front(), points=front().points[:1]), tmp_path / "one.png")

    assert (tmp_path / "one.png").stat().st_size > 0


@pytest.mark.slow
def test_a_picture_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot write .*: No such file"):
        draw_front(front(), tmp_path / "missing" / "front.png")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_shows_the_search_that_is_under_way_on_a_terminal_and_nothing_elsewhere():
    instance, out = random_instance(1), Terminal()
    with front_bar(Console(file=out, force_terminal=True, width=120)) as (on_progress, on_search):
        find_front(
            instance.model,
            instance.cluster,
            instance.training,
            constraints=PINS,
            num_points=4,
            on_progress=on_progress,
            on_search=on_search,
        )

    assert "front" in out.getvalue()
    with front_bar(Console(file=io.StringIO())) as watched:
        assert watched == (None, None)
