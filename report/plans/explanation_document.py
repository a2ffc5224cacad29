"""The answers to questions about a plan as `--json` prints them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from parplan.costmodels.communication.mesh import Mesh
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.prediction import Status
from parplan.planner.search.asked_plan import Bound, Replies, Reply
from parplan.planner.search.many_searches import Answer
from parplan.planner.search.what_if import Flip, PlanQuestion
from parplan.report.json_result import JsonResult
from parplan.report.plans.explanation_text import Explanation, explanation, question_text


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredQuestion:
    """A question about a plan, which was a search of its own, and the plan that it found.

    what         quantity that the search changed
    value        factor of that quantity, or the degree of an axis
    flips        true where the question is at which factor the mesh changes
    flips_at     least factor found at which it does, null where it does not
    same_at      greatest factor found at which it does not
    mesh         of the plan found, null where there is none
    step_time_s  of the plan found
    finished     false where the time ended its search, which may then miss a faster plan, or where
                 it was not searched
    at_least_s   seconds that no plan is below, of a question that was not searched; null where
                 there are none, or where nothing fits
    at_most_s    seconds that the best plan is not above, of a question that was not searched
    """

    what: str
    value: float
    flips: bool
    flips_at: float | None
    same_at: float | None
    mesh: Mesh | None
    step_time_s: float | None
    finished: bool
    at_least_s: float | None = None
    at_most_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplanationDocument(JsonResult):
    """Why a plan is the best, in sentences, and the questions behind them.

    untried  questions without an answer, in words
    stopped  cause of that, such as Ctrl-C; null where every question has an answer
    """

    mesh: Mesh
    step_time_s: float
    parts: tuple[Explanation, ...]
    questions: tuple[AnsweredQuestion, ...]
    untried: tuple[str, ...]
    stopped: str | None


def explanation_document(plan: Plan, replies: Replies) -> ExplanationDocument:
    """Returns the questions with their answers."""
    return ExplanationDocument(
        mesh=plan.mesh,
        step_time_s=plan.predicted.step_time_s.value,
        parts=tuple(explanation(plan, replies)),
        questions=tuple(_answered(question, reply) for question, reply in replies.each.items()),
        untried=tuple(map(question_text, replies.untried)),
        stopped=replies.stopped,
    )


def _answered(question: PlanQuestion, reply: Reply) -> AnsweredQuestion:
    bound = reply if isinstance(reply, Bound) else None
    found = reply.plan if isinstance(reply, Answer | Flip) else None
    flip = reply if isinstance(reply, Flip) else None
    return AnsweredQuestion(
        what=question.what,
        value=question.value,
        flips=question.flips,
        flips_at=flip.factor if flip else None,
        same_at=flip.last if flip else None,
        mesh=found.mesh if found else None,
        step_time_s=found.predicted.step_time_s.value if found else None,
        finished=not bound and (found is None or found.search.status is Status.OPTIMAL),
        at_least_s=(bound.least_s or None) if bound and bound.least_s < math.inf else None,
        at_most_s=bound.most_s if bound and bound.most_s < math.inf else None,
    )
