"""The summary of a plan: at most MOST_LINES lines of what decides, or everything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.console import Console

from parplan.planner.plan.traced_plan import AnyPlan, TracedPlan
from parplan.report.plans.coverage_notes import coverage_notes, coverage_of_profile
from parplan.report.plans.launcher_lines import launcher_lines
from parplan.report.plans.launcher_rows import table_lines
from parplan.report.plans.memory_table import print_stages
from parplan.report.plans.notes import notes, warnings
from parplan.report.plans.plan_facts import Fact, deciding_facts, facts
from parplan.report.plans.plan_header import header, print_header, short_assumed, unknown_names
from parplan.report.plans.robust_table import robust_lines
from parplan.report.plans.runner_up_lines import runner_up_lines, tie_lines
from parplan.report.plans.stage_waits import wait_lines
from parplan.report.plans.step_lines import redundancy_line, time_line
from parplan.report.plans.summary_context import SummaryContext
from parplan.report.text import fact_lines, joined, labelled, percent, say, say_exactly
from parplan.report.wrapping import continued, width_of

# facts of the plan that a table of launchers does not show
_BESIDE_A_TABLE = ("proven", "host", "goodput", "profile", "chunks", "module")
MOST_LINES = 20  # of the short form, with the lines about the file that was written


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShortForm:
    """A short form: its number of runners-up, and the other parts that it has."""

    runners_up: int = 2
    spaced: bool = False
    columns: bool = True
    launchers: bool = True
    defaults: bool = True


_FORMS = (  # from the richest to the shortest
    _ShortForm(spaced=True),
    _ShortForm(),
    _ShortForm(columns=False),
    _ShortForm(columns=False, runners_up=1),
    _ShortForm(columns=False, runners_up=1, launchers=False),
    _ShortForm(columns=False, runners_up=1, launchers=False, defaults=False),
)


def print_summary(plan: AnyPlan, out: Console, context: SummaryContext) -> None:
    """Print the plan for a person: everything, or what decides."""
    if context.whole:
        _print_whole(plan, out, context)
    else:
        _print_short(plan, out, context)
    for line in context.closing:
        say_exactly(out, continued(line, width_of(out.file)) if line.startswith(" ") else line)


def _print_whole(plan: AnyPlan, out: Console, context: SummaryContext) -> None:
    width = out.width
    measured = None if isinstance(plan, TracedPlan) else coverage_of_profile(plan)
    print_header(plan, out, context)
    if context.table is not None:
        for line in (*table_lines(context.table, width), ""):
            say(out, line)
    for line in fact_lines(facts(plan, context, measured), width):
        say(out, line)
    say(out)
    for line in (time_line(plan, width), *wait_lines(plan, width), redundancy_line(plan, width)):
        say(out, line)
    say(out)
    print_stages(plan, out)
    say(out)
    for line in (*runner_up_lines(plan, width), *tie_lines(plan, width)):
        say(out, line)
    if plan.search.robust:
        say(out, "\n".join(("", *robust_lines(plan.search.robust, width))))
    for line in launcher_lines(context.launchers, width):
        say(out, line)
    every = [*notes(plan, ruled=context.ruled)]
    if measured and not isinstance(plan, TracedPlan):
        every += coverage_notes(measured, plan, context.profile, context.plan_file)
    for line in _note_lines(every, width):
        say(out, line, "dim")


def _print_short(plan: AnyPlan, out: Console, context: SummaryContext) -> None:
    """Print the richest form that has few enough lines; every warning stands in each of them."""
    closing = sum(line.count("\n") + 1 for line in context.closing)
    for form in _FORMS:
        lines = list(_short_lines(plan, out.width, context, form))
        if sum(text.count("\n") + 1 for text, _ in lines) + closing <= MOST_LINES:
            break
    for text, style in lines:
        say(out, text, style)


def _short_lines(
    plan: AnyPlan, width: int, context: SummaryContext, form: _ShortForm
) -> Iterator[tuple[str, str]]:
    """Yields each line, which may be broken into several, and its style."""
    yield header(plan, width), "bold"
    if context.not_understood:
        yield unknown_names(context.not_understood, width), "yellow"
    if context.assumed:
        yield short_assumed(context.assumed, width, listed=form.defaults), "dim"
    yield "", ""
    compared = context.table is not None and len(context.table.plans) > 1
    if context.table is not None:
        yield from ((line, "") for line in table_lines(context.table, width))
        if form.spaced:
            yield "", ""
    shown = deciding_facts(plan, context)
    if compared:
        shown = _beside_a_table(shown, plan)
    for line in fact_lines(shown, width, columns=form.columns and not compared):
        yield line, ""
    yield time_line(plan, width), ""
    lower = [
        *(() if compared else _others(plan, width, form)),
        *(launcher_lines(context.launchers, width) if form.launchers else ()),
        *_note_lines(warnings(plan), width),
    ]
    if lower and form.spaced:
        yield "", ""
    for line in lower:
        yield line, ""


def _beside_a_table(facts: Iterable[Fact], plan: AnyPlan) -> Iterator[Fact]:
    """Yields the facts of the plan that a table of launchers does not show; it has the gap."""
    for label, first, second in facts:
        if label in _BESIDE_A_TABLE:
            yield label, first.removeprefix(f"gap {percent(plan.search.gap)}, "), second


def _others(plan: AnyPlan, width: int, form: _ShortForm) -> Iterator[str]:
    """Yields the runners-up; where worst cases were asked for, the plans of least regret."""
    if plan.search.robust:
        yield from robust_lines(plan.search.robust, width, most=1 + form.runners_up)
    else:
        yield from runner_up_lines(plan, width, most=form.runners_up, columns=form.columns)


def _note_lines(notes: Iterable[str], width: int) -> Iterator[str]:
    for index, note in enumerate(notes):
        yield joined(note.split(" "), " ", width, start=labelled("" if index else "note"))
