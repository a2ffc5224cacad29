"""The documentation as a site: its navigation, its links, and its pages in headless Chromium."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from docs.conf import navigation
from tests.helpers.browser import SIZES, chromium, faults, needs_chromium
from tests.helpers.documented import ROOT

HOME = ROOT / "docs/index.md"
PAGES = sorted(
    path.relative_to(ROOT).with_suffix("").as_posix() for path in (ROOT / "docs").rglob("*.md")
)
# one page of each kind: home, long tables, pictures, code, generated, formulas, figures, prose
LOOKED_AT = (
    *("docs/index", "docs/guide/tutorial", "docs/guide/planning", "docs/guide/report"),
    *("docs/reference/run-fields", "docs/reference/python"),
    *("docs/design/search-methods", "docs/equations", "docs/accuracy", "docs/comparison", "README"),
)


BUSY_MS = 120_000  # a page on a machine that does much else
# the text of elements that end beyond the screen, but for those that scroll inside themselves
BEYOND = """width => [document.documentElement, ...document.querySelectorAll('.bd-article *')]
    .filter(one => !one.closest('pre, .pst-scrollable-table-container'))
    .filter(one => Math.max(one.getBoundingClientRect().right, one.scrollWidth) > width + 1)
    .map(one => one.textContent.slice(0, 60))"""


def build(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    """Builds the site as .ci/run does: a warning is a failure."""
    words = ["-m", "sphinx", "-W", "--keep-going", "-q", "-c", str(ROOT / "docs")]
    return subprocess.run(
        [sys.executable, *words, str(source), str(target)],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    built = build(ROOT, target)
    assert built.returncode == 0, built.stderr
    return target


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture
def opened(browser, site) -> Iterator[Any]:
    """Returns a function that opens a page; it fails on a fault in the console or a far request."""
    said: list[str] = []
    open_pages = []

    def open_page(name: str, width: int = 1280, scheme: str = "light") -> Any:
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.on(
            "console", lambda line: line.type in ("error", "warning") and said.append(line.text)
        )
        page.set_default_timeout(BUSY_MS)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: said.append(request.url))
        # a load that ends because its page is closed or left is no fault
        page.on(
            "requestfailed",
            lambda request: (
                request.failure != "net::ERR_ABORTED" and said.append(f"failed: {request.url}")
            ),
        )
        page.goto((site / f"{name}.html").as_uri())
        open_pages.append(page)
        return page

    yield open_page
    for page in open_pages:
        page.close()
    assert [line for line in said if not line.startswith((site.as_uri(), "data:"))] == []


def test_every_page_is_linked_from_a_section_of_the_home_page():
    entries = set(re.findall(r"(/[\w/.-]+)>?$", navigation(HOME.read_text("utf-8")), re.MULTILINE))

    assert {f"/{name}" for name in PAGES} - entries == {"/docs/index"}, (
        "docs/index.md is the navigation: each page stands in the table of its section"
    )


def test_a_part_of_the_navigation_is_a_section_with_each_page_once():
    page = (
        "# Home\n[a](a.md)\n\n## Guide\n[`A`](a.md#x), [b](../b.md)\n\n## More\n[A](a.md) [c](c.md)"
    )

    assert navigation(page).split() == [
        *("```{toctree}", ":caption:", "Guide", ":hidden:", "A", "</docs/a>", "/b", "```"),
        *("```{toctree}", ":caption:", "More", ":hidden:", "/docs/c", "```"),
    ]


@pytest.mark.slow
def test_a_link_an_anchor_and_a_page_without_target_fail_the_build(tmp_path):
    source = tmp_path / "source"
    (source / "docs").mkdir(parents=True)
    (source / "docs/index.md").write_text(
        "# Home\n\n## Part\n\n[gone](gone.md) [page](page.md#gone)\n", encoding="utf-8"
    )
    (source / "docs/page.md").write_text("# Page\n", encoding="utf-8")
    (source / "docs/other.md").write_text("# Other\n", encoding="utf-8")

    built = build(source, tmp_path / "site")

    assert built.returncode != 0
    for said in ("gone.md", "'gone'", "other.md: WARNING: document isn't included"):
        assert said in built.stderr


@pytest.mark.browser
@needs_chromium
@pytest.mark.parametrize("width", SIZES.values(), ids=SIZES)
def test_no_page_is_wider_than_the_screen(opened, site, width):
    page = opened("docs/index", width)
    wide = []
    for name in (*PAGES, "README", "CONTRIBUTING", "search"):
        page.goto((site / f"{name}.html").as_uri(), wait_until="domcontentloaded")
        wide += [f"{name}: {text}" for text in page.evaluate(BEYOND, width)]

    assert wide == []


@pytest.mark.browser
@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", LOOKED_AT)
def test_a_page_has_no_fault_of_accessibility(opened, name, width, scheme):
    page = opened(name, width, scheme)

    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    assert faults(page) == []


@pytest.mark.browser
@needs_chromium
def test_the_keyboard_searches_without_a_network_and_changes_the_theme(opened):
    page = opened("docs/index")

    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent.trim()") == "Skip to main content"
    page.keyboard.press("Control+k")
    page.keyboard.type("redundancy")
    page.keyboard.press("Enter")
    page.wait_for_selector("#search-results li a")
    found = page.locator("#search-results li a").all_inner_texts()
    assert any("redundancy" in title.lower() for title in found)
    page.locator("button.theme-switch-button").first.focus()
    for key in ("Enter", "ArrowDown", "ArrowDown", "ArrowDown", "Enter"):
        page.keyboard.press(key)
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


@pytest.mark.browser
@needs_chromium
def test_a_wide_table_scrolls_inside_itself_and_takes_the_focus(opened):
    page = opened("docs/comparison", SIZES["phone"])
    table = page.locator(".pst-scrollable-table-container").first

    widths = table.evaluate("box => [box.scrollWidth, box.clientWidth]")
    assert widths[0] > widths[1]
    table.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function(
        "document.querySelector('.pst-scrollable-table-container').scrollLeft > 0"
    )
