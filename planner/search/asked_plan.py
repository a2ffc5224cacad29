"""The answers to the questions about a plan, within a time limit.

The questions are searches over shared prices and bounds (planner/search/near_requests.py). On many
GPUs they take no more than about twice the CPU time of the plan's own search; a question that is
not searched then has the bound that is known of it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

from parplan.costmodels.communication.mesh import Mesh
from parplan.planner.deadline import MANY_GPUS, NEVER, Deadline, cpu_deadline, cpu_s
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.prediction import Status
from parplan.planner.plan.reprice import priced_at
from parplan.planner.search.largest_model import SearchWatch
from parplan.planner.search.many_searches import Answer
from parplan.planner.search.near_requests import AXES, Near, NearRequests, NearSearches, Way
from parplan.planner.search.pareto import TIME_LIMIT
from parplan.planner.search.what_if import (
    BASE,
    MEMORY,
    Flip,
    Knob,
    PlanQuestion,
    find_flip,
    in_order_of_asking,
    knob_named,
    questions_about,
    request_of_plan,
    with_degree,
)
from parplan.profiles.errors import OutOfTimeError, SolverError

LEAST_CPU_S = 7.0  # CPU-seconds that all questions about a plan may take, however few its own took
TIMES_OWN = 1.7  # CPU-seconds of all questions over those of the plan's own search
OWN_TIME = "the usual time limit on so many GPUs"
CTRL_C = "Ctrl-C"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Bounds of the best step behind a question that was not searched.

    least_s    no plan takes less, by the bounds of the plan's own search; infinite where none fits
    most_s     the best plan takes no more: the plan itself takes as long there
    """

    least_s: float = 0.0
    most_s: float = math.inf


Reply = Answer | Flip | Bound | None


class AskedPlan:
    """A plan, and the searches that answer questions about it."""

    def __init__(
        self, plan: Plan, deadline: Deadline = NEVER, searches: NearSearches | None = None
    ) -> None:
        self.plan, self.deadline = plan, deadline
        self._started_s, self._own_s = cpu_s(), 0.0
        self._request = request_of_plan(plan)
        self._searches = searches or NearRequests(self._request.until(deadline))

    def reply_to(self, question: PlanQuestion) -> Reply:
        """Returns the answer to a question; None for a flip that does not come.

        Raises OutOfTimeError, SolverError and KeyboardInterrupt.
        """
        if question.what == BASE:
            return self._searches.first()
        if question.what in AXES:
            pinned = with_degree(self._request, question.what, round(question.value))
            return self._searches.answer(pinned, self.deadline, Way(Near.PRICES))
        knob = knob_named(question.what)
        if question.flips:

            def best_at(factor: float, meshes: Collection[Mesh]) -> Plan | None:
                return _finished(self._at(knob, factor, meshes)).plan

            return find_flip(best_at, question.value, self.plan)
        return self._at(knob, question.value)

    def bound_of(self, question: PlanQuestion) -> Bound | None:
        """Returns what is known of the answer to a question without a search, None for nothing."""
        if question.what in AXES:
            least_s = self._searches.least_with(question.what, round(question.value))
            return None if least_s is None else Bound(least_s=least_s)
        if question.what == BASE or question.flips:
            return None
        speeds = knob_named(question.what).speeds
        if speeds is None or self.plan.cluster.pool_names:
            return None
        return Bound(most_s=priced_at(self.plan, speeds(question.value)))

    def _at(self, knob: Knob, factor: float, meshes: Collection[Mesh] = ()) -> Answer:
        request, way = knob.scale(self._request, factor), Way(knob.near, factor, meshes)
        return self._searches.answer(request, self.deadline, way)

    def limit_to_own(self) -> None:
        """Limits the CPU time of further questions by that of the plan's own search so far."""
        self._own_s = cpu_s() - self._started_s
        most_s = max(LEAST_CPU_S, TIMES_OWN * self._own_s)
        self.deadline = cpu_deadline(self._started_s + most_s)

    def has_time_for(self, question: PlanQuestion) -> bool:
        """Returns whether there is time to begin a search.

        One that shares no candidates with the plan's own search takes about as long; it is not
        begun with less than half of that time left.
        """
        shares = question.what in (BASE, *AXES, MEMORY)
        return self.deadline.left_s > (0.0 if shares else self._own_s / 2)


def _finished(answer: Answer) -> Answer:
    """Returns an answer. Raises OutOfTimeError where its search ended early."""
    if answer.plan is not None and answer.plan.search.status is not Status.OPTIMAL:
        raise OutOfTimeError("the time limit was over before a search ended")
    return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Replies:
    """The answers to questions about a plan, in the order of `questions_about`.

    untried   the questions for which there was no time
    stopped   the cause of an early end, such as `Ctrl-C`; None where all were asked
    """

    each: Mapping[PlanQuestion, Reply]
    untried: tuple[PlanQuestion, ...] = ()
    stopped: str | None = None


def replies_about(
    plan: Plan, deadline: Deadline, watch: SearchWatch, searches: NearSearches | None = None
) -> Replies:
    """Returns the answers to the questions about a plan that there is time for.

    Without a deadline those about more than `MANY_GPUS` take about twice the CPU time of the plan's
    own search, or `LEAST_CPU_S`. A question that is not searched has the bound that is known of it.

    searches    of the plan's request and others near it, None for all plans of its stack
    """
    asked, found = AskedPlan(plan, deadline, searches), dict[PlanQuestion, Reply]()
    order, stopped = in_order_of_asking(plan), None
    limited = deadline is NEVER and plan.cluster.num_gpus > MANY_GPUS
    try:
        for number, question in enumerate(order):
            if watch.on_search:
                watch.on_search("fastest", number, len(order))
            if not asked.has_time_for(question):
                continue
            with suppress(OutOfTimeError, SolverError):
                reply = asked.reply_to(question)
                if watch.interrupted():  # a search that Ctrl-C ended returns its best so far
                    raise KeyboardInterrupt
                found[question] = reply
            if question.what == BASE and limited:
                asked.limit_to_own()
    except KeyboardInterrupt:
        stopped = CTRL_C
    every = questions_about(plan)
    if stopped is None and BASE in {question.what for question in found}:
        bounds = {each: asked.bound_of(each) for each in every if each not in found}
        found |= {question: bound for question, bound in bounds.items() if bound is not None}
    untried = tuple(question for question in every if question not in found)
    unsearched = untried or any(isinstance(reply, Bound) for reply in found.values())
    if unsearched and stopped is None:
        stopped = OWN_TIME if limited else TIME_LIMIT
    answered = {question: found[question] for question in every if question in found}
    return Replies(each=answered, untried=untried, stopped=stopped)
