"""The attack on one request: its plan, the best attack, and its margin beyond the stated gap."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.search.attacks import change
from benchmarks.search.attacks.allowed import layouts, left_out
from benchmarks.search.attacks.climb import (
    Alike,
    Climb,
    any_change,
    no_change,
    same_recompute,
    same_zero,
)
from benchmarks.search.attacks.layouts import Layouts, random_layout
from benchmarks.search.attacks.palette import Palette
from benchmarks.search.attacks.prices import INFINITY, Candidate, Prices
from benchmarks.search.attacks.requests import Request
from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.step import price_step
from parplan.costmodels.strategy import ParallelLayout, Strategy
from parplan.executor.rules.all_rules import refusals
from parplan.planner.candidates.enumeration import MAX_MICRO_BATCH_SIZE, enumerate_candidates
from parplan.planner.infeasible.shortfall import limit_bytes
from parplan.planner.objective import Objective
from parplan.planner.plan.assemble import assemble, rounded_figures
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.prediction import (
    SearchRecord,
)
from parplan.planner.plan.reprice import Repriced, reprice
from parplan.planner.request import PlanRequest
from parplan.planner.search.find_plan import find_plan
from parplan.planner.stage_columns.mix_table import MixTable
from parplan.profiles.errors import InfeasibleError
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.units import GIB, gib

ROUNDING = 2e-6  # relative: a gap has six decimals in a plan, a step six digits
FRAMES = 10  # other layouts to fill and climb from
SCREENED = 60  # layouts to look at, outside the search and inside it each
CLIMBED = 3  # filled layouts to climb from
NEAR = 1.02  # times the plan's step: a slower layout is not climbed from
RANDOM_LAYOUTS = 12
SHARES = {
    "zero": 0.1,
    "recompute": 0.1,
    "moved": 0.2,
    "blocks": 0.2,
    "frames": 0.2,
    "climbed": 0.2,
}  # of the evaluations
UNSEARCHED = SearchRecord.of_estimate(0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of an attack on one request.

    Values are seconds, or GiB of redundancy under the memory objective.

    plan              None if the search reports that nothing fits
    smaller_peak_gib  least peak of a strategy as good as the plan, None if none is smaller
    """

    request: Request
    plan: float | None
    gap: float
    best: float
    kinds: tuple[str, ...]
    how: str
    plan_how: str
    peak_gib: float
    smaller_peak_gib: float | None
    by_kind: dict[str, float]
    evaluations: int
    search_s: float
    attack_s: float

    @property
    def beats(self) -> float:
        """The margin of the best attack over the plan, as a share of the plan."""
        if self.plan is None:
            return float(self.best < INFINITY)
        return 1 - self.best / self.plan

    @property
    def beyond(self) -> float:
        """The margin beyond the stated gap, 0 within it."""
        over = self.beats - self.gap
        return over if over > ROUNDING else 0.0


