"""The colours of pages and of pictures, one table for both."""

from __future__ import annotations

# By name: on a light page and in pictures, on a dark page. Text has a contrast of at least 4.5 with
# the page, marks of at least 3; tests/report/page/test_html_page.py checks it.
PAIRS = {
    "page": ("#ffffff", "#14171a"),
    "panel": ("#f5f7f9", "#1d2226"),
    "ink": ("#1b1f24", "#e8ebee"),
    "muted": ("#545d67", "#a8b1bb"),
    "line": ("#d5dbe1", "#363e46"),
    "link": ("#0b5cad", "#7dbbff"),
    "limit": ("#b3261e", "#ff8a80"),
    "c1": ("#0072b2", "#56a8e0"),
    "c2": ("#c65300", "#f0935a"),
    "c3": ("#007a5e", "#3fbf94"),
    "c4": ("#b04a8b", "#e08fc0"),
    "c5": ("#8a6d00", "#d9b840"),
    "c6": ("#5b6bb5", "#9fb0f5"),
    "c7": ("#8c564b", "#cfa396"),
    "c8": ("#4d7a1e", "#9ccb62"),
}
LIMIT = PAIRS["limit"][0]  # of pictures
SERIES = tuple(light for name, (light, _) in PAIRS.items() if name.startswith("c"))  # of pictures


def css_variables() -> str:
    """Returns the rule of a page that gives each colour a variable of its name."""
    lines = (f"  --{name}: light-dark({light}, {dark});" for name, (light, dark) in PAIRS.items())
    return "\n".join((":root {", "  color-scheme: light dark;", *lines, "}"))
