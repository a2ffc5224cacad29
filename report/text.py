"""The console that every report goes to, with lines of phrases and aligned columns.

rich.Table is not used: it shortens numbers when a terminal is narrow and pads every line.
"""

from __future__ import annotations

import math
import os
import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import TextIO

from rich.console import Console
from rich.text import Text

FIXED_WIDTH = 100  # characters off a terminal, so that a plan always prints the same text
LABEL_WIDTH = 12  # characters of a label of the summary, with its indent and its padding
_GAP = "  "
_BREAKS = re.compile(r"(?<!\bx) (?!x )")  # not inside `1 x 32`
_READABLE = 32  # characters that the last column of facts needs, at the least
_NARROWEST = 24  # characters of a wrapped last column, at the least


def console(stream: TextIO) -> Console:
    """Returns a console on `stream`; off a terminal the width is fixed and there is no colour."""
    width = None if stream.isatty() else FIXED_WIDTH
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


def say(out: Console, text: str = "", style: str = "") -> None:
    """Print `text` unchanged; a long line is never shortened."""
    out.print(Text(text, style=style), soft_wrap=True)


def joined(
    phrases: Sequence[str],
    separator: str,
    width: int,
    *,
    start: str = "",
    indent: int | None = None,
) -> str:
    """Joins `start` and the phrases into lines of at most `width`, broken at separators.

    Lines after the first are indented by `indent` spaces, by default by the length of `start`.
    """
    margin = " " * (len(start) if indent is None else indent)
    lines: list[str] = []
    line = start
    fresh = True
    for index, phrase in enumerate(phrases):
        end = separator.rstrip() if index < len(phrases) - 1 else ""
        if not fresh and len(line) + len(separator) + len(phrase) + len(end) > width:
            lines.append(line + separator.rstrip())
            line, fresh = margin, True
        line += phrase if fresh else separator + phrase
        fresh = False
    return "\n".join((*lines, line))


def labelled(label: str) -> str:
    """The start of a line of the summary."""
    return f"  {label}".ljust(LABEL_WIDTH)


def fact_lines(
    rows: Iterable[Sequence[str]],
    width: int,
    *,
    right: Collection[int] = (),
    columns: bool = True,
) -> list[str]:
    """Returns lines of a label and phrases, in columns or as text that runs on.

    The phrases run on where columns leave the last of them too little room.

    right   columns that stand flush right
    """
    facts = [(f"{label:{LABEL_WIDTH - 4}}", *phrases) for label, *phrases in rows]
    widths = [max(map(len, cells)) for cells in zip(*facts, strict=True)]
    if columns and width - sum(widths[:-1]) - len(_GAP) * len(widths) >= _READABLE:
        return aligned(facts, width, left=set(range(len(widths))) - set(right))
    return [_run_on(label, phrases, width) for label, *phrases in facts]


def _run_on(label: str, phrases: Sequence[str], width: int) -> str:
    text = ", ".join(filter(None, phrases)).replace(", (", " (")
    words = _BREAKS.split(text)
    return joined(words, " ", width, start=labelled(label.strip()))


