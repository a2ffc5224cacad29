"""The operators of a traced module that stay whole under the tensor parallelism of its plan."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from parplan.planner.traced.whole_operators import WholeOperator
from parplan.report.text import joined, say


def print_whole(operators: Sequence[WholeOperator], tp: int, out: Console) -> None:
    """Print one line for each operator of each class of shards, with the reason."""
    say(out)
    say(out, f"operators that each of the {tp} tensor-parallel ranks computes whole:", "bold")
    for each in operators:
        alike = f" and {each.num_shards - 1} alike" if each.num_shards > 1 else ""
        text = f"{each.operator} of {each.shard}{alike}: {each.reason}"
        say(out, joined(text.split(" "), " ", out.width, start="  ", indent=4))
    if not operators:
        say(out, "  none")
