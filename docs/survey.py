"""Writes docs/design/survey.md, the taxonomy of the survey against the project.

    python -m docs.survey

It is made from docs/survey.yaml. `tests/docs/test_survey.py` fails while the page differs, where a
test in it is gone, or where a cell has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent
PAGE = FOLDER / "design" / "survey.md"
Cell = str | dict[str, str]  # a text, or one word with the short name of its test


def matrix() -> dict[str, Any]:
    """The tests and the tables, as docs/survey.yaml has them."""
    loaded: dict[str, Any] = yaml.safe_load((FOLDER / "survey.yaml").read_text("utf-8"))
    return loaded


def page() -> str:
    """The content of the page."""
    loaded = matrix()
    numbers = {name: number for number, name in enumerate(loaded["tests"], 1)}
    lines = [
        "# The survey",
        "",
        "This page sets the taxonomy of the survey of auto-parallelism (Liang et al. 2023, doi "
        "10.1109/TPDS.2023.3281931) against the project.",
        "It is generated: `python -m docs.survey` writes it from `docs/survey.yaml`. The number in "
        "a cell is that of [the test](#tests) that proves it.",
        *(line for table in loaded["tables"] for line in _section(table, numbers)),
        "",
        "## Tests",
        "",
        *(f"{numbers[name]}. `{test}`" for name, test in loaded["tests"].items()),
    ]
    return "\n".join(lines) + "\n"


def _section(table: dict[str, Any], numbers: dict[str, int]) -> Iterator[str]:
    yield from ("", f"## {table['name']}", "", table["intro"], "")
    yield f"| {' | '.join(table['columns'])} |"
    yield "|" + "---|" * len(table["columns"])
    for name, cells in table["rows"].items():
        yield f"| {name} | {' | '.join(_cell(cell, numbers) for cell in cells)} |"


def _cell(cell: Cell, numbers: dict[str, int]) -> str:
    if isinstance(cell, str):
        return cell
    ((word, test),) = cell.items()
    return f"{word} ({numbers[test]})"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