class Attack:
    """The attacks on the plan of one request; `plan` is None if the search has none."""

    def __init__(self, request: Request, plan: Plan | None, evaluations: int, seed: int) -> None:
        problem = request.question
        self.request = request
        self.problem = problem
        self.plan = plan
        self.evaluations = evaluations
        self.chance = random.Random(f"{seed} {request}")
        self.given: Repriced[Plan, PriceCache] | None = None if plan is None else reprice(plan)
        price_cache = PriceCache(
            problem.model,
            problem.training,
            machine_for(problem.cluster),
            zero_ranks=request.pins.zero_ranks,
        )
        limit = limit_bytes(problem.cluster, problem.training.stack, request.options)
        slowest_s = (
            INFINITY
            if plan is None
            else plan.search.fastest_step_time_s
            * (1 + request.options.max_slowdown)
            * (1 + ROUNDING)
        )
        self.prices = Prices(price_cache, limit, request.objective, slowest_s)
        self.palette = Palette(
            MixTable(price_cache, request.pins.resolved(problem.training.stack)), request.pins, seed
        )
        self.layouts = Layouts(self.prices, self.palette, request.pins)
        self.excused = (
            frozenset(rule.name for rule, _ in refusals(plan)) if plan else frozenset[str]()
        )

    def start(self) -> Candidate | None:
        """Return the plan as the attack prices it.

        Raises AssertionError if that differs from the plan's figures, or it does not fit.
        """
        if self.given is None or self.plan is None:
            return None
        priced = self.prices.price(self.given.strategy)
        assert priced is not None, f"{self.request}: the plan does not fit its own limit"
        assert rounded_figures(priced.step_s) == self.plan.predicted.step_time_s.value, (
            f"{self.request}: {priced.step_s} s is not what the plan says"
        )
        self.prices.as_good = priced.value * (1 + ROUNDING)
        self.prices.leanest = priced.peak_bytes
        return priced

    def counts(self, strategy: Strategy) -> bool:
        """Return True if a strategy is no documented exclusion of the search."""
        return left_out(strategy, self.request.pins) is None

    def runs(self, strategy: Strategy) -> bool:
        """Return True if the executor refuses nothing in it that it does not refuse in the plan."""
        plan = assemble(
            strategy,
            price_step(strategy, self.prices.price_cache),
            UNSEARCHED,
            self.prices.price_cache,
        )
        return all(rule.name in self.excused for rule, _ in refusals(plan))

    def found(self) -> Iterator[tuple[str, Candidate]]:
        """Yield the best of every kind of attack, by its name."""
        start = self.start()
        if start is not None:
            for name, alike in (
                ("zero", same_recompute),
                ("recompute", same_zero),
                ("moved", no_change),
                ("blocks", any_change),
            ):
                moves_blocks = name in ("moved", "blocks") and start.strategy.layout.mesh.pp > 1
                if moves_blocks or name != "moved":
                    yield (
                        name,
                        self._climb(alike).from_(
                            start, int(SHARES[name] * self.evaluations), moves_blocks=moves_blocks
                        ),
                    )
        yield from (("frames", best) for best in self._of_frames(start))
        yield from (("estimate", best) for best in self.random(RANDOM_LAYOUTS))

    def _climb(self, alike: Alike) -> Climb:
        return Climb(self.prices, self.palette, self.chance, self.counts, self.runs, alike)

    def _of_frames(self, start: Candidate | None) -> Iterator[Candidate]:
        """Yield other layouts, filled and climbed from.

        Some are outside the search, some inside.
        """
        planned = start.strategy.layout if start else None
        cut = start.value if start and self.request.objective is Objective.THROUGHPUT else INFINITY
        filled: list[Candidate] = []
        stop = self.prices.evaluations + int(SHARES["frames"] * self.evaluations)
        for layout in self._others(planned, cut):
            if filled and self.prices.evaluations > stop:
                break
            candidate = self.layouts.best(layout, cut * NEAR)
            filled += (
                [candidate] if candidate is not None and self.counts(candidate.strategy) else []
            )
        filled.sort(key=lambda candidate: candidate.key)
        for candidate in filled[:CLIMBED]:
            yield self._climb(any_change).from_(
                candidate, int(SHARES["climbed"] * self.evaluations / CLIMBED)
            )

    def _others(self, planned: ParallelLayout | None, cut: float) -> list[ParallelLayout]:
        """Return layouts whose busiest rank would be below the cut without a memory limit.

        Meshes take turns.
        """
        known = frozenset(
            enumerate_candidates(
                PlanRequest(
                    model=self.problem.model,
                    cluster=self.problem.cluster,
                    training=self.problem.training,
                    constraints=self.request.pins,
                )
            ).layouts
        )
        every = [layout for layout in self._layouts() if layout != planned]
        self.chance.shuffle(every)
        turn, seen = dict[ParallelLayout, int](), Counter[Mesh]()
        for layout in every:
            turn[layout], seen[layout.mesh] = seen[layout.mesh], seen[layout.mesh] + 1
        every.sort(
            key=lambda layout: (turn[layout], planned is None or layout.mesh != planned.mesh)
        )
        chosen: list[ParallelLayout] = []
        for unknown, most in ((True, FRAMES), (False, FRAMES)):
            screened = [layout for layout in every if (layout not in known) is unknown][:SCREENED]
            chosen += [layout for layout in screened if self.layouts.roomy(layout) < cut][:most]
        return chosen

    def _layouts(self) -> list[ParallelLayout]:
        return [
            layout
            for layout in layouts(self.problem, self.request.pins)
            if layout.micro_batch_size <= MAX_MICRO_BATCH_SIZE
        ]

    def random(self, tries: int) -> Iterator[Candidate]:
        """Yield the random layouts of `tries` draws that `estimate` prices and that fit."""
        possible = self._layouts()
        for _ in range(tries if possible else 0):
            plan = random_layout(self.chance, self.problem, self.request.pins, possible)
            priced = plan and self.prices.price(reprice(plan).strategy)
            if priced and plan:
                assert (
                    self.prices.objective is Objective.MEMORY
                    or rounded_figures(priced.value) == plan.predicted.step_time_s.value
                )
                yield priced


