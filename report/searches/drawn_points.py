"""Numbered points as a drawing of characters, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from parplan.report.text import say_exactly

WIDEST = 80  # characters of a drawing
FRAME = 4  # lines around the points: their title, borders and the horizontal axis
_BESIDE = 14  # characters beside the points: borders and the numbers of the vertical axis
_ASCII = str.maketrans("┌┐└┘─│", "++++-|")


def print_points(
    points: Sequence[tuple[float, float]],
    units: tuple[str, str],
    out: Console,
    *,
    height: int,
    indent: int = 2,
) -> None:
    """Print a drawing of points (x, y), each the last digit of its number, the first one 1.

    The frame is ASCII where the output is not Unicode.

    units    of x and of y
    height   lines of the points, without the FRAME, whose title is the caller's
    """
    for line in point_lines(points, units, min(out.width, WIDEST) - indent, height):
        shown = line if out.encoding.startswith("utf") else line.translate(_ASCII)
        say_exactly(out, (" " * indent + shown).rstrip())


def point_lines(
    points: Sequence[tuple[float, float]], units: tuple[str, str], width: int, height: int
) -> list[str]:
    """Returns the lines of the drawing, each of at most `width` characters."""
    from uniplot import plot_to_string

    return plot_to_string(
        xs=[[x] for x, _ in points],
        ys=[[y] for _, y in points],
        width=width - _BESIDE,
        height=height,
        x_gridlines=[],
        y_gridlines=[],
        x_unit=f" {units[0]}",
        y_unit=f" {units[1]}",
        lines=False,
        color=False,
        character_set="ascii",
        force_ascii_characters=[str(number % 10) for number in range(1, len(points) + 1)],
        line_length_hard_cap=width,
    ).splitlines()
