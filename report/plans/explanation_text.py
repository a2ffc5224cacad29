"""The answers to questions about a plan in sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console

from parplan.planner.plan.derived import tokens_per_s
from parplan.planner.plan.error_band import memory_margin
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.prediction import Status
from parplan.planner.request import SearchOptions
from parplan.planner.search.asked_plan import CTRL_C, Bound, Replies, Reply
from parplan.planner.search.many_searches import Answer
from parplan.planner.search.near_requests import AXES
from parplan.planner.search.what_if import BASE, Flip, PlanQuestion
from parplan.profiles.units import counted, format_number
from parplan.report.names import plan_phrase
from parplan.report.plans.block_phrases import layers_phrases
from parplan.report.plans.memory_table import fullest
from parplan.report.plans.plan_header import header
from parplan.report.plans.step_lines import STEP_CAUSES
from parplan.report.text import gib_text, joined, percent, say, seconds_text

SAME = 0.0005  # share of a step below which two plans take the same time
_MOST_CAUSES = 3
_CHANGES = 0.01  # share of a step that a cause must change by to be said


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Paragraphs under titles."""

    title: str
    sentences: tuple[str, ...]


def print_explanation(plan: Plan, replies: Replies, out: Console) -> None:
    """Print why a plan is the best, what holds it back, what would buy more, and its flips."""
    say(out, header(plan, out.width), "bold")
    for part in explanation(plan, replies):
        say(out)
        say(out, part.title, "bold")
        for sentence in part.sentences:
            say(out, joined(sentence.split(" "), " ", out.width, start="  ", indent=4))


def explanation(plan: Plan, replies: Replies) -> Iterator[Explanation]:
    """Yields the parts of the explanation that have an answer."""
    parts = (
        ("Why this plan", (*_the_plan(plan, replies), *_other_meshes(plan, replies))),
        ("What holds it back", tuple(_limits(plan, replies))),
        ("What more would buy", tuple(_gains(plan, replies))),
        ("Where the choice flips", tuple(_flips(plan, replies))),
        ("How this was found", tuple(_method(replies))),
    )
    for title, sentences in parts:
        if sentences:
            yield Explanation(title=title, sentences=sentences)


def _the_plan(plan: Plan, replies: Replies) -> Iterator[str]:
    yield f"{plan_phrase(plan)} takes {_step_text(plan)} a step: {_causes_text(plan)}."
    base = _plan_of(replies.each.get(PlanQuestion(what=BASE)))
    if base is None:
        return
    slower = _step_s(plan) / _step_s(base) - 1
    if slower > SAME:
        yield (
            f"A search without any pin finds a faster one today: {plan_phrase(base)}, "
            f"{_step_text(base)}, {percent(slower)} less."
        )
    else:
        ended = "" if _is_finished(base) else ", which ended early,"
        considered = counted(base.search.candidates.considered, "candidate")
        launcher = f" of {base.search.launcher}" if base.search.launcher else ""
        gap = percent(base.search.gap)
        if _has_faster(replies, _step_s(plan)):
            yield (
                f"A search over {considered}{launcher}{ended} stops at it, with a gap of {gap}; a "
                "faster plan is among those with one degree given."
            )
        else:
            yield (
                f"A search over {considered}{launcher}{ended} finds nothing faster; its gap is "
                f"{gap}."
            )


def _has_faster(replies: Replies, step_s: float) -> bool:
    """True if a search with a given degree found a faster plan than the search without any."""
    found = (_plan_of(reply) for question, reply in replies.each.items() if question.what in AXES)
    return any(each is not None and step_s / _step_s(each) - 1 > SAME for each in found)


