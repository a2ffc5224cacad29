"""The least redundant plan with the host, compared with the least redundant one without it."""

from __future__ import annotations

import math
from dataclasses import replace

from parplan.costmodels.price_cache import described_prices
from parplan.planner.candidates.branch_and_bound import REPLAYED, BranchOutcome
from parplan.planner.objective import Objective
from parplan.planner.plan.assemble import assemble, runner_up
from parplan.planner.plan.prediction import Status
from parplan.planner.request import OnProgress, SearchOptions
from parplan.planner.search.allowed_steps import AllowedSteps
from parplan.planner.search.least_redundancy import then_leanest
from parplan.planner.search.least_redundancy_on_host import LeanChoice, search_leanest_on_host
from parplan.planner.search.replay import replay_best
from parplan.planner.search.search_results import (
    SearchResult,
    copy_on_hosts,
    leanest_result,
    one_copy_bytes,
    record_of,
)
from parplan.planner.search.search_session import (
    ROUNDING,
    DescribedPrices,
    SearchPrices,
    SearchSession,
)


def search_leaner(
    prices: SearchPrices,
    reference: SearchResult,
    options: SearchOptions,
    on_progress: OnProgress | None = None,
) -> SearchResult:
    """Searches the least redundant plan with the host contents of `prices`.

    Returns `reference` where nothing is below it.

    reference: the least redundant plan without the host, or if none fits the fastest with it. Its
    `fastest` is the reference of the slowdown, and no device holds more than its fullest device.
    """
    if not isinstance(prices, DescribedPrices):
        return _search_leaner_sequence(prices, reference, options, on_progress)
    lean = reference.plan.search.objective is Objective.MEMORY
    fullest = int(max(memory.total for memory in reference.price.memory))
    session = SearchSession(prices, replace(options, memory_limit_bytes=fullest), on_progress)
    held = reference.strategy.layout.mesh.ranks_per_stage * sum(
        rank.total for rank in reference.price.redundant
    )
    value, bound = (reference.best.value, reference.best.bound) if lean else (held, held)
    incumbent = LeanChoice(
        layout=reference.strategy.layout,
        choice=reference.best.choice,
        value=value,
        bound=bound,
        strategy=reference.strategy,
        price=reference.price,
        price_cache=described_prices(session.book_of(reference.best.layout, reference.best.choice)),
    )
    one_copy = one_copy_bytes(prices)
    if reference.interrupted:
        outcome = BranchOutcome((incumbent,), -one_copy, finished=False, interrupted=True)
    else:
        fastest_s = reference.fastest_s
        slowdown = (1 + options.max_slowdown) * (1 + ROUNDING)
        outcome = search_leanest_on_host(
            prices.space.layouts,
            session,
            incumbent,
            closed_s=max(reference.fastest.choice.step_s, fastest_s) * slowdown,
            step_s=fastest_s * slowdown,
        )
    best, *rest = outcome.solved
    copy_bytes = copy_on_hosts(best.price, prices)
    record = replace(
        record_of(Objective.MEMORY, best, reference.fastest, outcome, prices.space, copy_bytes),
        fastest_step_time_s=round(reference.fastest_s, 6),
        runners_up=tuple(
            runner_up(choice.strategy, choice.price) for choice in rest[: REPLAYED - 1]
        ),
    )
    if reference.plan.search.status is not Status.OPTIMAL:
        record = replace(record, status=Status.FEASIBLE)
    plan = (
        replace(reference.plan, search=record)
        if best is incumbent
        else assemble(best.strategy, best.price, record, best.price_cache)
    )
    return replace(
        reference,
        plan=plan,
        interrupted=outcome.interrupted,
        strategy=best.strategy,
        price=best.price,
    )


def _search_leaner_sequence(
    prices: SearchPrices,
    reference: SearchResult,
    options: SearchOptions,
    on_progress: OnProgress | None,
) -> SearchResult:
    """`search_leaner` over layers of several classes, whose space has plans with and without host.

    A reference that uses the host sets no limit to the devices.
    """
    if reference.interrupted:
        return reference
    known, fastest = None, reference.fastest
    if reference.plan.search.objective is Objective.MEMORY:
        known = reference.best
        fullest = math.ceil(max(memory.total for memory in reference.price.memory))
        options = replace(options, memory_limit_bytes=fullest)
    session = SearchSession(prices, options, on_progress)
    proven = reference.plan.search.status is Status.OPTIMAL
    first = BranchOutcome((fastest,), fastest.bound, finished=proven)
    slowest_s = reference.fastest_s * session.slowdown
    closed_s = max(slowest_s, fastest.choice.step_s * session.slowdown)
    allowed = AllowedSteps(reference.fastest_s, slowest_s, closed_s, session)
    outcome = then_leanest(first, prices.space.layouts, session, allowed, known)
    replayed = allowed.kept(replay_best(outcome, Objective.MEMORY, session))
    return leanest_result(replayed, fastest, outcome, session, allowed) if replayed else reference
