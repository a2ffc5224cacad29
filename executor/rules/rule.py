"""A rule of the executor and the refusal that it returns for a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from parplan.planner.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A plan that breaks a rule.

    problem  where the plan breaks the rule, and how
    action   the change, in field values, that gives the `nearest` plan
    nearest  the plan with that change; None if there is none
    """

    problem: str
    action: str
    nearest: Plan | None = None


Check = Callable[[Plan], Iterator[Refusal]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A check with its texts.

    why      the consequence of running a plan that breaks the rule
    action   the general remedy
    """

    name: str
    why: str
    action: str
    check: Check


def rule(*, why: str, action: str) -> Callable[[Check], Rule]:
    """Return a decorator that makes a rule of a check and names it after the function."""

    def make(check: Check) -> Rule:
        return Rule(
            name=check.__name__.removesuffix("_rule").replace("_", " "),
            why=why,
            action=action,
            check=check,
        )

    return make


def those(parts: Mapping[str, bool]) -> list[str]:
    """Return the names of the parts that a plan has."""
    return [name for name, is_there in parts.items() if is_there]


def with_training(plan: Plan, **changes: Any) -> Plan:
    """Return the plan with fields of its training changed."""
    return replace(plan, training=replace(plan.training, **changes))


def with_layer_plan(plan: Plan, name: str, **changes: Any) -> Plan:
    """Return the plan with fields of one layer plan changed."""
    return replace(
        plan, layer_plans={**plan.layer_plans, name: replace(plan.layer_plans[name], **changes)}
    )
