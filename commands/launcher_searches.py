"""The searches of several launchers for one request, each for its own best plan."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from parplan.commands.options.pin_options import PinOptions
from parplan.commands.options.search_options import SearchFlags
from parplan.commands.options.target_options import TargetOptions
from parplan.commands.searching import Question, described_question, explained_error_of
from parplan.commands.style import noticing_ctrl_c
from parplan.profiles.errors import ConfigError, InfeasibleError, PlannerError

if TYPE_CHECKING:
    from collections.abc import Callable

    from parplan.planner.export.shared_search import SharedSearch
    from parplan.planner.launchers.best_of_each import LauncherTable
    from parplan.planner.plan.plan import Plan
    from parplan.planner.request import OnProgress, Request


@dataclass(frozen=True, slots=True)
class LauncherQuestion:
    """A request as a launcher runs it.

    question    None where the launcher cannot run it, for the reason of the error
    """

    launcher: str
    request: Request
    question: Question | None
    error: PlannerError | None = None


def launcher_questions(
    names: tuple[str, ...], target: TargetOptions, pins: PinOptions, flags: SearchFlags
) -> list[LauncherQuestion]:
    """Returns the request as each launcher runs it.

    Raises ConfigError for a request that is wrong whatever runs it.
    """
    from parplan.planner.export.shared_search import SharedSearch
    from parplan.planner.launchers.known_launchers import NO_LAUNCHER

    if len(names) > 1:
        flags = replace(flags, prefer=None)  # it chooses among the launchers
    shared = SharedSearch()
    return [_question(name, target, pins, flags, shared) for name in names if name != NO_LAUNCHER]


def any_able(questions: list[LauncherQuestion]) -> bool:
    """Returns whether a launcher can run the request."""
    return any(each.question is not None for each in questions)


def _question(
    name: str,
    target: TargetOptions,
    pins: PinOptions,
    flags: SearchFlags,
    shared: SharedSearch,
) -> LauncherQuestion:
    from parplan.commands.requests.launchers import with_launcher
    from parplan.commands.requests.requests import request_of
    from parplan.planner.launchers.known_launchers import launcher_named, unable

    request = request_of(with_launcher(target, name), pins, flags, pools=True)
    reason = unable(launcher_named(name), request)
    if reason is not None:
        error = ConfigError(f"{name} {reason}", hint="leave it out of --for")
        return LauncherQuestion(name, request, None, error)
    try:
        return LauncherQuestion(name, request, described_question(request, flags, name, shared))
    except ConfigError as error:
        return LauncherQuestion(name, request, None, error)


def answer_launchers(
    questions: list[LauncherQuestion], flags: SearchFlags
) -> tuple[LauncherTable, bool]:
    """Returns the best plan of each launcher, and True where Ctrl-C ended the searches early.

    Raises the error of the widest space where no launcher has a plan.
    """
    from parplan.planner.launchers.best_of_each import search_each, table_of
    from parplan.planner.objective import Prefer
    from parplan.report.progress_bars import progress_bar
    from parplan.report.text import console

    with noticing_ctrl_c() as interrupts, progress_bar(console(sys.stderr)) as on_progress:
        finds = {each.launcher: search_of(each, on_progress) for each in questions}
        entries, unsearched = search_each(finds, lambda: bool(interrupts))
        if not any(each.plan for each in entries):
            raise _nothing(questions, {each.launcher: each.error for each in entries})
        prefer = Prefer.FASTEST if flags.prefer is None else Prefer(flags.prefer)
        table = table_of(entries, unsearched, prefer)
    return table, bool(interrupts)


def search_of(each: LauncherQuestion, on_progress: OnProgress | None) -> Callable[[], Plan]:
    """Returns the search of a launcher."""
    from parplan.planner.plan.plan import Plan
    from parplan.planner.search.find_plan import find_best
    from parplan.planner.search.price_factory import described_factory

    def find() -> Plan:
        question = each.question
        if question is None:
            assert each.error is not None, "a launcher without a question has a reason"
            raise each.error
        question.require_possible()
        if question.find is not None:
            plan = question.find(on_progress)
        else:
            factory = described_factory(question.factory.request, _shortly)
            plan = find_best(factory, on_progress).plan
        plan = question.finished(plan)
        assert isinstance(plan, Plan), "the model is described"
        return plan

    return find


def _shortly(_: Request) -> InfeasibleError:
    """Returns the error of one launcher of several, whose shortfall is not looked for."""
    return InfeasibleError("nothing fits", hint="see the other launchers")


def _nothing(
    questions: list[LauncherQuestion], errors: dict[str, PlannerError | None]
) -> PlannerError:
    """Returns the error of a request for which no launcher has a plan.

    Where nothing fits it is that of the launcher that leaves most of a device to a plan, with what
    would fit; elsewhere that of the widest space.
    """
    short = [each for each in questions if isinstance(errors.get(each.launcher), InfeasibleError)]
    if short:
        return _shortfall(max(short, key=lambda each: _usable_bytes(each.request)).request)
    return next(error for each in reversed(questions) if (error := errors.get(each.launcher)))


def _usable_bytes(request: Request) -> float:
    from parplan.planner.infeasible.shortfall import limit_bytes

    return limit_bytes(request.cluster, request.training.stack, request.options)


def _shortfall(request: Request) -> PlannerError:
    from parplan.planner.search.price_factory import described_factory

    return described_factory(request, explained_error_of).nothing_fits()
