"""The console that every report goes to, with lines of phrases and aligned columns.

rich.Table is not used: it shortens numbers when a terminal is narrow and pads every line.
"""

from __future__ import annotations

import math
import re
import shutil
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import TextIO

from rich.console import Console
from rich.text import Text

from parplan.profiles.documents.texts import escaped_lines
from parplan.report.wrapping import broken, width_of

FIXED_WIDTH = 100  # characters off a terminal, so that a plan always prints the same text
LABEL_WIDTH = 12  # characters of a label of the summary, with its indent and its padding
_GAP = "  "
_BREAKS = re.compile(r"(?<!\bx) (?!x )")  # not inside `1 x 32`
_READABLE = 32  # characters that the last column of facts needs, at the least
_NARROWEST = 24  # characters of a wrapped last column, at the least


def console(stream: TextIO) -> Console:
    """Returns a console on `stream`.

    Off a terminal there is no colour, and the width is that of the environment variable COLUMNS,
    else a fixed one.
    """
    width = width_of(stream) or FIXED_WIDTH
    height = shutil.get_terminal_size().lines  # with both, rich asks no terminal, dumb ones too
    return Console(
        file=stream, width=width, height=height, highlight=False, markup=False, emoji=False
    )


def say(out: Console, text: str = "", style: str = "") -> None:
    """Print `text`; where a terminal is too narrow for a line, it is broken between words.

    Characters that a terminal would obey are escaped, here and in `say_exactly`.
    """
    width = out.width if width_of(out.file) else None
    out.print(Text(broken(escaped_lines(text), width), style=style), soft_wrap=True)


def say_exactly(out: Console, text: str) -> None:
    """Print a line that people copy, such as a command, as it is."""
    out.print(Text(escaped_lines(text)), soft_wrap=True)


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
    bold: Collection[int] = (),
) -> None:
    """Print a table under its heading; columns named in `left` are text, the rest numbers.

    Where it is too wide, its text takes more lines. Where that is not enough, the columns are
    printed in several tables, one below the other, each with the first column.

    bold   the numbers of the rows that stand out
    """
    table = [tuple(heading), *map(tuple, rows)]
    styles = dict.fromkeys(bold, "bold")
    for number, block in enumerate(_blocks(table, left, out.width, indent)):
        if number:
            say(out)
        for row, line in enumerate(block, start=-1):
            say(out, line, "dim" if row < 0 else styles.get(row, ""))


def table_lines(
    heading: Sequence[str], rows: Iterable[Sequence[str]], width: int, *, left: Collection[str]
) -> Iterator[str]:
    """Yields the rows of a table that fits `width` as `print_table` says, the heading first."""
    table = [tuple(heading), *map(tuple, rows)]
    for number, block in enumerate(_blocks(table, left, width, indent=2)):
        if number:
            yield ""
        yield from block


def _blocks(
    table: Sequence[Sequence[str]], text: Collection[str], width: int, indent: int
) -> Iterator[list[str]]:
    """Yields the rows of each of the tables that a table is printed as, headings first."""
    left = {index for index, name in enumerate(table[0]) if name in text}
    rows = aligned(table, width, left=left, indent=indent)
    if widest(rows) <= width:
        yield rows
        return
    columns = list(zip(*table, strict=True))
    for chosen in _column_groups([_least(column, text) for column in columns], width - indent):
        part = list(zip(*(columns[index] for index in chosen), strict=True))
        yield _narrow_rows(part, text, width, indent)


def _least(column: Sequence[str], text: Collection[str]) -> int:
    """Returns the fewest characters that a column takes: its longest word, or its widest number."""
    if column[0] not in text:
        return max(map(len, column))
    return max(len(word) for cell in column for word in _BREAKS.split(cell))


def _column_groups(least: Sequence[int], room: int) -> list[list[int]]:
    """Returns the columns of each table: the first one, and as many others as there is room for."""
    groups = [[0]]
    taken = least[0]
    for index in range(1, len(least)):
        if taken + 1 + least[index] > room and len(groups[-1]) > 1:
            groups.append([0])
            taken = least[0]
        groups[-1].append(index)
        taken += 1 + least[index]
    return groups


def _narrow_rows(
    table: Sequence[Sequence[str]], text: Collection[str], width: int, indent: int
) -> list[str]:
    """Returns the rows of a table whose text is wrapped, with gaps of one space if need be."""
    heading = table[0]
    columns = list(zip(*table, strict=True))
    sizes = [max(map(len, column)) for column in columns]
    least = [_least(column, text) for column in columns]
    while indent + sum(sizes) + len(_GAP) * (len(sizes) - 1) > width and sizes != least:
        shrinkable = (i for i, size in enumerate(sizes) if size > least[i])
        sizes[max(shrinkable, key=sizes.__getitem__)] -= 1
    fits = indent + sum(sizes) + len(_GAP) * (len(sizes) - 1) <= width
    rows = []
    for row in table:
        cells = [
            joined(_BREAKS.split(cell), " ", size).splitlines()
            for cell, size in zip(row, sizes, strict=True)
        ]
        lines = []
        for parts in zip_longest(*cells, fillvalue=""):
            shown = [
                part.ljust(size) if name in text else part.rjust(size)
                for part, size, name in zip(parts, sizes, heading, strict=True)
            ]
            lines.append((" " * indent + (_GAP if fits else " ").join(shown)).rstrip())
        rows.append("\n".join(lines))
    return rows


def widest(rows: Iterable[str]) -> int:
    """Returns the characters of the longest line."""
    return max(len(line) for row in rows for line in row.splitlines())


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