def searched(request: Request) -> Plan | None:
    """Return the plan of a request, or None when the search reports that nothing fits."""
    question = replace(
        request.question,
        objective=request.objective,
        constraints=request.pins,
        options=request.options,
    )
    try:
        return find_plan(question, explain=_nothing_fits)
    except InfeasibleError:
        return None


def attacked(request: Request, evaluations: int, seed: int) -> Outcome:
    """Search the plan of a request and return it with the best of all attacks."""
    started = time.perf_counter()
    plan = searched(request)
    planned = time.perf_counter()
    attack = Attack(request, plan, evaluations, seed)
    start = attack.start()
    best, by_kind = start, dict[str, float]()
    for name, candidate in attack.found():
        by_kind[name] = min(by_kind.get(name, INFINITY), candidate.value)
        if (
            (best is None or candidate.value < best.value)
            and attack.runs(candidate.strategy)
            and attack.counts(candidate.strategy)
        ):
            best = candidate
    return _outcome(
        request, attack, start, best, by_kind, planned - started, time.perf_counter() - planned
    )


def _nothing_fits(*_: object) -> InfeasibleError:
    return InfeasibleError("nothing fits", hint="see plan")


def _outcome(
    request: Request,
    attack: Attack,
    start: Candidate | None,
    best: Candidate | None,
    by_kind: dict[str, float],
    search_s: float,
    attack_s: float,
) -> Outcome:
    unit = 1.0 if request.objective is Objective.THROUGHPUT else GIB
    leanest = attack.prices.leanest
    changed = start is not None and best is not None and best.value < start.value
    kinds: tuple[str, ...] = ()
    if changed and start and best:
        kinds = change.kinds(start.strategy, best.strategy)
    elif best and not start:
        kinds = ("found",)
    return Outcome(
        request=request,
        plan=start.value / unit if start else None,
        gap=attack.plan.search.gap if attack.plan else 0.0,
        best=best.value / unit if best else INFINITY,
        kinds=kinds,
        how=change.text(best.strategy) if best and (changed or not start) else "",
        plan_how=change.text(start.strategy) if start else "",
        peak_gib=gib(start.peak_bytes) if start else 0.0,
        smaller_peak_gib=gib(leanest)
        if start and leanest < start.peak_bytes * (1 - ROUNDING)
        else None,
        by_kind={
            name: 1 - value / start.value if start else 1.0 for name, value in by_kind.items()
        },
        evaluations=attack.prices.evaluations,
        search_s=search_s,
        attack_s=attack_s,
    )
