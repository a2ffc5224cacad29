"""A headless Chromium for tests with the marker `browser`, and what every page is held to."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
SIZES = {"desk": 1280, "phone": 390}
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium: apt-get install chromium, as .ci/run does"
)


@contextmanager
def chromium() -> Iterator[Any]:
    """Starts Chromium, and closes it at the end."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


def faults(page: Any) -> list[tuple[str, str]]:
    """Returns the rules of accessibility that a page breaks, each with the first element."""
    from axe_playwright_python.sync_playwright import Axe

    # preloading would ask for style sheets, which a page from a file cannot
    found = Axe().run(page, options={"runOnly": RULES, "preload": False}).response["violations"]
    return [(fault["id"], fault["nodes"][0]["html"]) for fault in found]
