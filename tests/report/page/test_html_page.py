"""Every number of a page is the plan file's, and no number of its predictions is missing."""

from __future__ import annotations

import gzip
import json
import re
import sys
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from parplan.planner.plan.plan_file import read_any_plan, write_plan
from parplan.report.page.figures import PlanFigures, value_at
from parplan.report.page.page_tables import FiguredPlan
from parplan.report.page.reported_plan import ReportedPlan
from parplan.report.page.rival_tables import robust_table
from parplan.report.plan_documents import plan_document
from parplan.report.shared_colours import css_variables
from tests.helpers.command_runs import fail, succeed
from tests.helpers.documented import ROOT
from tests.helpers.synthetic_runs import estimated
from tests.report.test_robust_table import TABLE

TRACED = ROOT / "tests/golden/plan-1-traced.yaml"
BASELINE = "zero-1"
MOST_BYTES = 3_000_000
UNITS = {"": 1.0, "%": 0.01, "s": 1.0, "ms": 1e-3, "us": 1e-6}
# Numbers of the predictions that the page leaves to the plan file.
LEFT_OUT = re.compile(r"predicted\.(error_band\..*|redundancy_gib\.layers\..*|.*\.stage|.*\.host)")


class Shown(NamedTuple):
    value: float
    attributes: dict[str, str]
    text: str


class Page(HTMLParser):
    """The numbers of a page and what it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.shown: list[Shown] = []
        self.loaded: list[str] = []
        self.data: dict[str, Any] = {}
        self.words = ""
        self._open: dict[str, str] | None = None
        self._script = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name.removeprefix("data-"): value or "" for name, value in attrs}
        self._open = given if tag == "data" else None
        self._script = given.get("id", "code") if tag in ("script", "style") else ""
        is_data = given.get("href", "").startswith("data:")
        if tag in ("link", "img", "iframe") and not is_data:
            self.loaded.append(tag)
        self.loaded += [given["src"]] if "src" in given else []

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._script = ""

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            self.shown.append(Shown(float(self._open.pop("value")), self._open, data))
            self._open = None
        if self._script == "charts":
            self.data[self._script] = json.loads(gzip.decompress(b64decode(data)))
        elif self._script == "meshes":
            self.data[self._script] = json.loads(data)
        elif not self._script:
            self.words += data


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("report")
    described = folder / "described.yaml"
    write_plan(estimated(pp=2, dp=2, tp=2, zero=1), described)
    page = folder / "page.html"
    compared = ("--baseline", BASELINE, "--to", "megatron")
    succeed("report", str(described), str(TRACED), *compared, "-o", str(page))
    return described, page


@pytest.fixture(scope="module")
def page(files) -> Page:
    return Page(files[1].read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def documents(files) -> list[dict[str, Any]]:
    compared = succeed("compare", str(files[0]), "--baseline", BASELINE, "--json").stdout
    described = plan_document(read_any_plan(files[0])) | {"comparison": json.loads(compared)}
    return [described, plan_document(read_any_plan(TRACED))]


def leaves(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from leaves(inner, f"{path}.{name}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{path}.{index}")
    elif isinstance(value, int | float):
        yield path


def nearest_shown(leaf: str, document: dict[str, Any], shown: set[str]) -> str | None:
    """Returns the key under which the page shows a number: equal neighbours share a row."""
    value = value_at(document, leaf)
    while leaf not in shown:
        place = re.search(r"\.(\d+)\.", leaf)
        if place is None or place[1] == "0":
            return None
        leaf = f"{leaf[: place.start(1)]}{int(place[1]) - 1}{leaf[place.end(1) :]}"
        if value_at(document, leaf) != value:
            return None
    return leaf


def test_every_number_is_the_plan_files_or_says_what_it_follows_from(page, documents):
    assert len(page.shown) > 200
    for value, attributes, text in page.shown:
        if "key" in attributes:
            document = documents[int(attributes["plan"])]
            assert value == value_at(document, attributes["key"]), attributes["key"]
        else:
            assert attributes["from"]
        digits, decimals, unit = re.fullmatch(r"([+-]?[\d,]+(?:\.(\d+))?) ?(\D*)", text).groups()
        unit = unit if unit in UNITS else pytest.fail(f"{text} has no unit")
        half = 0.5 * 10 ** -len(decimals or "") * UNITS[unit] * (1 + 1e-9)
        assert float(digits.replace(",", "")) * UNITS[unit] == pytest.approx(value, abs=half), text


def test_numbers_that_follow_from_others_are_computed_from_the_plan(page, documents):
    derived = {
        each.attributes["from"]: each.value
        for each in page.shown
        if "from" in each.attributes and each.attributes["plan"] == "0"
    }
    predicted = documents[0]["predicted"]
    step_s, mfu = predicted["step_time_s"]["value"], predicted["mfu"]["value"]
    idle = [wait["idle_share"] for wait in predicted["waits"]]

    assert derived["predicted.step_time_s * predicted.mfu"] == pytest.approx(step_s * mfu)
    assert derived["predicted.breakdown.compute_s - ideal"] == pytest.approx(
        predicted["breakdown"]["compute_s"]["value"] - step_s * mfu
    )
    assert derived["mean of predicted.waits.*.idle_share"] == pytest.approx(sum(idle) / len(idle))


def test_no_number_of_the_predictions_is_missing(page, documents):
    for index, document in enumerate(documents):
        shown = {
            each.attributes["key"]
            for each in page.shown
            if each.attributes["plan"] == str(index) and "key" in each.attributes
        }
        missing = [
            leaf
            for leaf in leaves(document["predicted"], "predicted")
            if not LEFT_OUT.fullmatch(leaf) and nearest_shown(leaf, document, shown) is None
        ]
        assert missing == []


def test_error_bands_kinds_and_sources_are_in_words(page, documents):
    for document in documents:
        band = document["predicted"]["error_band"]
        for each in band.values() if band else ():
            assert (
                f"+- {100 * each['share']:.0f} %, from {each['rows']:,} measured runs" in page.words
            )
    assert documents[0]["cluster"]["device"]["source"] in page.words
    assert documents[0]["training"]["stack"]["source"] in page.words
    assert all(kind in page.words for kind in ("measured", "interpolated", "analytic"))


def test_the_charts_draw_the_numbers_of_the_plan(page, documents):
    charts, predicted = page.data["charts"], documents[0]["predicted"]
    step_s = predicted["step_time_s"]["value"]

    falls = charts["step-0"]["datasets"]["rows"]
    assert [falls[-1]["seconds"], falls[-2]["to"]] == pytest.approx([step_s, step_s], rel=1e-4)
    bars = charts["memory-0"]["datasets"]["stages"]
    shown = {(row["stage"], row["class"]): row["gib"] for row in bars}
    assert shown["1", "activations"] == predicted["memory_gib"][1]["activations"]
    spans = charts["timeline-0"]["datasets"]["spans"]
    assert max(span["b"] for span in spans) == pytest.approx(step_s, rel=1e-4)
    assert {span["r"] for span in spans} == {0, 1}
    moments = charts["curve-0"]["datasets"]["moments"]
    peaks = {row["rank"]: 0.0 for row in moments}
    for row in moments:
        peaks[row["rank"]] = max(peaks[row["rank"]], row["gib"])
    totals = [stage["total"] for stage in predicted["memory_gib"]]
    assert all(peak <= total * 1.001 for peak, total in zip(peaks.values(), totals, strict=True))
    assert peaks["rank 1"] == pytest.approx(totals[1], rel=1e-3)


@pytest.mark.slow
def test_the_charts_are_as_their_schema_says(page):
    """The page is written without altair's own check of every part."""
    import altair

    for chart in page.data["charts"].values():
        altair.Root.validate({**chart, "datasets": {}})


