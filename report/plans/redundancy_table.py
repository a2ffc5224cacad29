"""Redundant bytes by stage, by layer plan and by operator."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from parplan.planner.plan.plan import Plan
from parplan.planner.plan.prediction import RedundantGib
from parplan.report.text import gib_text, print_table, say

CLASSES = ("parameters", "gradients", "optimizer", "activations", "temporaries", "total")
NOTHING = 1e-4  # GiB below which an operator gets no line


def print_redundancy(plan: Plan, out: Console) -> None:
    """Print GiB of one device beyond its share of one copy of everything."""
    if not plan.predicted.redundancy_gib.stages:
        return
    say(out)
    say(
        out,
        "  redundant GiB per GPU (temporaries of operators are each a moment of its own)",
        "dim",
    )
    print_table(out, ("of", "operator", *CLASSES), list(_rows(plan)), left=("of", "operator"))


def _rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    redundancy = plan.predicted.redundancy_gib
    for first, last, stage in _alike(redundancy.stages):
        yield f"stage {first}" + (f"-{last}" if last > first else ""), "", *_numbers(stage)
    for name, layer in redundancy.layers.items():
        yield (
            f"one {name}" if plan.layer_plans[name].layer.value != name else name,
            "all",
            *_numbers(layer.layer),
        )
        for operator, operator_gib in layer.operators.items():
            if operator_gib.total >= NOTHING:
                yield "", operator, *_numbers(operator_gib)


def _alike(stages: tuple[RedundantGib, ...]) -> Iterator[tuple[int, int, RedundantGib]]:
    """Yields first stage, last stage and redundancy of each run of equal stages."""
    first = 0
    for index in range(1, len(stages) + 1):
        if index == len(stages) or stages[index] != stages[first]:
            yield first, index - 1, stages[first]
            first = index


def _numbers(redundancy: RedundantGib) -> tuple[str, ...]:
    return tuple(gib_text(getattr(redundancy, name)) for name in CLASSES)
