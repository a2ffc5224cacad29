"""The searches of the commands: their requests, progress bars and Ctrl-C."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from parplan.commands.style import noticing_ctrl_c

if TYPE_CHECKING:
    from parplan.commands.options.failure_options import FailureOptions
    from parplan.commands.options.search_options import SearchFlags
    from parplan.costmodels.usage.goodput import Failures
    from parplan.planner.export.fields.launcher import Target
    from parplan.planner.export.shared_search import SharedSearch
    from parplan.planner.plan.plan import Plan
    from parplan.planner.plan.traced_plan import AnyPlan
    from parplan.planner.request import OnProgress, Request
    from parplan.planner.search.pareto import ParetoFront
    from parplan.planner.search.price_factory import PriceFactory
    from parplan.profiles.errors import InfeasibleError


OURS = "ours"  # the search method of the planner
NO_LAUNCHER = "none"  # of --for: every plan of a stack
Find = Callable[["OnProgress | None"], "AnyPlan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A request for a described model or a traced module, ready to be searched.

    factory      makes its prices
    find         returns its best plan, None for the search among all plans
    assumed_of   returns a phrase for every default that led to a plan
    finished     completes a plan for the module that runs it
    started_s    the time at which its work began
    failures     failures of the cluster, None where no goodput is asked for

    require_possible  raises ConfigError for pins that exclude each other
    explained         prints more about a plan for --explain, on stderr if true
    """

    factory: PriceFactory
    assumed_of: Callable[[AnyPlan], tuple[str, ...]]
    find: Find | None = None
    finished: Callable[[AnyPlan], AnyPlan] = lambda plan: plan
    require_possible: Callable[[], None] = lambda: None
    explained: Callable[[AnyPlan, bool], None] = lambda _plan, _to_stderr: None
    started_s: float = field(default_factory=time.monotonic)
    failures: Failures | None = None


def described_question(
    request: Request,
    flags: SearchFlags,
    launcher: str = NO_LAUNCHER,
    shared: SharedSearch | None = None,
) -> Question:
    """Returns the question of a request for a described model.

    launcher    the launcher that runs the plan, `none` for any plan of the request's stack
    shared      prices that the searches of several launchers share
    Raises ConfigError for a request that the launcher cannot say.
    """
    from parplan.commands.requests.pins import require_possible
    from parplan.commands.requests.requests import all_assumed, offload_assumed
    from parplan.planner.launchers.known_launchers import EXECUTOR, launcher_named
    from parplan.planner.plan.plan import Plan
    from parplan.planner.search.price_factory import described_factory

    factory: PriceFactory = described_factory(request, explained_error_of)
    find: Find | None = None
    if launcher not in (EXECUTOR, NO_LAUNCHER):
        target = launcher_named(launcher).target
        assert target is not None, "the executor alone has none"
        request, factory, find = _for_launcher(request, target, shared)
    if flags.method not in (None, OURS):
        find = _by_method(request, flags)

    def assumed_of(plan: AnyPlan) -> tuple[str, ...]:
        assert isinstance(plan, Plan), "the model is described"
        return *all_assumed(request, flags), *offload_assumed(request.constraints, plan)

    def finished(plan: AnyPlan) -> AnyPlan:
        assert isinstance(plan, Plan), "the model is described"
        if launcher == EXECUTOR and find is None:
            plan = _of_the_executor(plan)
        return with_module(plan, request)

    return Question(
        factory=factory,
        find=find,
        assumed_of=assumed_of,
        finished=finished,
        require_possible=partial(require_possible, request),
        explained=_print_orders,
    )


def _by_method(request: Request, flags: SearchFlags) -> Find:
    """Returns the search by another method than the planner's own."""
    from parplan.planner.search_methods.method_plan import BUDGET_S, find_by_method

    assert flags.method is not None, "a method is named"
    method, seed = flags.method, flags.seed or 0
    budget_s = BUDGET_S if flags.time_limit is None else flags.time_limit
    return lambda _on_progress: find_by_method(request, method, budget_s, seed)


