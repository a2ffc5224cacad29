"""A page in headless Chromium: nothing in its console, no overflow, and every control works."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from parplan.planner.plan.plan_file import write_plan
from tests.helpers.browser import SIZES, chromium, faults, needs_chromium
from tests.helpers.command_runs import succeed
from tests.helpers.synthetic_runs import estimated

pytestmark = [pytest.mark.browser, needs_chromium]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One page of a plan, and one of two plans."""
    folder = tmp_path_factory.mktemp("browser")
    first, second = folder / "first.yaml", folder / "second.yaml"
    write_plan(estimated(pp=2, dp=4, tp=2, virtual_stages=2), first)
    write_plan(estimated(dp=16, zero=3), second)
    files = {"one": folder / "one.html", "two": folder / "two.html"}
    succeed("report", str(first), "--baseline", "zero-1", "-o", str(files["one"]))
    succeed("report", str(first), str(second), "-o", str(files["two"]))
    return files


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture
def opened(browser, pages) -> Iterator[Any]:
    """Returns a function that opens the page; it fails on any line in the console or request."""
    said: list[str] = []
    open_pages = []

    def open_page(name: str = "one", width: int = 1280, scheme: str = "light") -> Any:
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.on("console", lambda line: said.append(line.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: said.append(request.url))
        page.goto(pages[name].as_uri())
        page.wait_for_selector("html[data-ready]", state="attached")
        open_pages.append(page)
        return page

    yield open_page
    for page in open_pages:
        page.close()
    own = (*(file.as_uri() for file in pages.values()), "data:")
    assert [line for line in said if not line.startswith(own)] == []


def background(page: Any) -> str:
    colour: str = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return colour


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", ["one", "two"])
def test_it_fits_and_has_no_fault_of_accessibility(opened, name, width, scheme):
    page = opened(name, width, scheme)

    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator(".chart svg").count() == page.locator(".chart").count() >= 7
    for chart in page.locator(".chart svg").all():
        assert chart.bounding_box()["width"] <= width
    assert faults(page) == []


def test_the_timeline_zooms_by_buttons_keys_and_wheel_and_says_what_is_under_the_pointer(opened):
    page = opened()
    chart, shown = page.locator(".timeline .chart"), page.locator(".timeline .shown")

    def domain() -> tuple[float, float]:
        first, last = re.findall(r"[\d.]+", shown.inner_text())
        return float(first), float(last)

    _, step_s = domain()
    page.get_by_role("button", name="Zoom in").click()
    page.wait_for_function("!document.querySelector('.shown').value.startsWith('0.00')")
    assert domain() == pytest.approx((step_s / 4, 3 * step_s / 4), rel=0.02)
    page.get_by_role("button", name="Earlier").click()
    page.wait_for_timeout(100)
    assert domain()[0] == pytest.approx(step_s / 8, rel=0.02)
    chart.focus()
    page.keyboard.press("0")
    page.wait_for_timeout(100)
    assert domain() == (0, step_s)
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 30)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -300)
    page.keyboard.up("Control")
    page.wait_for_timeout(200)
    assert domain()[1] - domain()[0] < step_s
    tooltip = page.locator("#vg-tooltip-element.visible")
    assert re.search(r"stage \d, micro-batch \d", tooltip.inner_text())


def test_the_theme_follows_the_system_until_the_button_says_otherwise(opened):
    page = opened(scheme="dark")
    dark, bar = background(page), page.locator(".chart path[fill='var(--c1)']").first
    filled = "bar => getComputedStyle(bar).fill"
    coloured = bar.evaluate(filled)

    page.get_by_role("button", name="Dark").click()

    assert background(page) != dark == "rgb(20, 23, 26)"
    assert bar.evaluate(filled) != coloured
    assert page.get_by_role("button", name="Dark").get_attribute("aria-pressed") == "false"
    page.emulate_media(media="print", color_scheme="dark")
    assert background(page) == "rgb(255, 255, 255)"
    assert not page.locator("nav").is_visible()


def test_a_rank_says_its_groups_and_a_cell_chooses_its_rank(opened):
    page = opened()
    said, rank = page.locator(".said"), page.get_by_role("spinbutton", name="Rank")

    rank.fill("13")
    assert "Rank 13 is GPU 5 of node 1. Pipeline rank 1 runs" in said.inner_text()
    assert "Its tp group has 2 ranks on 1 node: 12, 13." in said.inner_text()
    assert "Its dp group has 4 ranks on 1 node: 9, 11, 13, 15." in said.inner_text()
    assert "Its pp group has 2 ranks on 2 nodes: 5, 13." in said.inner_text()
    cells = page.locator("[data-mesh] .chart .mark-rect path")
    cells.nth(3).click()
    assert rank.input_value() == "3"
    assert "Rank 3 is GPU 3 of node 0." in said.inner_text()


def test_commands_are_copied(opened):
    page = opened()
    button = page.locator("[data-copy]").first
    button.click()

    page.wait_for_function(
        "['Copied', 'Selected'].includes(document.querySelector('[data-copy]').textContent)"
    )
