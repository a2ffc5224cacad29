"""Lines of the summary about the schedule: waits and micro-batches in flight by pipeline stage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from parplan.planner.plan.prediction import mean_idle_share
from parplan.planner.plan.traced_plan import AnyPlan
from parplan.report.text import joined, labelled, percent


def wait_lines(plan: AnyPlan, width: int) -> Iterator[str]:
    """Yields the idle share and the micro-batches in flight of every stage of a pipeline.

    Stages in a row with equal numbers are one phrase.
    """
    waits = plan.predicted.waits
    mean = mean_idle_share(waits)
    if mean is None or plan.mesh.pp == 1:
        return
    shares = ((each.stage, percent(each.idle_share)) for each in waits)
    held = ((each.stage, f"{each.in_flight:,}") for each in waits)
    yield _line("idle", f"{percent(mean)} in bubbles and transfers", shares, width)
    each = ", counted in each virtual stage" if plan.pipeline.virtual_stages > 1 else ""
    yield _line("in flight", f"micro-batches{each}", held, width)


def _line(label: str, start: str, numbers: Iterable[tuple[int, str]], width: int) -> str:
    phrases = []
    for text, alike in groupby(numbers, key=lambda pair: pair[1]):
        stages = [stage for stage, _ in alike]
        name = f"{stages[0]}" if len(stages) == 1 else f"{stages[0]}-{stages[-1]}"
        phrases.append(f"{name}: {text}")
    phrases[0] = f"stage {phrases[0]}"
    return joined((start, *phrases), " | ", width, start=labelled(label))
