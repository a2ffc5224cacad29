"""Plans, fronts and comparisons in a notebook: the facts of the terminal, escaped, and tables."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from parplan.planner.launchers.compare_described import compare
from parplan.planner.plan.plan_file import read_any_plan
from parplan.planner.search.comparison import Comparison
from parplan.profiles.errors import ConfigError
from parplan.report.notebook import html_pieces, views
from parplan.report.plans.summary import print_summary
from parplan.report.plans.summary_context import SummaryContext
from parplan.report.searches.comparison_tables import print_comparison
from parplan.report.searches.front_table import print_front
from tests.helpers.browser import chromium, faults, needs_chromium
from tests.helpers.synthetic_runs import estimated
from tests.report.searches.test_front_table import front

TRACED = Path(__file__).parents[2] / "golden/plan-1-traced.yaml"
VOID = {"br", "hr", "img"}


class Texts(HTMLParser):
    """The texts of a piece of HTML, whose elements must be closed in their order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        assert tag not in VOID
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.texts.append(data)


def words(text: str) -> list[str]:
    """The words and numbers of a text, without what only lays it out."""
    return [word for word in re.split(r"[\s,;:|()]+", text) if re.search(r"\w", word)]


def shown(record) -> str:
    return " ".join(Texts(record._repr_html_()).texts)


def printed(print_record) -> str:
    out = Console(file=io.StringIO(), width=10_000)
    print_record(out)
    return out.file.getvalue()


@pytest.fixture(scope="module")
def compared() -> Comparison:
    return compare(estimated(pp=2, dp=4, tp=2, virtual_stages=2), ("zero-3",))


def test_a_plan_shows_every_figure_of_its_summary():
    for plan in (estimated(pp=2, dp=4, tp=2, virtual_stages=2), read_any_plan(TRACED)):
        there = set(words(shown(plan)))
        text = printed(lambda out, plan=plan: print_summary(plan, out, SummaryContext(whole=True)))

        figures = [word for word in words(text) if re.search(r"\d", word)]
        assert len(figures) > 30
        assert [word for word in figures if word not in there] == []


def test_a_comparison_shows_every_figure_of_its_tables(compared):
    there = set(words(shown(compared)))
    text = printed(lambda out: print_comparison(compared, out))

    tables = text[: text.index(f"{compared.rows[0].name}: ")]
    figures = [word for word in words(tables) if re.search(r"\d", word)]
    assert len(figures) > 40
    assert [word for word in figures if word not in there] == []


def test_a_front_shows_every_figure_of_its_table():
    there = set(words(shown(front())))
    text = printed(lambda out: print_front(front(), (), out, SummaryContext(whole=True)))

    head, drawn = text.split("  step against")
    text = head + drawn[drawn.index("  # ") :]

    assert [word for word in words(text) if re.search(r"\d", word) and word not in there] == []


def test_names_from_outside_are_escaped():
    plan = estimated()
    named = replace(plan, model=replace(plan.model, name="<script>alert(1)</script>&"))

    assert "<script>" not in named._repr_html_()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&amp;" in named._repr_html_()


def test_a_part_below_zero_has_no_width_in_a_bar():
    bar = html_pieces.bar([("more", 3.0, "3"), ("less", -1.0, "-1"), ("some", 1.0, "1")])

    assert re.findall(r"width:([\d.]+)%", bar) == ["75.00", "0.00", "25.00"]
    assert Texts(bar).texts == ["more 3", "less -1", "some 1"]


def test_a_plan_is_a_table_of_its_stages_in_gib():
    plan = estimated(pp=2, dp=4, tp=2, virtual_stages=2)
    table = plan.to_pandas()

    assert list(table["stage"]) == [0, 1]
    assert list(table["total_gib"]) == [each.total for each in plan.predicted.memory_gib]
    assert all(name == "stage" or name.endswith("_gib") for name in table.columns)


def test_a_front_and_a_comparison_are_tables_of_their_rows(compared):
    points, plans = front().to_pandas(), compared.to_pandas()

    assert list(points["step_time_s_value"]) == [each.step_time_s for each in front().points]
    assert list(plans["name"]) == ["ours", "zero-3"]
    assert plans["step_time_s"][0] == compared.ours.step_s
    assert pd.isna(plans["slower"][0])
    assert plans["slower"][1] == pytest.approx(
        plans["step_time_s"][1] / plans["step_time_s"][0] - 1
    )


def test_without_pandas_a_table_is_an_error_with_one_action(monkeypatch):
    monkeypatch.setattr(views, "find_spec", lambda name: None)

    with pytest.raises(ConfigError, match="to_pandas needs pandas") as raised:
        estimated().to_pandas()
    assert raised.value.hint == "pip install 'parplan[notebook]'"


@pytest.mark.browser
@needs_chromium
@pytest.mark.parametrize(("ground", "text"), [("#fff", "#000"), ("#111", "#d4d4d4")])
def test_it_is_readable_on_a_light_and_a_dark_ground_and_fits(compared, tmp_path, ground, text):
    records = (estimated(pp=2, dp=4, tp=2, virtual_stages=2), compared, front())
    body = "".join(record._repr_html_() for record in records)
    page_file = tmp_path / "page.html"
    page_file.write_text(
        f'<!doctype html><html lang="en"><head><title>t</title></head><body style="margin:8px;'
        f'background:{ground};color:{text}"><main><h1>t</h1><h2>t</h2><h3>t</h3>{body}</main>'
    )
    with chromium() as browser:
        for width in (1000, 480):
            page = browser.new_page(viewport={"width": width, "height": 900})
            page.goto(page_file.as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert faults(page) == []
