"""The front of step time, peak memory and redundant memory as a table, and as what programs
read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from parplan.costmodels.communication.mesh import Mesh
from parplan.planner.plan.plan import Plan
from parplan.planner.search.pareto import HOST_SHARE, HOST_SLOWDOWN, ParetoFront, ParetoPoint
from parplan.profiles.units import counted, gib
from parplan.report.names import (
    blocks_by_plan,
    found_text,
    graph_of,
    recompute_names,
    recompute_text,
)
from parplan.report.plans.summary import SummaryContext, print_header
from parplan.report.text import (
    asked_width,
    band_text,
    gib_text,
    joined,
    labelled,
    percent,
    print_wrapped,
    say,
    seconds_text,
)

_NUMBERS = ("#", "step", "slower", "MFU", "peak", "redund.")
_HOST = "host"
_TEXTS = ("pp x dp x tp", "ZeRO", "recompute", "found by")
# characters of a name for what blocks recompute; a list of operators that is longer is counted
_SHORT = 20


def print_front(
    front: ParetoFront, paths: Sequence[Path], out: Console, context: SummaryContext
) -> None:
    """Print the front for a person, fastest first."""
    print_header(front.points[0].plan, out, context)
    rows, host = (
        [_row(front, point, number) for number, point in enumerate(front.points, 1)],
        front.uses_host,
    )
    numbers = (*_NUMBERS, *((_HOST,) if host else ()))
    width = asked_width(out)
    print_wrapped(
        out,
        (*numbers, *_TEXTS),
        rows,
        left=_TEXTS,
        wrapped=("ZeRO", "recompute", "found by"),
        width=width,
    )
    say(out)
    for label, text in _facts(front, paths, context):
        say(out, joined(text.split(" "), " ", width, start=labelled(label)))


def _row(front: ParetoFront, point: ParetoPoint, number: int) -> tuple[str, ...]:
    plan, tie = point.plan, front.leaner_tie(point)
    mesh, slower = plan.mesh, point.step_time_s / front.points[0].step_time_s - 1
    found = found_text(plan.search)
    if plan.search.gap:
        found += f", gap {percent(plan.search.gap)}"
    if tie is not None:
        found += f", tie with {tie}"
    return (
        str(number),
        seconds_text(point.step_time_s),
        f"{100 * slower:+.1f} %" if number > 1 else "",
        percent(plan.predicted.mfu.value),
        gib_text(point.peak_memory_gib),
        gib_text(point.redundancy_gib),
        *((gib_text(point.host_gib) if point.host_gib else "-",) if front.uses_host else ()),
        _mesh_text(mesh),
        front_zero_text(plan),
        recompute_counts(plan),
        found,
    )


def _mesh_text(mesh: Mesh) -> str:
    return f"{mesh.pp} x {mesh.dp} x {mesh.tp}" + (f" (ep {mesh.ep})" if mesh.ep > 1 else "")


def front_zero_text(plan: Plan) -> str:
    """The ZeRO stages of the blocks: `3`, or `1, 3` where they differ."""
    return ", ".join(
        map(str, sorted({plan.layer_plans[name].zero for name in blocks_by_plan(plan)}))
    )


def recompute_counts(plan: Plan) -> str:
    """What the blocks recompute, in short: `none`, or `28 none, 16 selective, 4 with 5
    operators`.
    """
    names, counts = recompute_names(graph_of(plan)), Counter[str]()
    for name, count in blocks_by_plan(plan).items():
        text = recompute_text(plan.layer_plans[name], names).split(" (")[0]
        counts[
            text
            if len(text) <= _SHORT
            else f"with {counted(len(plan.layer_plans[name].recompute), 'operator')}"
        ] += count
    return (
        next(iter(counts)).removeprefix("with ")
        if len(counts) == 1
        else ", ".join(f"{count} {text}" for text, count in counts.items())
    )


def _facts(
    front: ParetoFront, paths: Sequence[Path], context: SummaryContext
) -> Iterator[tuple[str, str]]:
    """The lines under the table: units, what is proven, ties, the kind of the numbers, the
    files.
    """
    first = front.points[0].plan
    device = first.predicted.memory_gib[0]
    took = "" if context.elapsed_s is None else f" in {context.elapsed_s:.1f} s"
    yield (
        "units",
        f"peak: GiB of the fullest GPU, which has {device.capacity:.1f}; redund.: GiB over all "
        f"GPUs beyond one copy",
    )
    if front.uses_host:
        yield (
            "host",
            (
                f"GiB of a node's host, which has {gib(first.cluster.host_memory_bytes):,.0f}, in "
                f"neither of the two; states that lie there "
                f"are not on the GPUs, so that redund. may be below zero; with it one of "
                f"{HOST_SHARE} memory limits is searched, and "
                f"slowdowns up to {percent(HOST_SLOWDOWN)}"
            ),
        )
    yield (
        "proven",
        (
            f"largest gap {percent(max(point.plan.search.gap for point in front.points))} over "
            f"the points, each at its own limit; "
            f"{front.num_searches} searches{took}; plans between two limits were not looked for"
        ),
    )
    if front.stopped:
        yield (
            "stopped",
            f"early ({front.stopped}): the front is incomplete, and plans that it lacks may beat "
            f"its points",
        )
    if front.nothing_within_gib is not None:
        yield "least", f"no plan fits within {gib_text(front.nothing_within_gib)} GiB of each GPU"
    yield from _tie_facts(front)
    yield (
        "note",
        f"the step times are predicted ({first.predicted.step_time_s.kind}), not measured; memory "
        f"is computed",
    )
    yield "files", f"{paths[0]} to {paths[-1]}" if len(paths) > 1 else f"{paths[0]}"


def _tie_facts(front: ParetoFront) -> Iterator[tuple[str, str]]:
    band = next(
        (band for point in front.points if (band := point.plan.predicted.error_band)), None
    )  # none of what the host keeps
    if band is None:
        yield "ties", "unknown: no measured steps on this device"
        return
    ties = sum(front.leaner_tie(point) is not None for point in front.points)
    if ties:
        yield (
            "ties",
            (
                f"{ties} of the points {'is' if ties == 1 else 'are'} inside the error band "
                f"({band_text(band.time.share)}) of a slower one "
                "that needs no more memory of either kind: take that one"
            ),
        )


def front_document(front: ParetoFront, paths: Sequence[Path], elapsed_s: float) -> dict[str, Any]:
    """The front as JSON values; the plans themselves are in their files."""
    points = zip(front.points, paths, strict=True)
    return {
        "objective": "pareto",
        "complete": front.stopped is None,
        "stopped": front.stopped,
        "nothing_within_gib": front.nothing_within_gib,
        "searches": front.num_searches,
        "elapsed_s": round(elapsed_s, 3),
        "points": [_point_document(front, point, path) for point, path in points],
    }


def _point_document(front: ParetoFront, point: ParetoPoint, path: Path) -> dict[str, Any]:
    plan, search = point.plan, point.plan.search
    assert search.front is not None, "a point of a front"
    return {
        "plan_file": str(path),
        "number": search.front.number,
        "step_time_s": {"value": point.step_time_s, "kind": str(plan.predicted.step_time_s.kind)},
        "peak_memory_gib": point.peak_memory_gib,
        "redundancy_gib": point.redundancy_gib,
        "host_gib": point.host_gib,
        "mfu": plan.predicted.mfu.value,
        "mesh": asdict(plan.mesh),
        "found_by": {
            "objective": str(search.objective),
            "memory_limit_gib": search.front.memory_limit_gib,
            "max_slowdown": search.front.max_slowdown,
        },
        "status": str(search.status),
        "gap": search.gap,
        "tie_with": front.leaner_tie(point),
    }
