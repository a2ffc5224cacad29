"""Pieces of HTML that a notebook shows: every text is escaped, and colours are the notebook's."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from html import escape

# Texts and lines have the colour of the notebook's own text; the bar's colours are at least 3 : 1
# against white and against the dark grey of notebooks.
STYLE = """<style>
.parplan{max-width:62rem;line-height:1.45;color:inherit}
.parplan h4{margin:.2em 0 .1em;font-size:1.1em}
.parplan h5{margin:1em 0 .2em;font-size:1em}
.parplan p{margin:.2em 0}
.parplan .scroll{overflow-x:auto}
.parplan table{border-collapse:collapse;margin:.3em 0;font-variant-numeric:tabular-nums;
 background:transparent;color:inherit;border:0}
.parplan tr,.parplan tbody tr:nth-child(odd),.parplan tbody tr:hover{background:transparent}
.parplan th,.parplan td{padding:.15em .9em .15em 0;text-align:right;vertical-align:top;
 border:0;border-bottom:1px solid rgba(128,128,128,.35);color:inherit;white-space:nowrap}
.parplan th.text,.parplan td.text{text-align:left;white-space:normal}
.parplan th{font-weight:600}
.parplan tr.mark td{font-weight:700}
.parplan .bar{display:flex;height:1.1em;border-radius:3px;overflow:hidden;margin:.4em 0}
.parplan .key{display:flex;flex-wrap:wrap;gap:.1em 1.1em}
.parplan .key i{display:inline-block;width:.75em;height:.75em;border-radius:2px;margin-right:.4em}
.parplan summary{cursor:pointer;margin-top:.8em}
</style>"""
COLOURS = (
    "#4a7ebb",
    "#c0672b",
    "#7a7a7a",
    "#3a8f6a",
    "#a8589a",
    "#8a7a1f",
    "#b8505a",
    "#5f8a2f",
)


def whole(title: str, *pieces: str) -> str:
    """Returns one block under a title; the pieces are HTML."""
    return f'{STYLE}<div class="parplan"><h4>{escape(title)}</h4>{"".join(pieces)}</div>'


def heading(text: str) -> str:
    """Returns the heading of the pieces that follow."""
    return f"<h5>{escape(text)}</h5>"


def line(text: str) -> str:
    """Returns a line of text."""
    return f"<p>{escape(text)}</p>"


def table(
    names: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    texts: Collection[str] = (),
    marked: Collection[int] = (),
) -> str:
    """Returns a table; columns named in `texts` are flush left, the rest are numbers.

    names    headings of the columns; a table without any has no heading
    marked   numbers of the rows that are bold
    """
    kinds = [' class="text"' if name in texts or not names else "" for name in names]
    head = "".join(
        f'<th scope="col"{kind}>{escape(name)}</th>'
        for name, kind in zip(names, kinds, strict=True)
    )
    body = "".join(
        f"<tr{_mark(number in marked)}>"
        + "".join(f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(row, kinds, strict=True))
        + "</tr>"
        for number, row in enumerate(rows)
    )
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _mark(marked: bool) -> str:
    return ' class="mark"' if marked else ""


def facts(rows: Iterable[Sequence[str]]) -> str:
    """Returns labelled lines; the first cell of each row is its label."""
    body = "".join(
        f'<tr><th scope="row" class="text">{escape(label)}</th>'
        + "".join(f'<td class="text">{escape(cell)}</td>' for cell in cells)
        + "</tr>"
        for label, *cells in rows
    )
    return f'<div class="scroll" tabindex="0"><table><tbody>{body}</tbody></table></div>'


def bar(parts: Sequence[tuple[str, float, str]]) -> str:
    """Returns a bar of parts that add up, with a key: name, size and text of each.

    A part that is below zero has no width.
    """
    total = sum(max(size, 0.0) for _, size, _ in parts) or 1.0
    coloured = [
        (name, max(size, 0.0) / total, text, COLOURS[index % len(COLOURS)])
        for index, (name, size, text) in enumerate(parts)
    ]
    spans = "".join(
        f'<span style="width:{100 * share:.2f}%;background:{colour}"></span>'
        for _, share, _, colour in coloured
    )
    key = "".join(
        f'<span><i style="background:{colour}"></i>{escape(f"{name} {text}")}</span>'
        for name, _, text, colour in coloured
    )
    return f'<div class="bar" aria-hidden="true">{spans}</div><div class="key">{key}</div>'


def folded(title: str, lines: Iterable[str]) -> str:
    """Returns lines behind a title that opens them, nothing without lines."""
    body = "".join(map(line, lines))
    return f"<details><summary>{escape(title)}</summary>{body}</details>" if body else ""
