"""The plan of a search method: the best point that it found, as a plan without a proof."""

from __future__ import annotations

from dataclasses import replace

from parplan.costmodels.step import price_step
from parplan.planner.deadline import NEVER
from parplan.planner.plan.assemble import assemble
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.prediction import Candidates, SearchRecord, Status
from parplan.planner.request import Request
from parplan.planner.search_methods.method_space import MethodSpace
from parplan.planner.search_methods.methods import run_method
from parplan.profiles.errors import OutOfTimeError

BUDGET_S = 10.0  # CPU-seconds of a method without a time limit


def find_by_method(
    request: Request, method: str, budget_s: float = BUDGET_S, seed: int = 0
) -> Plan:
    """Returns the best plan that a method finds within CPU-seconds.

    Its record has the method, the bound 0 and the gap 1: nothing is proven. Raises ConfigError for
    a request that the space of the methods lacks, and OutOfTimeError where no plan was found.
    """
    request = request.until(NEVER)  # the budget is in CPU-seconds
    run = run_method(method, request, budget_s, seed)
    if run.strategy is None:
        ended = "no plan of its space fits" if run.ended else f"it had {budget_s:g} CPU-seconds"
        raise OutOfTimeError(
            f"the search method {method} found no plan: {ended}",
            hint="give it a longer --time-limit, or leave out --search",
        )
    price_cache = MethodSpace(request).price_cache
    price = price_step(run.strategy, price_cache)
    record = replace(
        SearchRecord.of_estimate(price.step_s, price.closed_form_s),
        status=Status.FEASIBLE,
        candidates=Candidates(considered=run.priced, pruned=0, solved=run.priced, left=0),
        method=method,
    )
    return assemble(run.strategy, price, record, price_cache)
