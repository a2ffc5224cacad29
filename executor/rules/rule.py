"""A rule of the executor: what it looks at, and what it says of a plan that it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from parplan.planner.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """`found` says where and what; `action` is the change, in field values, that gives the
    `nearest` plan, if there is one.
    """

    found: str
    action: str
    nearest: Plan | None = None


Check = Callable[[Plan], Iterator[Refusal]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """`why`: what happens without it; `action`: what to do, in general."""

    name: str
    why: str
    action: str
    check: Check


def rule(*, why: str, action: str) -> Callable[[Check], Rule]:
    """Make a rule of a check, which is named after it."""

    def made(check: Check) -> Rule:
        return Rule(name=check.__name__.replace("_", " "), why=why, action=action, check=check)

    return made


def with_layer_plan(plan: Plan, name: str, **changes: Any) -> Plan:
    """The plan with fields of one of its layer plans changed."""
    return replace(
        plan, layer_plans={**plan.layer_plans, name: replace(plan.layer_plans[name], **changes)}
    )
