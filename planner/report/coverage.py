"""What the summary of a plan says of the machine's own profile: how much of the plan it has measured, and how to measure the rest."""

from __future__ import annotations

from collections.abc import Iterator

from planner.missing import Coverage, coverage
from planner.plan import Plan
from profiles.errors import ConfigError
from profiles.provenance import Kind

_SHAPES, _MESSAGES = "shapes", "sizes of messages"


def found_coverage(plan: Plan) -> Coverage | None:
    """What the plan's own profile has of it, None without a profile, or where layers were changed by hand to what has no price."""
    try:
        return coverage(plan)
    except ConfigError:
        return None


def coverage_text(found: Coverage) -> str:
    """`34 shapes measured, 6 interpolated, 3 analytic`, and the same of what ranks send each other, if they do."""
    parts = ((what, {kind: found.count(kind, of_ranks=what is _MESSAGES) for kind in Kind}) for what in (_SHAPES, _MESSAGES))
    return "; ".join(_counts(what, counts) for what, counts in parts if any(counts.values()))


def _counts(what: str, counts: dict[Kind, int]) -> str:
    first, *others = ((kind, count) for kind, count in counts.items() if count)
    return ", ".join((f"{first[1]} {what} {first[0]}", *(f"{count} {kind}" for kind, count in others)))


def coverage_notes(found: Coverage, plan: Plan, profile: str, plan_file: str) -> Iterator[str]:
    """How to measure what is missing, what nothing measures, and under which stack whole blocks were measured."""
    if found.missing:
        yield f"measure what is analytic: plan profile -o {profile or 'PROFILE'} --missing {plan_file or 'PLAN'}"
    if found.beyond:
        yield f"analytic whatever is measured: {', '.join(found.beyond)}"
    measured = plan.cluster.profile and plan.cluster.profile.in_step
    if measured and measured.stack != plan.training.stack.name:
        yield f"whole blocks were measured as {measured.stack} runs them, what a step adds is {plan.training.stack.name}'s"
