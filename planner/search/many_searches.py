"""Searches of many requests, one after the other, until Ctrl-C or the deadline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from parplan.planner.plan.plan import Plan
from parplan.planner.request import Request
from parplan.planner.search.find_plan import find_best
from parplan.planner.search.largest_model import SearchWatch
from parplan.planner.search.pareto import TIME_LIMIT
from parplan.planner.search.price_factory import DescribedFactory, described_factory
from parplan.profiles.errors import ConfigError, InfeasibleError, OutOfTimeError, PlannerError


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The best plan of a request, or the error that says why there is none."""

    plan: Plan | None = None
    error: PlannerError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The answers to the first requests of a list, and why the others have none.

    stopped    the cause of an early end, such as `Ctrl-C`; None where every request has its answer
    """

    each: tuple[Answer, ...]
    stopped: str | None = None


def answer_request(request: Request, watch: SearchWatch | None = None) -> Answer:
    """Returns the best plan of a request. Raises OutOfTimeError and KeyboardInterrupt."""
    return answer_of(described_factory(request), watch)


def answer_of(factory: DescribedFactory, watch: SearchWatch | None = None) -> Answer:
    """Returns the best plan at the prices of a factory. Raises as `answer_request` does."""
    watch = watch or SearchWatch()
    if watch.interrupted():
        raise KeyboardInterrupt
    try:
        plan = find_best(factory, watch.on_progress).plan
    except (ConfigError, InfeasibleError) as error:
        return Answer(error=error)
    assert isinstance(plan, Plan), "the model is described"
    return Answer(plan=plan)


def answer_each(
    requests: Sequence[Callable[[], Request]], names: Sequence[str], watch: SearchWatch
) -> Answers:
    """Returns the best plan of each request.

    requests    make the requests, and raise ConfigError for one that cannot be
    names       of the requests, for the progress
    """
    found: list[Answer] = []
    try:
        for number, (request_of, name) in enumerate(zip(requests, names, strict=True)):
            if watch.on_search:
                watch.on_search(name, number, len(requests))
            try:
                request = request_of()
            except ConfigError as error:
                found.append(Answer(error=error))
                continue
            found.append(answer_request(request, watch))
    except (KeyboardInterrupt, OutOfTimeError) as error:
        stopped = TIME_LIMIT if isinstance(error, OutOfTimeError) else "Ctrl-C"
        return Answers(each=tuple(found), stopped=stopped)
    return Answers(each=tuple(found))
