"""The integer program that certifies the plan of a launcher, in the plan's layout.

    min sum_k T_k y_k

    (C1) sum_k y_k = 1                       one of the settings, on one of the stages they may have
    (C2) sum_k m_kr y_k <= limit             for each pipeline rank r

T_k is a lower bound of the simulated step. Where the program takes settings of which only the bound
is known, they are simulated and the program is solved again. So its optimum is the shortest
simulated step of all settings that are listed, although few of them are simulated. Settings that
do not fit are in the program too, and (C2) excludes them. Settings whose passes alone take longer
than the plan are left out. Times are in microseconds and bytes in MiB.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.step import price_step
from parplan.costmodels.strategy import LayerChoice, Strategy
from parplan.planner.baselines.optimum import bound_s, busiest_s, fullest_ranks
from parplan.planner.plan.certificate_record import Certified, CertifyingProgram
from parplan.planner.request import SearchOptions
from parplan.planner.search.certificate import AGREES, BESIDE
from parplan.planner.search.column_names import ColumnNames, recompute_word
from parplan.planner.search.search_session import LEAST_SOLVE_S, MOST_SOLVE_S
from parplan.planner.solver import Problem, chosen, weighted
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.units import MIB, US_PER_S

MOST_SOLVES = 20  # settings whose bounds are below the plan and whose simulated steps are not

Priced = tuple[Strategy, PriceCache]


@dataclass
class SettingsProgram:
    """The program of the settings of a layout, of which some steps are exact and others bounds.

    steps_s    seconds of each setting, a lower bound or exact
    exact      the settings with exact seconds
    """

    problem: Problem
    picks: dict[int, Any]
    steps_s: list[float]
    exact: set[int]

    def minimize(self) -> None:
        self.problem.minimize(
            weighted((y, self.steps_s[k] * US_PER_S) for k, y in self.picks.items())
        )


def certified_settings(
    best: Strategy,
    step_s: float,
    listed: Iterable[Priced],
    limit_bytes: float,
    options: SearchOptions,
) -> CertifyingProgram | None:
    """Returns the record of the program over the settings of a layout, with the best at `step_s`.

    None where it was not solved to its optimum. Raises SolverError, and Unsolved where the solver's
    time is over.
    """
    near_s = step_s * (1 + BESIDE)
    settings = {
        strategy: prices for strategy, prices in listed if busiest_s(strategy, prices) < near_s
    }
    strategies = list(settings.items())
    if best not in settings:
        return None  # what is listed is not what was searched
    program = _build(strategies, limit_bytes)
    place = [strategy for strategy, _ in strategies].index(best)
    program.steps_s[place] = step_s
    program.exact.add(place)
    limit_s = options.deadline.solver_limit_s(LEAST_SOLVE_S, MOST_SOLVE_S)
    for _ in range(MOST_SOLVES):
        program.minimize()
        solution = program.problem.solve(options.solver, limit_s)
        if solution is None or not solution.proven:
            return None
        taken = chosen(program.picks)
        if taken in program.exact:
            return _recorded(program, program.steps_s[taken], step_s, options)
        program.steps_s[taken] = price_step(*strategies[taken]).step_s
        program.exact.add(taken)
    return None


def _recorded(
    program: SettingsProgram, optimum_s: float, step_s: float, options: SearchOptions
) -> CertifyingProgram:
    variables, rows = program.problem.size
    gap = 1 - optimum_s / step_s
    record = CertifyingProgram(
        over=Certified.SETTINGS,
        variables=variables,
        rows=rows,
        optimum_s=round(optimum_s, 6),
        gap=round(gap, 6) if abs(gap) > AGREES else 0.0,
    )
    if options.on_program is not None:
        options.on_program(record, program.problem)
    return record


def _build(settings: list[Priced], limit_bytes: float) -> SettingsProgram:
    """Returns the program with the bounds of all settings."""
    problem, names = Problem("settings"), ColumnNames()
    picks = {
        k: problem.binary(names.unique(_name(strategy))) for k, (strategy, _) in enumerate(settings)
    }
    problem.require(weighted((y, 1.0) for y in picks.values()) == 1, "C1_one")
    held: dict[int, list[tuple[Any, float]]] = {}
    for k, (strategy, prices) in enumerate(settings):
        for rank, peak_bytes in fullest_ranks(strategy, prices):
            held.setdefault(rank, []).append((picks[k], peak_bytes / MIB))
    for rank, terms in sorted(held.items()):
        problem.require(weighted(terms) <= limit_bytes / MIB, f"C2_memory_rank{rank}")
    return SettingsProgram(problem, picks, [bound_s(*each) for each in settings], set())


def _name(strategy: Strategy) -> str:
    """Returns the ways of the blocks with their numbers, and the blocks of unequal stages."""
    blocks = [
        [choice for choice in stage if choice.kind.role is LayerKind.BLOCK]
        for stage in strategy.stages
    ]
    ways = Counter(_way(choice) for stage in blocks for choice in stage)
    lengths = [len(stage) for stage in blocks]
    words = ["y", *(f"{way}x{number}" for way, number in ways.items())]
    return "_".join((*words, *_lengths(lengths)))


def _way(choice: LayerChoice) -> str:
    return f"zero{choice.zero}_{recompute_word(choice.recompute)}_"


def _lengths(lengths: list[int]) -> Iterator[str]:
    """Yields the numbers of blocks of the stages where they differ, equal neighbours at once."""
    if len(set(lengths)) > 1:
        yield "stages"
        yield from (f"{length}x{len(list(alike))}" for length, alike in groupby(lengths))
