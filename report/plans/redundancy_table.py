"""Where bytes are held twice: by stage, by layer plan, and by operator."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from parplan.planner.plan.plan import Plan
from parplan.planner.plan.prediction import RedundantGib
from parplan.report.text import gib_text, print_table, say

CLASSES = ("parameters", "gradients", "optimizer", "activations", "temporaries", "total")
NOTHING = 1e-4  # GiB: what is less is not worth a line


def print_redundancy(plan: Plan, out: Console) -> None:
    """GiB of one device beyond its share of one copy of everything."""
    found = plan.predicted.redundancy_gib
    if not found.stages:
        return
    say(out)
    say(
        out,
        "  redundant GiB per GPU (temporaries of operators are each a moment of its own)",
        "dim",
    )
    print_table(out, ("of", "operator", *CLASSES), list(_rows(plan)), left=("of", "operator"))


def _rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    found = plan.predicted.redundancy_gib
    for first, last, stage in _alike(found.stages):
        yield f"stage {first}" + (f"-{last}" if last > first else ""), "", *_numbers(stage)
    for name, layer in found.layers.items():
        yield (
            f"one {name}" if plan.layer_plans[name].layer.value != name else name,
            "all",
            *_numbers(layer.layer),
        )
        for operator, own in layer.operators.items():
            if own.total >= NOTHING:
                yield "", operator, *_numbers(own)


def _alike(stages: tuple[RedundantGib, ...]) -> Iterator[tuple[int, int, RedundantGib]]:
    """Runs of stages that hold the same."""
    first = 0
    for index in range(1, len(stages) + 1):
        if index == len(stages) or stages[index] != stages[first]:
            yield first, index - 1, stages[first]
            first = index


def _numbers(found: RedundantGib) -> tuple[str, ...]:
    return tuple(gib_text(getattr(found, name)) for name in CLASSES)
