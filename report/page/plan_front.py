"""The front that a page draws: one that was searched for its plan, or the plans of its files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parplan.planner.plan.traced_plan import AnyPlan, TracedPlan
from parplan.planner.search.pareto import ParetoPoint
from parplan.report.names import search_text
from parplan.report.page.figures import Form
from parplan.report.page.page_tables import FiguredPlan, PageTable
from parplan.report.page.reported_plan import ReportedPlan
from parplan.report.plans.memory_table import fullest
from parplan.report.plans.summary_context import SummaryContext
from parplan.report.searches.front_table import front_facts, front_zero_text, recompute_counts

_LEFT_OUT = ("units", "files")  # facts that the page says elsewhere
_PINS = (
    "A plan file does not say which choices were pinned, so this is the front of all plans for "
    "its model, cluster and training"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontEntry:
    """A plan of the front.

    number  of the plan on the front, fastest first
    place   of the plan on the page whose document has the numbers
    keys    of step time, peak and redundancy in that document
    """

    number: int
    point: ParetoPoint
    place: int
    keys: tuple[str, str, str]


def front_entries(reported: Sequence[ReportedPlan]) -> tuple[FrontEntry, ...]:
    """Returns the plans of the front, fastest first; none where the page has no front.

    Several plans are a front where their files say so, and have the same model, cluster and
    training.
    """
    searched = reported[0].front
    if searched is not None:
        return tuple(_searched(index, point) for index, point in enumerate(searched.points))
    first = reported[0].plan
    if len(reported) == 1 or not all(_on_one_front(each.plan, first) for each in reported):
        return ()
    entries = (_filed(place, each.plan) for place, each in enumerate(reported))
    return tuple(sorted(entries, key=lambda entry: entry.number))


def _searched(index: int, point: ParetoPoint) -> FrontEntry:
    names = ("step_time_s.value", "peak_memory_gib", "redundancy_gib")
    step, peak, redundancy = (f"front.points.{index}.{name}" for name in names)
    return FrontEntry(number=index + 1, point=point, place=0, keys=(step, peak, redundancy))


def _filed(place: int, plan: AnyPlan) -> FrontEntry:
    assert plan.search.front is not None, "the file says that the plan is of a front"
    stage = plan.predicted.memory_gib.index(fullest(plan))
    return FrontEntry(
        number=plan.search.front.number,
        point=ParetoPoint(plan),
        place=place,
        keys=(
            "predicted.step_time_s.value",
            f"predicted.memory_gib.{stage}.total",
            "predicted.redundancy_gib.total",
        ),
    )


def _on_one_front(plan: AnyPlan, other: AnyPlan) -> bool:
    mine, theirs = plan.search.front, other.search.front
    return (
        mine is not None
        and theirs is not None
        and (mine.points, mine.complete) == (theirs.points, theirs.complete)
        and (_model(plan), plan.cluster, plan.training)
        == (_model(other), other.cluster, other.training)
    )


def _model(plan: AnyPlan) -> object:
    return plan.traced if isinstance(plan, TracedPlan) else plan.model


def front_table(figured: Sequence[FiguredPlan]) -> PageTable | None:
    """Returns the plans of the front with their numbers; None where the page has no front."""
    entries = front_entries([each.reported for each in figured])
    if not entries:
        return None
    fastest_s = entries[0].point.step_time_s
    rows = []
    for entry in entries:
        figures, plan = figured[entry.place].figures, entry.point.plan
        step, peak, redundancy = entry.keys
        slower = entry.point.step_time_s / fastest_s - 1
        rows.append(
            (
                f"{entry.number}",
                figures(step, Form.SECONDS),
                figures.derived(slower, Form.MORE, f"{step} over that of the fastest - 1"),
                figures(peak, Form.GIB),
                figures(redundancy, Form.GIB),
                str(plan.mesh),
                front_zero_text(plan),
                recompute_counts(plan),
                search_text(plan.search),
            )
        )
    return PageTable(
        caption="The front, fastest first",
        heading=(
            *("point", "step", "slower", "peak GiB", "redundant GiB"),
            *("mesh", "ZeRO", "recompute", "found as"),
        ),
        rows=tuple(rows),
        texts=frozenset({"mesh", "ZeRO", "recompute", "found as"}),
    )


def front_notes(reported: Sequence[ReportedPlan]) -> Iterator[str]:
    """Yields what is proven of the front that the page draws, and what it lacks."""
    searched = reported[0].front
    if searched is not None:
        for label, text in front_facts(searched, (), SummaryContext()):
            if label not in _LEFT_OUT:
                yield f"{label}: {text}"
        yield _PINS
        return
    front = reported[0].plan.search.front
    if front is None or not front_entries(reported):
        return
    yield f"The page has {len(reported)} of the {front.points} plans of this front"
    if not front.complete:
        yield "Its search ended early: plans that it lacks may beat these"
