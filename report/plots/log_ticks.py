"""The ticks of a logarithmic axis: plain numbers in place of powers of ten."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axis import Axis

_FEW_DECADES = 200.0  # an axis shorter than this factor has ticks at 2 and 5 as well


def set_plain_ticks(axis: Axis) -> None:
    """Set ticks such as 1, 10 and 100, with 2 and 5 between them on an axis of few decades.

    The ends of the axis must be set, or the data drawn.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = sorted(axis.get_view_interval())
    subs = (1.0, 2.0, 5.0) if high / low < _FEW_DECADES else (1.0,)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.9g}"))
    axis.set_minor_formatter(NullFormatter())
