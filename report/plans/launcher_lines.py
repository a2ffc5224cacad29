"""The lines of a summary that say what launchers would lose of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parplan.planner.export.launcher_prices import LauncherPrice
from parplan.profiles.units import gib
from parplan.report.text import gib_text, joined, labelled


def launcher_lines(prices: Sequence[LauncherPrice], width: int) -> Iterator[str]:
    """Yields a line with the launchers that run a plan, and one for each that does not."""
    runs = [
        f"{each.name} {100 * each.slower:+.1f} %, {gib_text(gib(each.peak_bytes))} GiB"
        for each in prices
        if not each.refused
    ]
    label = "launchers"
    if runs:
        text = " | ".join(runs)
        yield joined(text.split(" "), " ", width, start=labelled(label))
        label = ""
    for each in prices:
        if each.refused:
            words = f"{each.name}: {each.refused}".split(" ")
            yield joined(words, " ", width, start=labelled(label))
            label = ""