def test_the_mesh_has_the_collectives_of_every_axis(page):
    shown = {each.attributes.get("from"): each.value for each in page.shown}
    sent = page.data["meshes"][0]["sent"]

    assert set(sent) == {"tp", "dp", "pp"}
    for axis, texts in sent.items():
        most = shown[f"collectives over {axis} as they are priced"]
        assert len(texts) == 2
        assert max(float(text.split()[0]) for text in texts) == pytest.approx(most, rel=0.01)
        assert most > 0
    assert page.data["meshes"][1]["sent"] == {}


def test_worst_cases_are_those_of_the_plan_file():
    plan = estimated(pp=2, dp=2, tp=2, zero=1)
    plan = replace(plan, search=replace(plan.search, robust=TABLE))
    reported = ReportedPlan(name="plan.yaml", plan=plan)
    table = robust_table(FiguredPlan(reported, PlanFigures(reported.document, 0)))

    assert [len(row) for row in table.rows] == [len(table.heading)] * 3
    assert table.rows[0][4] == "no fit"
    assert "pp 1 x dp 8 x tp 1" in table.rows[2][0]
    assert table.rows[2][0].endswith("(least regret)")
    shown = Page("".join(str(cell) for row in table.rows for cell in row)).shown
    assert len(shown) == 3 + 3 * 3 - 1 + 3 + 2  # peaks, steps that fit, and regrets that are finite
    for value, attributes, _ in shown:
        assert value == value_at(reported.document, attributes["key"])


def test_the_page_needs_no_network_and_has_what_to_copy(files, page):
    assert page.loaded == []
    assert files[1].stat().st_size < MOST_BYTES
    assert f"torchrun --nproc-per-node 8 -m parplan.executor {files[0]}" in page.words
    assert f"plan export {files[0]} --to megatron" in page.words
    assert "--tensor-model-parallel-size 2" in page.words
    assert "The plan of a traced module has no timeline" in page.words


def test_a_missing_library_is_an_error_with_one_action(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "altair", None)

    message = fail(2, "report", str(TRACED), "-o", str(tmp_path / "page.html"))

    assert "plan report needs altair, which is not installed" in message
    assert "pip install 'parplan[report]'" in message


@pytest.mark.parametrize("option", ["--to", "--baseline"])
def test_an_unknown_name_is_an_error_before_any_work(option, tmp_path):
    assert "megatrn" in fail(2, "report", str(tmp_path / "none.yaml"), option, "megatrn")


def test_text_has_enough_contrast_in_both_themes():
    """WCAG 2.1, 1.4.3 and 1.4.11: 4.5 for text and 3 for marks, on the page and on its panels."""
    pairs = re.findall(r"--(\w+): light-dark\(#(\w{6}), #(\w{6})\)", css_variables())
    for theme in (0, 1):
        colours = {name: both[theme] for name, *both in pairs}
        for name in ("ink", "muted", "link"):
            assert min(contrast(colours[name], colours[on]) for on in ("page", "panel")) >= 4.5
        for name in ("limit", *(f"c{number}" for number in range(1, 9))):
            assert contrast(colours[name], colours["page"]) >= 3, name


def contrast(one: str, other: str) -> float:
    low, high = sorted(luminance(colour) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
