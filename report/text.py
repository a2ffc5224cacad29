"""The console that every report goes to, and the two shapes of text in it: phrases in lines, and
aligned columns.

Columns are set here and not by rich.Table, which shortens numbers when a terminal is narrow and
pads every line.
"""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Collection, Iterable, Sequence
from itertools import zip_longest
from typing import TextIO

from rich.console import Console
from rich.text import Text

FIXED_WIDTH = 100  # off a terminal, so that the same plan always prints the same text
LABEL_WIDTH = 12  # two spaces, the label of a line of the summary, and what is left
_GAP = "  "
_NARROWEST = 24  # of a last column that is wrapped


def console(stream: TextIO) -> Console:
    """A console on `stream`: the terminal's width and colours, a fixed width and no colour anywhere
    else.
    """
    width = None if stream.isatty() else FIXED_WIDTH
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


def say(out: Console, text: str = "", style: str = "") -> None:
    """Print `text` as it is: a line that is too long is never shortened."""
    out.print(Text(text, style=style), soft_wrap=True)


def joined(
    phrases: Sequence[str],
    separator: str,
    width: int,
    *,
    start: str = "",
    indent: int | None = None,
) -> str:
    """`start` and the phrases in lines of at most `width`; a line breaks at a separator, the next
    is indented.
    """
    margin = " " * (len(start) if indent is None else indent)
    lines, line, fresh = [], start, True
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


def aligned(
    rows: Iterable[Sequence[str]], width: int, *, left: Collection[int], indent: int = 2
) -> list[str]:
    """One string a row, of one or more lines: columns in `left` flush left, the others flush right,
    two spaces apart.

    A flush left last column is wrapped to what is left of `width`; no cell is ever cut.
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
    """`text` in lines of at most `width`: broken after commas when that is enough, else between
    words.
    """
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
    """A table under its heading; columns named in `left` are text, the others numbers."""
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
    """A table under its heading, of at most `width` where that is enough for its words: columns
    named in `wrapped` take more lines.

    Columns stand two spaces apart, or one where that is too wide.
    """
    table = [tuple(heading), *map(tuple, rows)]
    widths, least = [], []
    for cells in zip(*table, strict=True):
        widths.append(max(map(len, cells)))
        words = [word for cell in cells for word in cell.split()]
        least.append(max(map(len, words)) if cells[0] in wrapped else widths[-1])
    while len(_GAP) * len(widths) + sum(widths) > width and widths != least:
        widths[
            max((i for i, size in enumerate(widths) if size > least[i]), key=widths.__getitem__)
        ] -= 1
    gap = _GAP if len(_GAP) * len(widths) + sum(widths) <= width else " "
    for number, row in enumerate(table):
        parts = [
            textwrap.wrap(cell, size, break_on_hyphens=False, break_long_words=False)
            for cell, size in zip(row, widths, strict=True)
        ]
        for line in zip_longest(*parts, fillvalue=""):
            shown = [
                cell.ljust(size) if name in left else cell.rjust(size)
                for cell, size, name in zip(line, widths, heading, strict=True)
            ]
            say(out, (_GAP + gap.join(shown)).rstrip(), "" if number else "dim")


def asked_width(out: Console) -> int:
    """The width that COLUMNS asks for, else that of the console."""
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() and int(columns) else out.width


def percent(share: float) -> str:
    """A share as `52.1 %`."""
    return f"{100 * share:.1f} %"


def band_text(share: float) -> str:
    """An error band as `+- 4 %`; a decimal only below 1 %."""
    return f"+- {100 * share:.{0 if share >= 0.01 else 1}f} %"


def seconds_text(seconds: float) -> str:
    """Three digits, zeros kept, so that times in a column compare: `18.0 s`, `3.25 ms`."""
    scale, unit = next(
        ((s, u) for s, u in ((1.0, "s"), (1e-3, "ms")) if seconds >= s), (1e-6, "us")
    )
    value = seconds / scale
    digits = 2 if value <= 0 else max(0, 2 - math.floor(math.log10(value)))
    return f"{value:,.{digits}f} {unit}"


def gib_text(value: float) -> str:
    """GiB without the unit, with the decimals worth reading: 61.2, 3.54, -0.123; 0 is 0.0."""
    size = abs(value)
    return f"{value:,.{1 if size >= 10 or size == 0 else 2 if size >= 1 else 3}f}"
