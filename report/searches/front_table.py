"""The front of step time, peak memory and redundant memory as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from parplan.costmodels.communication.mesh import Mesh
from parplan.planner.plan.traced_plan import AnyPlan, TracedPlan
from parplan.planner.search.pareto import HOST_SHARE, HOST_SLOWDOWN, ParetoFront, ParetoPoint
from parplan.profiles.units import counted, gib
from parplan.report.names import (
    blocks_by_plan,
    graph_of,
    recompute_text,
    search_text,
)
from parplan.report.plans.block_phrases import layers_phrases
from parplan.report.plans.plan_header import header, print_header, short_assumed
from parplan.report.plans.summary import MOST_LINES
from parplan.report.plans.summary_context import SummaryContext
from parplan.report.plots.front_plot import edge_s
from parplan.report.searches.drawn_points import FRAME, print_points
from parplan.report.text import (
    gib_text,
    joined,
    labelled,
    percent,
    print_table,
    say,
    seconds_text,
    table_lines,
)

_NUMBERS = ("#", "step", "slower", "MFU", "GiB", "redund.")
_HOST = "host"
TEXTS = ("pp x dp x tp", "ZeRO", "recompute", "found by")
_DECIDING = ("stopped", "least", "note", "files")  # facts of the short form
_TALLEST = 8  # lines of the points of a drawing
_HEIGHTS = (6, 5, 4, 3)  # of the short form: the first that leaves enough rows
_ENOUGH_ROWS = 4
_SHORT = 20  # characters; a longer list of recomputed operators is printed as its length


def print_front(
    front: ParetoFront, paths: Sequence[Path], out: Console, context: SummaryContext
) -> None:
    """Print the front for a person: drawn, and as a table, fastest first."""
    if context.whole:
        print_header(front.points[0].plan, out, context)
        _draw(front, out, _TALLEST)
        print_table(out, front_names(front), front_rows(front), left=TEXTS)
        say(out)
        for label, text in front_facts(front, paths, context):
            say(out, joined(text.split(" "), " ", out.width, start=labelled(label)))
    else:
        _print_short(front, paths, out, context)


def _print_short(
    front: ParetoFront, paths: Sequence[Path], out: Console, context: SummaryContext
) -> None:
    """Print a drawing, some of the points, and what a reader must know, in MOST_LINES."""
    upper = [header(front.points[0].plan, out.width)]
    if context.assumed:
        upper.append(short_assumed(context.assumed, out.width, listed=True))
    kept = (fact for fact in front_facts(front, paths, context) if fact[0] in _DECIDING)
    lower = [joined(text.split(" "), " ", out.width, start=labelled(label)) for label, text in kept]
    room = MOST_LINES - sum(line.count("\n") + 1 for line in (*upper, *lower))
    drawn = len(front.points) > 1
    names, every_row = front_names(front)[:-2], [row[:-2] for row in front_rows(front)]
    for height in _HEIGHTS:
        rows = _some_rows(names, every_row, out.width, room - (height + FRAME if drawn else 0))
        if len(rows) > _ENOUGH_ROWS:
            break
    for style, line in zip(("bold", "dim"), upper, strict=False):
        say(out, line, style)
    if drawn:
        _draw(front, out, min(_TALLEST, room - len(rows) - FRAME))
    for number, line in enumerate(rows):
        say(out, line, "" if number else "dim")
    for line in lower:
        say(out, line)


def _some_rows(
    names: Sequence[str], rows: Sequence[tuple[str, ...]], width: int, most: int
) -> list[str]:
    """Returns the heading and rows at even distances that have at most `most` lines."""
    last = len(rows) - 1
    for count in range(last + 1, min(last, 1), -1):
        chosen = sorted({round(index * last / max(count - 1, 1)) for index in range(count)})
        lines = list(table_lines(names, [rows[index] for index in chosen], width, left=TEXTS))
        if sum(line.count("\n") + 1 for line in lines) <= most:
            break
    return lines


def _draw(front: ParetoFront, out: Console, height: int) -> None:
    """Draw step time against peak memory; what is far slower stands at the upper edge."""
    if len(front.points) < 2:
        return
    steps_s = [point.step_time_s for point in front.points]
    top_s = edge_s(steps_s)
    far = "; far slower at the top" if steps_s[-1] > top_s else ""
    say(out, f"  step against peak memory, by number{far}", "dim")
    scale, unit = (1.0, "s") if steps_s[0] >= 1 else (1e3, "ms")
    points = [
        (point.peak_memory_gib, scale * min(step_s, top_s))
        for point, step_s in zip(front.points, steps_s, strict=True)
    ]
    print_points(points, ("GiB", unit), out, height=height)


def front_names(front: ParetoFront) -> tuple[str, ...]:
    """Returns the headings of the columns of `front_rows`."""
    return (*_NUMBERS, *((_HOST,) if front.uses_host else ()), *TEXTS)


def front_rows(front: ParetoFront) -> list[tuple[str, ...]]:
    """Returns the cells of the points, fastest first."""
    return [_row(front, point, number) for number, point in enumerate(front.points, 1)]


def _row(front: ParetoFront, point: ParetoPoint, number: int) -> tuple[str, ...]:
    plan = point.plan
    tie = front.leaner_tie(point)
    slower = point.step_time_s / front.points[0].step_time_s - 1
    search = search_text(plan.search)
    if plan.search.gap:
        search += f", gap {percent(plan.search.gap)}"
    if tie is not None:
        search += f", tie with {tie}"
    host_text = gib_text(point.host_gib) if point.host_gib else "-"
    return (
        str(number),
        seconds_text(point.step_time_s),
        f"{100 * slower:+.1f} %" if number > 1 else "",
        percent(plan.predicted.mfu.value),
        gib_text(point.peak_memory_gib),
        gib_text(point.redundancy_gib),
        *((host_text,) if front.uses_host else ()),
        _mesh_text(plan.mesh),
        front_zero_text(plan),
        recompute_counts(plan),
        search,
    )


def _mesh_text(mesh: Mesh) -> str:
    return f"{mesh.pp} x {mesh.dp} x {mesh.tp}" + (f" (ep {mesh.ep})" if mesh.ep > 1 else "")


def front_zero_text(plan: AnyPlan) -> str:
    """Names the ZeRO stages of the blocks or shards: `3`, or `1, 3` if they differ."""
    if isinstance(plan, TracedPlan):
        stages = {stage.zero for stage in plan.stages}
    else:
        stages = {plan.layer_plans[name].zero for name in blocks_by_plan(plan)}
    return ", ".join(map(str, sorted(stages)))


def recompute_counts(plan: AnyPlan) -> str:
    """Returns recompute of the blocks: `none`, or `28 none, 16 selective, 4 with 5 operators`."""
    if isinstance(plan, TracedPlan):
        return layers_phrases(plan)[1].removeprefix("recompute ")
    graph = graph_of(plan)
    counts = Counter[str]()
    for name, count in blocks_by_plan(plan).items():
        layer_plan = plan.layer_plans[name]
        text = recompute_text(layer_plan, graph).split(" (")[0]
        if len(text) > _SHORT:
            text = f"with {counted(len(layer_plan.recompute), 'operator')}"
        counts[text] += count
    if len(counts) == 1:
        return next(iter(counts)).removeprefix("with ")
    return ", ".join(f"{count} {text}" for text, count in counts.items())


def front_facts(
    front: ParetoFront, paths: Sequence[Path], context: SummaryContext
) -> Iterator[tuple[str, str]]:
    """Yields the lines under the table: units, proof, ties, kind of the numbers, files."""
    first = front.points[0].plan
    device = first.predicted.memory_gib[0]
    took = "" if context.elapsed_s is None else f" in {context.elapsed_s:.1f} s"
    yield (
        "units",
        f"GiB: of the fullest GPU, which has {device.capacity:.1f}; redund.: GiB over all "
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
        f"the step times are predicted ({first.predicted.step_time_s.kind}), not measured; memory, "
        f"in GiB, is computed",
    )
    if paths:
        yield "files", f"{paths[0]} to {paths[-1]}" if len(paths) > 1 else f"{paths[0]}"


def _tie_facts(front: ParetoFront) -> Iterator[tuple[str, str]]:
    # plans that use the host have no band
    if not any(point.plan.predicted.error_band for point in front.points):
        yield "ties", "unknown: no measured steps on this device"
        return
    ties = sum(front.leaner_tie(point) is not None for point in front.points)
    if ties:
        yield (
            "ties",
            (
                f"{ties} of the points {'is' if ties == 1 else 'are'} inside the error band of the "
                "ratio to a slower one that needs no more memory of either kind: take that one"
            ),
        )