def _other_meshes(plan: Plan, replies: Replies) -> Iterator[str]:
    for question, reply in replies.each.items():
        if question.what not in AXES:
            continue
        axis, degree = question.what, round(question.value)
        if isinstance(reply, Bound):
            yield _at_least(f"{axis} {degree}", reply.least_s, plan)
            continue
        found = _plan_of(reply)
        if found is None:
            yield f"{axis} {degree} has no plan: {_why_none(reply)}."
            continue
        yield (
            f"With {axis} {degree} the best plan{_so_far(found)}, {plan_phrase(found)}, takes "
            f"{_step_text(found)}, {_change(found, plan)}{_difference(found, plan)}."
        )


def _at_least(degree: str, least_s: float, plan: Plan) -> str:
    """Returns what a bound says of the plans with another degree."""
    if least_s == math.inf:
        return f"With {degree} nothing fits without the host, by bounds."
    slower = least_s / _step_s(plan) - 1
    if slower <= SAME:
        return f"With {degree} bounds leave a plan as fast open, which was not searched for."
    return (
        f"With {degree} every plan without the host takes at least {seconds_text(least_s)}, "
        f"{percent(slower)} more, by bounds."
    )


def _limits(plan: Plan, replies: Replies) -> Iterator[str]:
    worst = fullest(plan)
    free = worst.capacity - worst.total
    kept = worst.capacity * memory_margin(plan.training.stack, SearchOptions())
    margin = (
        ", most of them the margin" if kept > free / 2 else f", {gib_text(kept)} of them the margin"
    )
    yield (
        f"The fullest GPU, of stage {worst.stage}, holds {gib_text(worst.total)} GiB of "
        f"{worst.capacity:.1f}; {gib_text(free)} GiB are free{margin}."
    )
    more = _plan_of(_reply(replies, "memory of a GPU"))
    if more is not None:
        gain = _step_s(plan) / _step_s(more) - 1
        if gain > SAME:
            binds = "binds" if gain > _CHANGES else "hardly binds"
            yield (
                f"Memory {binds}: with 10 % more of it {plan_phrase(more)} takes "
                f"{_step_text(more)} and is {percent(gain)} faster; its layers: "
                f"{'; '.join(layers_phrases(more))}."
            )
        else:
            yield f"Memory does not bind: 10 % more of it makes no plan{_so_far(more)} faster."
    exposed = [
        (name, seconds) for name, seconds in _causes(plan) if name not in ("compute", "recompute")
    ]
    if exposed:
        name, seconds = max(exposed, key=lambda each: each[1])
        share = seconds / _step_s(plan)
        yield f"The largest part beside compute is {name}: {percent(share)} of the step."


def _gains(plan: Plan, replies: Replies) -> Iterator[str]:
    for question, reply in replies.each.items():
        if question.flips or question.what in (*AXES, BASE):
            continue
        amount = _amount_text(question.value, question.what)
        if isinstance(reply, Bound):
            faster = max(0.0, _step_s(plan) / reply.most_s - 1)
            yield f"{amount} buys at least {percent(faster)} more tokens/s, with this plan there."
            continue
        found = _plan_of(reply)
        if found is None:
            yield f"{amount}: no plan, {_why_none(reply)}."
            continue
        faster = tokens_per_s(found) / tokens_per_s(plan) - 1
        if faster < SAME:
            yield f"{amount} buys nothing{_so_far(found)}."
            continue
        mesh = "" if found.mesh == plan.mesh else f", with {plan_phrase(found)}"
        yield f"{amount} buys {percent(faster)} more tokens/s{mesh}{_so_far(found)}."


def _flips(plan: Plan, replies: Replies) -> Iterator[str]:
    stays: dict[str, list[float]] = {}
    for question, reply in replies.each.items():
        if not question.flips:
            continue
        if reply is None:
            stays.setdefault(question.what, []).append(question.value)
            continue
        assert isinstance(reply, Flip), "a question about a flip"
        place = (
            f"Between {format_number(reply.last, 2)} and {format_number(reply.factor, 2)} times "
            f"the {question.what}"
        )
        if reply.plan is None:
            yield f"{place} the model stops fitting."
        else:
            yield f"{place} the best plan becomes {plan_phrase(reply.plan)}."
    for what, ends in stays.items():
        reaches = " and ".join(
            f"{'down' if end < 1 else 'up'} to {format_number(end, 3)} times"
            for end in sorted(ends)
        )
        yield f"The mesh stays the best {reaches} the {what}."


