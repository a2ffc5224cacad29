"""The orders of the mesh axes that a plan could have, with the reason for the chosen one."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from parplan.planner.plan.mesh_orders import OrderPrice
from parplan.report.text import joined, print_table, say, seconds_text

HEADING = ("order", "step", "data", "p2p", "nodes of a data-parallel group")


def print_orders(prices: Sequence[OrderPrice], out: Console) -> None:
    """Print the price of a plan's choices in each order of its axes, outermost first."""
    say(out)
    say(out, "orders of the mesh axes over the ranks, outermost first:", "bold")
    if len(prices) == 1:
        text = "the others that the stack can start in lie alike on the nodes"
        say(out, joined(f"{prices[0].order}: {text}".split(" "), " ", out.width, start="  "))
        return
    rows = [
        (
            f"{each.order}{' (the plan)' if each.chosen else ''}",
            seconds_text(each.step_s),
            seconds_text(each.data_s),
            seconds_text(each.p2p_s),
            str(each.dp_nodes),
        )
        for each in prices
    ]
    print_table(out, HEADING, rows, left=("order",))
