"""The lines of a summary that say what launchers would lose of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parplan.planner.export.launcher_prices import LauncherPrice
from parplan.profiles.units import gib
from parplan.report.text import gib_text, joined, labelled

_FASTER = -5e-4  # a share that is shown as -0.1 %


def launcher_lines(prices: Sequence[LauncherPrice], width: int) -> Iterator[str]:
    """Yields a line with what the settings of a plan take at launchers, and those that refuse."""
    runs = [_price_text(each) for each in prices if not each.refused]
    label = "launchers"
    if runs:
        text = f"these settings at {' | '.join(runs)}"
        yield joined(text.split(" "), " ", width, start=labelled(label))
        label = ""
    for each in prices:
        if each.refused:
            words = f"{each.name}: {each.refused}".split(" ")
            yield joined(words, " ", width, start=labelled(label))
            label = ""


def _price_text(price: LauncherPrice) -> str:
    """Returns the price at a launcher, and where other settings of its own are worth a search.

    They are where it is faster, or where those next to the plan do not fit.
    """
    text = f"{price.name} {100 * price.slower:+.1f} %, {gib_text(gib(price.peak_bytes))} GiB"
    if price.missing_bytes:
        others = f": --for {price.name} searches settings that do" if price.searched else ""
        return f"{text} (does not fit{others})"
    if price.slower <= _FASTER and price.searched:
        return f"{text} (faster: --for {price.name} searches its settings)"
    return text