def _for_launcher(
    request: Request, target: Target, shared: SharedSearch | None
) -> tuple[Request, PriceFactory, Find]:
    """Returns the request as a launcher says it, with the search among its settings.

    Raises ConfigError.
    """
    from parplan.planner.export.best_settings import LauncherFactory, as_said, best_settings

    request = as_said(request, target)
    return (
        request,
        LauncherFactory(request, target),
        partial(best_settings, request, target, shared=shared),
    )


def _of_the_executor(plan: Plan) -> Plan:
    """Returns a plan that the own executor runs as it is priced. Raises ConfigError for another."""
    from parplan.executor.rules.all_rules import validate
    from parplan.planner.launchers.known_launchers import EXECUTOR

    validate(plan)
    return replace(plan, search=replace(plan.search, launcher=EXECUTOR))


def with_failures(question: Question, options: FailureOptions) -> Question:
    """Returns a question that asks for the goodput too, where options state failures.

    Raises ConfigError for text that is no time span or rate.
    """
    from parplan.commands.requests.failures import failures_of

    failures, assumed = failures_of(options, question.factory.request.cluster)

    def assumed_of(plan: AnyPlan) -> tuple[str, ...]:
        return *question.assumed_of(plan), *assumed

    return replace(question, failures=failures, assumed_of=assumed_of)


def choosing_spares(question: Question) -> Question:
    """Returns a question that also asks how many nodes train, and how many wait as spares."""
    from parplan.planner.search.most_goodput import find_most_goodput

    request, failures = question.factory.request, question.failures
    assert failures is not None, "the objective is the goodput"

    def find(on_progress: OnProgress | None) -> AnyPlan:
        return find_most_goodput(request, failures, on_progress, explained_error_of)

    return replace(question, find=find)


def _print_orders(plan: AnyPlan, to_stderr: bool) -> None:
    """Prints what the order of the mesh axes gains."""
    from parplan.planner.plan.mesh_orders import order_prices
    from parplan.planner.plan.plan import Plan
    from parplan.report.searches.order_table import print_orders
    from parplan.report.text import console

    assert isinstance(plan, Plan), "the model is described"
    print_orders(order_prices(plan), console(sys.stderr if to_stderr else sys.stdout))


def answer(question: Question) -> tuple[AnyPlan, bool]:
    """Returns the best plan of a question, and True where Ctrl-C ended the search early."""
    from parplan.planner.search.find_plan import find_best
    from parplan.report.progress_bars import progress_bar
    from parplan.report.text import console

    question.require_possible()
    with noticing_ctrl_c() as interrupts, progress_bar(console(sys.stderr)) as on_progress:
        find = question.find
        plan = find(on_progress) if find else find_best(question.factory, on_progress).plan
    return question.finished(plan), bool(interrupts)


def answer_front(question: Question, num_points: int | None) -> tuple[ParetoFront, bool]:
    """Returns the front of a question, and True where Ctrl-C ended the search early."""
    from parplan.planner.search.pareto import DEFAULT_POINTS, find_front
    from parplan.report.progress_bars import front_bar
    from parplan.report.text import console

    points = DEFAULT_POINTS if num_points is None else num_points
    question.require_possible()
    with (
        noticing_ctrl_c() as interrupts,
        front_bar(console(sys.stderr)) as (on_progress, on_search),
    ):
        front = find_front(question.factory, points, on_progress, on_search)
    finished = (replace(point, plan=question.finished(point.plan)) for point in front.points)
    return replace(front, points=tuple(finished)), bool(interrupts)


def explained_error_of(request: Request) -> InfeasibleError:
    """Returns the error of a request that nothing fits, with the changes that would fit."""
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


def print_unsearched(question: Question, *, to_stderr: bool) -> None:
    """Prints the candidates that are pruned and the choices that no search looks at."""
    from parplan.report.searches.pruned_table import print_pruned
    from parplan.report.text import console

    factory = question.factory
    out = console(sys.stderr if to_stderr else sys.stdout)
    print_pruned(factory.prices(factory.offload or ()).space, factory.unsearched(), out)
