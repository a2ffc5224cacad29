"""The plan of one search, with the proof about it in the units of the plan file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from parplan.costmodels.step import StepPrice
from parplan.costmodels.strategy import Strategy
from parplan.planner.candidates.branch_and_bound import BranchOutcome, CandidateAnswer
from parplan.planner.candidates.enumeration import CandidateSpace
from parplan.planner.candidates.solver_faults import failure_text
from parplan.planner.objective import Objective
from parplan.planner.plan.assemble import runner_up
from parplan.planner.plan.prediction import Candidates, MemoryFirst, SearchRecord, Status
from parplan.planner.plan.traced_plan import AnyPlan
from parplan.planner.search.allowed_steps import AllowedSteps
from parplan.planner.search.certificate import certified, with_counts
from parplan.planner.search.replay import Replayed
from parplan.planner.search.search_session import SearchPrices, SearchSession, SolvedCandidate
from parplan.planner.solver import ProgramCount
from parplan.profiles.units import GIB

MEMORY_CAP = "memory cap"


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The plan of one search, the fastest choice as its reference, and whether Ctrl-C came.

    best: the choice behind the plan, with its strategy and price
    fastest_s: simulated step of the fastest plan, the base of the slowdown
    """

    plan: AnyPlan
    fastest: SolvedCandidate
    interrupted: bool
    best: SolvedCandidate
    strategy: Strategy
    price: StepPrice
    fastest_s: float


def result_of(
    replayed: Sequence[Replayed],
    record: SearchRecord,
    fastest: SolvedCandidate,
    session: SearchSession,
    *,
    interrupted: bool,
    allowed: AllowedSteps | None = None,
) -> SearchResult:
    """Returns the first of the replayed choices as the plan, and the others as runners-up.

    The plan is certified, and a better choice of the certifying program comes first.

    allowed: the steps of another objective than the fastest step
    """
    if allowed is not None:
        record = replace(record, fastest_step_time_s=round(allowed.fastest_s, 6))
    replayed, record = certified(replayed, record, session)
    (best, strategy, price), *rest = replayed
    runners_up = tuple(runner_up(strategy, price) for _, strategy, price in rest)
    if record.status is Status.FEASIBLE and session.deadline.is_capped:
        record = replace(record, stopped_by=MEMORY_CAP)
    book = session.book_of(best.layout, best.choice)
    plan = session.prices.assembled(strategy, price, replace(record, runners_up=runners_up), book)
    fastest_s = price.step_s if allowed is None else allowed.fastest_s
    return SearchResult(plan, fastest, interrupted, best, strategy, price, fastest_s)


def counted_result(result: SearchResult | None, count: ProgramCount) -> SearchResult | None:
    """Returns the result with the programs that ran in its search."""
    if result is None:
        return None
    plan = result.plan
    return replace(result, plan=replace(plan, search=with_counts(plan.search, count)))


def leanest_result(
    replayed: Sequence[Replayed],
    fastest: SolvedCandidate,
    outcome: BranchOutcome[SolvedCandidate],
    session: SearchSession,
    allowed: AllowedSteps,
) -> SearchResult:
    """Returns the result of the memory objective, whose gap counts a copy on the hosts."""
    best, _, price = replayed[0]
    copy_bytes = copy_on_hosts(price, session.prices)
    space = session.prices.space
    record = record_of(Objective.MEMORY, best, fastest, outcome, space, copy_bytes)
    return result_of(
        replayed, record, fastest, session, interrupted=outcome.interrupted, allowed=allowed
    )


def memory_first_result(
    replayed: Sequence[Replayed],
    fastest: SolvedCandidate,
    least: BranchOutcome[SolvedCandidate],
    outcome: BranchOutcome[SolvedCandidate],
    session: SearchSession,
    allowed: AllowedSteps,
) -> SearchResult:
    """Returns the fastest plan with little more redundant memory than the first of `least`."""
    record = record_of(Objective.MEMORY, least.solved[0], fastest, least, session.prices.space)
    slack, best = session.options.memory_slack, replayed[0][0]
    assert slack is not None, "memory comes first"
    record = replace(
        record,
        status=Status.OPTIMAL if outcome.finished else Status.FEASIBLE,
        memory_first=MemoryFirst(
            slack=slack,
            step_s=round(best.choice.step_s, 6),
            step_bound_s=round(min(outcome.bound, best.choice.step_s), 6),
        ),
        solver_failure=failure_text(outcome.failures),
    )
    return result_of(
        replayed, record, fastest, session, interrupted=outcome.interrupted, allowed=allowed
    )


def one_copy_bytes(prices: SearchPrices) -> float:
    """Bytes of one copy of the states of the model."""
    return float(sum(prices.price_cache.ideal_states(1)))


def copy_on_hosts(price: StepPrice, prices: SearchPrices) -> float:
    """Bytes of one copy of the states where the hosts hold some, else none."""
    return one_copy_bytes(prices) if any(memory.host for memory in price.memory) else 0.0


def _share(over: float, whole: float) -> float:
    """Returns a part of the whole, all of it where the whole is nothing."""
    if whole > 0:
        return over / whole
    return 1.0 if over > 0 else 0.0


def record_of(
    objective: Objective,
    best: CandidateAnswer,
    fastest: SolvedCandidate,
    outcome: BranchOutcome[Any],
    space: CandidateSpace,
    copy_bytes: float = 0.0,
) -> SearchRecord:
    """The proof about `best`, in the units of the plan file.

    copy_bytes: bytes of one copy of the states, added to the denominator of the gap where the
    host holds states
    """
    unit, whole = GIB if objective is Objective.MEMORY else 1.0, best.value + copy_bytes
    considered, solved = space.considered, len(outcome.solved)
    return SearchRecord(
        objective=objective,
        status=Status.OPTIMAL if outcome.finished else Status.FEASIBLE,
        value=round(best.value / unit, 6),
        bound=round(outcome.bound / unit, 6),
        gap=round(_share(max(0.0, best.value - outcome.bound), whole), 6),
        fastest_step_time_s=round(fastest.choice.step_s, 6),
        candidates=Candidates(
            considered=considered,
            pruned=considered - solved - outcome.left,
            solved=solved,
            left=outcome.left,
        ),
        solver_failure=failure_text(outcome.failures),
    )