def _method(replies: Replies) -> Iterator[str]:
    searched = [reply for reply in replies.each.values() if not isinstance(reply, Bound)]
    if searched:
        yield (
            f"Each of {counted(len(searched), 'question')} was a search of its own with one "
            "change, and without the pins of the plan, which its file does not have. All figures "
            "are predicted."
        )
    if replies.stopped is None:
        return
    bounded = len(replies.each) - len(searched)
    more = "" if replies.stopped == CTRL_C else " --time-limit SECONDS gives them more time."
    parts = []
    if bounded:
        parts.append(f"{counted(bounded, 'question')} with a bound in place of a search")
    if replies.untried:
        parts.append(f"no answer to {', '.join(map(question_text, replies.untried))}")
    yield f"{replies.stopped[0].upper()}{replies.stopped[1:]} left {', and '.join(parts)}.{more}"


def question_text(question: PlanQuestion) -> str:
    """Returns a question as the text names it where it has no answer."""
    if question.what == BASE:
        return "the same without pins"
    if question.what in AXES:
        return f"{question.what} {round(question.value)}"
    if question.flips:
        way = "down to" if question.value < 1 else "up to"
        return f"the flip {way} {format_number(question.value, 3)} times the {question.what}"
    return _amount_text(question.value, question.what)


def _is_finished(found: Plan) -> bool:
    return found.search.status is Status.OPTIMAL


def _so_far(found: Plan) -> str:
    return "" if _is_finished(found) else " so far"


def _reply(replies: Replies, what: str) -> Reply:
    return next(
        (
            reply
            for question, reply in replies.each.items()
            if question.what == what and not question.flips
        ),
        None,
    )


def _plan_of(reply: Reply) -> Plan | None:
    return reply.plan if isinstance(reply, Answer) else None


def _why_none(reply: Reply) -> str:
    assert isinstance(reply, Answer), "a search"
    assert reply.error is not None, "a search without a plan says why"
    return reply.error.message


def _step_s(plan: Plan) -> float:
    return plan.predicted.step_time_s.value


def _step_text(plan: Plan) -> str:
    return seconds_text(_step_s(plan))


def _change(found: Plan, plan: Plan) -> str:
    slower = _step_s(found) / _step_s(plan) - 1
    if abs(slower) <= SAME:
        return "as long"
    return f"{percent(abs(slower))} {'more' if slower > 0 else 'less'}"


def _causes(plan: Plan) -> list[tuple[str, float]]:
    breakdown = plan.predicted.breakdown
    return [(name, getattr(breakdown, field).value) for name, field in STEP_CAUSES]


def _causes_text(plan: Plan) -> str:
    step_s = _step_s(plan)
    told = [(name, each) for name, each in _causes(plan) if each > _CHANGES * step_s]
    return ", ".join(f"{name} {percent(each / step_s)}" for name, each in told)


def _difference(found: Plan, plan: Plan) -> str:
    """Returns the causes by which two steps differ most: `: bubble +0.4 s, data -0.2 s`."""
    before = dict(_causes(plan))
    changes = [(name, seconds - before[name]) for name, seconds in _causes(found)]
    told = [each for each in changes if abs(each[1]) > _CHANGES * _step_s(plan)]
    told.sort(key=lambda each: -abs(each[1]))
    if not told:
        return ""
    return ": " + ", ".join(
        f"{name} {'+' if seconds > 0 else '-'}{seconds_text(abs(seconds))}"
        for name, seconds in told[:_MOST_CAUSES]
    )


def _amount_text(factor: float, what: str) -> str:
    if factor == 2:
        return f"Twice the {what}"
    return f"{format_number(100 * (factor - 1), 2)} % more {what}"