def aligned(
    rows: Iterable[Sequence[str]], width: int, *, left: Collection[int], indent: int = 2
) -> list[str]:
    """Returns one string a row: columns in `left` are flush left, the rest flush right.

    Columns stand two spaces apart. A last column that is flush left is wrapped to the rest of
    `width`; no cell is ever cut.
    """
    table = [tuple(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    margin = " " * indent
    before = len(margin) + sum(widths[:-1]) + len(_GAP) * (len(widths) - 1)
    lines = []
    for row in table:
        cells = [
            cell.ljust(size) if i in left else cell.rjust(size)
            for i, (cell, size) in enumerate(zip(row, widths, strict=True))
        ]
        if len(widths) - 1 in left:
            cells[-1] = _wrapped(row[-1], max(width - before, _NARROWEST)).replace(
                "\n", "\n" + " " * before
            )
        lines.append((margin + _GAP.join(cells)).rstrip())
    return lines


def _wrapped(text: str, width: int) -> str:
    """Wraps `text` to `width`: after commas when that is enough, else between words."""
    phrases = text.split(", ")
    if max(map(len, phrases)) < width:
        return joined(phrases, ", ", width)
    return textwrap.fill(text, width, break_on_hyphens=False, break_long_words=False)


def print_table(
    out: Console,
    heading: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Collection[str],
    indent: int = 2,
) -> None:
    """Print a table under its heading; columns named in `left` are text, the rest numbers."""
    columns = [index for index, name in enumerate(heading) if name in left]
    first, *rest = aligned((heading, *rows), out.width, left=columns, indent=indent)
    say(out, first, "dim")
    for line in rest:
        say(out, line)


def print_wrapped(
    out: Console,
    heading: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Collection[str],
    wrapped: Collection[str],
    width: int,
) -> None:
    """Print a table whose columns named in `wrapped` take more lines, so that it fits `width`."""
    lines = wrapped_lines(heading, rows, left=left, wrapped=wrapped, width=width)
    for number, line in enumerate(lines):
        say(out, line, "" if number else "dim")


def wrapped_lines(
    heading: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Collection[str],
    wrapped: Collection[str],
    width: int,
) -> Iterator[str]:
    """Yields a heading and a row a line, broken where columns in `wrapped` take more lines.

    The table is wider than `width` only when its words are. Columns stand two spaces apart, or
    one space when two are too wide.
    """
    table = [tuple(heading), *map(tuple, rows)]
    widths, least = [], []
    for cells in zip(*table, strict=True):
        widths.append(max(map(len, cells)))
        words = [word for cell in cells for word in cell.split()]
        least.append(max(map(len, words)) if cells[0] in wrapped else widths[-1])
    while len(_GAP) * len(widths) + sum(widths) > width and widths != least:
        shrinkable = (i for i, size in enumerate(widths) if size > least[i])
        widths[max(shrinkable, key=widths.__getitem__)] -= 1
    gap = _GAP if len(_GAP) * len(widths) + sum(widths) <= width else " "
    for row in table:
        parts = [
            textwrap.wrap(cell, size, break_on_hyphens=False, break_long_words=False)
            for cell, size in zip(row, widths, strict=True)
        ]
        lines = []
        for line in zip_longest(*parts, fillvalue=""):
            shown = [
                cell.ljust(size) if name in left else cell.rjust(size)
                for cell, size, name in zip(line, widths, heading, strict=True)
            ]
            lines.append((_GAP + gap.join(shown)).rstrip())
        yield "\n".join(lines)


def asked_width(out: Console) -> int:
    """Returns the width in the environment variable COLUMNS, else the console's width."""
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() and int(columns) else out.width


def percent(share: float) -> str:
    """Formats a share as `52.1 %`."""
    return f"{100 * share:.1f} %"


def band_text(share: float) -> str:
    """Formats an error band as `+- 4 %`, with a decimal only below 1 %."""
    return f"+- {100 * share:.{0 if share >= 0.01 else 1}f} %"


def seconds_text(seconds: float) -> str:
    """Formats a time with three digits, so that times in a column compare: `18.0 s`, `3.25 ms`."""
    scale, unit = next(
        ((s, u) for s, u in ((1.0, "s"), (1e-3, "ms")) if seconds >= s), (1e-6, "us")
    )
    value = seconds / scale
    digits = 2 if value <= 0 else max(0, 2 - math.floor(math.log10(value)))
    return f"{value:,.{digits}f} {unit}"


def gib_text(value: float) -> str:
    """Formats GiB without the unit, with the decimals worth reading: 61.2, 3.54, -0.123, 0.0."""
    size = abs(value)
    if size >= 10 or size == 0:
        return f"{value:,.1f}"
    return f"{value:,.{2 if size >= 1 else 3}f}"
