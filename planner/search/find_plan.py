"""The search: space -> bound -> columns -> integer program -> simulation -> Plan.

Layouts are taken in the order of a valid lower bound. The search ends when the next bound is above
the worst of the candidates worth replaying, so the best closed form is proven; the time limit or
Ctrl-C ends it earlier with the best so far and the bound reached. The best layouts are replayed in
the event simulator, and the fastest of them becomes the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from parplan.costmodels.step import StepPrice
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.candidates.branch_and_bound import (
    BranchOutcome,
)
from parplan.planner.objective import Objective
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.prediction import SearchRecord, Status
from parplan.planner.request import OnProgress, Request, SearchOptions
from parplan.planner.search.allowed_steps import AllowedSteps
from parplan.planner.search.described_shortfall import infeasible_error
from parplan.planner.search.fastest_layouts import BoundedCandidates, search_fastest
from parplan.planner.search.layer_proof import with_layer_proof
from parplan.planner.search.leaner_with_host import search_leaner
from parplan.planner.search.least_peak import LeastPeak, least_peak
from parplan.planner.search.least_redundancy import as_memory, then_fastest, then_leanest
from parplan.planner.search.one_candidate import certify
from parplan.planner.search.preference import Preference, preferred_plan
from parplan.planner.search.price_factory import (
    DescribedFactory,
    Explain,
    PriceFactory,
    described_factory,
)
from parplan.planner.search.replay import Replayed, replay_best
from parplan.planner.search.search_results import (
    SearchResult,
    counted_result,
    leanest_result,
    memory_first_result,
    record_of,
    result_of,
)
from parplan.planner.search.search_session import (
    INFINITY,
    SearchPrices,
    SearchSession,
    SolvedCandidate,
)
from parplan.planner.solver import counted_programs
from parplan.profiles.errors import ConfigError, OutOfTimeError, SolverError
from parplan.profiles.machines.off_speed import SpeedFactors
from parplan.profiles.units import GIB

WORTH_PROVING = 0.0005  # share below the best at which a bound is worth another program
SLACK = 0.02  # share of the memory limit


def _proven_s(
    looked: BoundedCandidates, best_s: float, share: float, session: SearchSession
) -> float:
    """Seconds that no plan of the search is below.

    Bounds of layouts whose relaxation was solved are raised as far as that helps, the least first.

    share: least ratio of simulated step to closed form among the replayed pipelines; without a
    pipeline the two are equal
    """

    def share_of(layout: ParallelLayout) -> float:
        return share if layout.mesh.pp > 1 else 1.0

    def simulated_s(layout: ParallelLayout) -> float:
        return session.prices.least_s(layout, session.limit_bytes) * share_of(layout)

    others_s = min(
        (simulated_s(layout) for layout in set(looked.possible).difference(looked.relaxed)),
        default=INFINITY,
    )
    reached_s = min(others_s, best_s * (1 - WORTH_PROVING))
    left = list(looked.relaxed)
    with suppress(OutOfTimeError):  # layouts that are not certified keep their bounds
        while left and simulated_s(least := min(left, key=simulated_s)) < reached_s:
            certify(least, best_s / share_of(least), session)
            left.remove(least)
            reached_s = min(reached_s, simulated_s(least))  # no other bound helps beyond this one
    return min(best_s, others_s, *(simulated_s(layout) for layout in looked.possible))


def search(
    prices: SearchPrices,
    objective: Objective,
    options: SearchOptions,
    on_progress: OnProgress | None = None,
    fastest: SolvedCandidate | None = None,
    slack: float = 0.0,
    preference: Preference | None = None,
) -> SearchResult | None:
    """Runs one search over `prices`; None when nothing fits its memory limit.

    fastest: the result of an earlier search under the same memory limit, which the memory
    objective then need not repeat
    slack: share of the memory limit that columns leave free
    preference: the choice among the ties of the fastest plan, None to leave them unpriced
    Raises SolverError, and before the first plan KeyboardInterrupt and OutOfTimeError.
    """
    with counted_programs() as count:
        result = _search(prices, objective, options, on_progress, fastest, slack, preference)
        if result is not None and not result.interrupted:
            result = with_layer_proof(result, SearchSession(prices, options, on_progress))
    return counted_result(result, count)


def is_without_plan(outcome: BranchOutcome[SolvedCandidate]) -> bool:
    """Returns whether nothing fits. Raises SolverError where the solver left that open."""
    if not outcome.solved and not outcome.finished:
        raise SolverError(
            "the solver found no plan in its time",
            hint="use the other --solver, or pin some degrees",
        )
    return not outcome.solved


def _search(
    prices: SearchPrices,
    objective: Objective,
    options: SearchOptions,
    on_progress: OnProgress | None,
    fastest: SolvedCandidate | None,
    slack: float,
    preference: Preference | None,
) -> SearchResult | None:
    space, session = prices.space, SearchSession(prices, options, on_progress, slack)
    if not prices.in_reach(session.limit_bytes):
        return None
    looked = BoundedCandidates((), ())
    if fastest is None:
        outcome, looked = search_fastest(space.layouts, session)
    else:
        assert objective is Objective.MEMORY, "another objective proves its own fastest plan"
        outcome = BranchOutcome((fastest,), fastest.bound, finished=True)
    if is_without_plan(outcome):
        return None
    fastest = outcome.solved[0]
    if objective is not Objective.THROUGHPUT:
        first = replay_best(outcome, Objective.THROUGHPUT, session)
        allowed = AllowedSteps.of(fastest, first, session)
    if objective is Objective.PEAK:
        return _search_least_peak(outcome, first, allowed, session)
    least = outcome
    if objective is Objective.MEMORY:
        least = outcome = then_leanest(outcome, space.layouts, session, allowed)
        if options.memory_slack is not None and not least.interrupted:
            outcome = then_fastest(least, space.layouts, session, options.memory_slack)
    replayed = replay_best(outcome, objective, session)
    if not replayed:  # the exact schedules of the chunks need more than their closed form says
        return _search(prices, objective, options, on_progress, None, slack + SLACK, preference)
    if outcome is not least:
        return memory_first_result(replayed, fastest, least, outcome, session, allowed)
    if objective is Objective.MEMORY:
        in_time = allowed.kept(replayed) or [(as_memory(each[0]), *each[1:]) for each in first]
        return leanest_result(in_time, fastest, outcome, session, allowed)
    record = _of_simulated_steps(
        record_of(objective, replayed[0][0], fastest, outcome, space),
        looked,
        [price for _, _, price in replayed],
        session,
        finished=outcome.finished,
    )
    result = result_of(replayed, record, fastest, session, interrupted=outcome.interrupted)
    if preference is None:
        return result
    assert isinstance(result.plan, Plan), "ties are of described models"
    with suppress(KeyboardInterrupt):  # the fastest plan stands
        result = replace(result, plan=preferred_plan(result.plan, replayed, preference, session))
    return result


def _search_least_peak(
    first: BranchOutcome[SolvedCandidate],
    replayed_first: Sequence[Replayed],
    allowed: AllowedSteps,
    session: SearchSession,
) -> SearchResult:
    """The plan of least peak in time; `first` has the fastest plans."""
    layouts, fastest = session.prices.space.layouts, first.solved[0]
    least = least_peak(layouts, first, session, allowed)
    inner = session.within(least.peak_bytes)
    outcome = BranchOutcome(
        (least.best,), 0.0, finished=least.finished, interrupted=least.interrupted
    )
    if not (least.interrupted or session.deadline.is_over):
        with suppress(OutOfTimeError, SolverError):  # the least peak stands
            outcome = _fastest_within(least, layouts, allowed.closed_s, inner)
    # The exact schedules of the chunks may need more.
    while not (replayed := replay_best(outcome, Objective.THROUGHPUT, inner)):
        inner = session.within(inner.limit_bytes * (1 + SLACK))
    replayed = allowed.kept(replayed) or list(replayed_first) or replayed
    best, _, price = replayed[0]
    peak_bytes = price.peak_bytes
    outcome = replace(
        outcome,
        finished=first.finished and outcome.finished,
        failures=(*first.failures, *least.failures, *outcome.failures),
    )
    bound_bytes = min(least.bound_bytes, peak_bytes)
    record = replace(
        record_of(Objective.PEAK, best, fastest, outcome, session.prices.space),
        value=round(peak_bytes / GIB, 6),
        bound=round(bound_bytes / GIB, 6),
        gap=round(1 - bound_bytes / peak_bytes, 6),
    )
    return result_of(
        replayed, record, fastest, inner, interrupted=outcome.interrupted, allowed=allowed
    )


def _fastest_within(
    least: LeastPeak, layouts: Sequence[ParallelLayout], slowest_s: float, inner: SearchSession
) -> BranchOutcome[SolvedCandidate]:
    """The fastest choices within the least peak and the slowdown, with the choice that set it."""
    outcome, _ = search_fastest(layouts, inner)
    solved = [candidate for candidate in outcome.solved if candidate.value <= slowest_s]
    if all(candidate.layout != least.best.layout for candidate in solved):
        solved = sorted([*solved, least.best], key=lambda candidate: candidate.value)
    return replace(outcome, solved=tuple(solved), finished=outcome.finished and least.finished)


def find_plan(
    request: Request, on_progress: OnProgress | None = None, explain: Explain = infeasible_error
) -> Plan:
    """Returns the plan that is best by the objective of the request.

    Raises ConfigError when no mesh is legal, SolverError, and OutOfTimeError where the deadline
    comes before the first plan. When nothing fits it raises the error that `explain` makes: an
    InfeasibleError that says how much memory is missing. The error of
    `parplan.report.searches.infeasible_text.explained_error` also says which changes would fit.
    """
    plan = find_best(described_factory(request, explain), on_progress).plan
    assert isinstance(plan, Plan), "the model is described"
    return plan


def find_best(factory: PriceFactory, on_progress: OnProgress | None = None) -> SearchResult:
    """Returns the best plan by the objective of a request for any kind of model.

    Where the request leaves offload open, the host is used only if nothing fits without it. Where
    nothing fits and it leaves that open, blocks in chunks are used an operator at a time. Raises
    errors as `find_plan` does.
    """
    with counted_programs() as count:
        result = _find_best(factory, on_progress)
        finer = factory.by_operators() if result is None else None
        if finer is not None:
            result = _find_best(finer, on_progress)
    result = counted_result(result, count)
    if result is None:
        raise factory.nothing_fits()
    return result


def _find_best(factory: PriceFactory, on_progress: OnProgress | None) -> SearchResult | None:
    """Returns the best plan, None where nothing fits."""
    objective, options = factory.request.objective, factory.request.options
    if objective is Objective.MEMORY:
        return _find_leanest(factory, on_progress)
    preference = _preference(factory, on_progress) if objective is Objective.THROUGHPUT else None
    return factory.first_fitting(
        lambda prices: search(prices, objective, options, on_progress, preference=preference)
    )


def _preference(factory: PriceFactory, on_progress: OnProgress | None) -> Preference | None:
    """Returns the choice among ties; a traced module has none, and no error band."""
    if not isinstance(factory, DescribedFactory) or factory.prefer is None:
        return None

    def search_at(corner: SpeedFactors) -> SearchResult | None:
        return _find_best(factory.at(corner), on_progress)

    return Preference(factory.prefer, factory.request.options.robust, search_at)


def _find_leanest(factory: PriceFactory, on_progress: OnProgress | None) -> SearchResult | None:
    """Returns the least redundant plan, first without the host and then with it.

    Where the request leaves offload open, the host is used only if nothing fits without it.
    """
    options, offload = factory.request.options, factory.offload
    if options.memory_slack is not None and offload:
        raise ConfigError(
            "--memory-slack plans without the host's memory, and --offload asks for it",
            hint="leave one of them out",
        )
    alone = search(factory.prices(()), Objective.MEMORY, options, on_progress)
    if options.memory_slack is not None:
        return alone
    if offload is None:
        offload = () if alone else factory.searched
    if not offload or (alone and alone.interrupted):
        return alone
    try:
        prices = factory.prices(offload)
    except OutOfTimeError:
        if alone is None:
            raise
        return replace(
            alone,
            plan=replace(alone.plan, search=replace(alone.plan.search, status=Status.FEASIBLE)),
        )
    first = alone or search(prices, Objective.THROUGHPUT, options, on_progress)
    return first and search_leaner(prices, first, options, on_progress)


def _of_simulated_steps(
    record: SearchRecord,
    looked: BoundedCandidates,
    prices: Sequence[StepPrice],
    session: SearchSession,
    *,
    finished: bool,
) -> SearchRecord:
    """The record with the simulated step of the plan as its value, and the gap to its bound.

    Bounds hold for the closed form. Where stages are unequal, the simulated step may be below it:
    the bounds of pipelines are lowered by the largest such difference among the replayed
    strategies. This part is measured, not proven.
    """
    value_s = prices[0].step_s
    share = min(1.0, *(price.step_s / price.closed_form_s for price in prices))
    least_s = _proven_s(
        looked if finished else replace(looked, relaxed=()), value_s, share, session
    )
    if not finished:
        least_s = min(least_s, record.bound * share)
    return replace(
        record,
        value=round(value_s, 6),
        bound=round(least_s, 6),
        gap=round(max(0.0, 1 - least_s / value_s), 6),
    )
