"""The search of `plan` and `plan compare`, with its progress bar and its Ctrl-C."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from parplan.commands.style import noticing_ctrl_c

if TYPE_CHECKING:
    from parplan.planner.plan.plan import Plan
    from parplan.planner.request import Request
    from parplan.profiles.errors import InfeasibleError


def find(request: Request) -> tuple[Plan, list[int]]:
    """Returns the plan, and a list that is not empty where Ctrl-C ended the search early."""
    from parplan.planner.search.find_plan import find_plan
    from parplan.report.progress_bars import progress_bar
    from parplan.report.text import console

    with noticing_ctrl_c() as interrupts, progress_bar(console(sys.stderr)) as on_progress:
        plan = find_plan(request, on_progress, _explained_error)
    return with_module(plan, request), interrupts


def _explained_error(request: Request) -> InfeasibleError:
    from parplan.report.searches.infeasible_text import explained_error

    return explained_error(request)


def with_module(plan: Plan, request: Request) -> Plan:
    """Returns the plan for the external module of the request.

    Raises ConfigError for a choice that the executor cannot run on that module.
    """
    if request.module is None:
        return plan
    from parplan.executor.rules.external_rules import validate_module

    plan = replace(plan, module=request.module)
    validate_module(plan)
    return plan


def print_unsearched(request: Request, *, to_stderr: bool) -> None:
    """Prints the candidates that are pruned and the choices that no search looks at."""
    from parplan.planner.candidates.never_searched import unsearched_parts
    from parplan.planner.search.search_session import SearchPrices
    from parplan.report.searches.pruned_table import print_pruned
    from parplan.report.text import console

    never = unsearched_parts(request.constraints, request.training.stack)
    out = console(sys.stderr if to_stderr else sys.stdout)
    print_pruned(SearchPrices(request).space, never, out)
