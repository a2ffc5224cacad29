"""One request attacked: its plan, the best of all attacks on it, and by how much that is beyond the
stated gap.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

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
from parplan.planner.plan.assemble import assemble, rounded_figures
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.prediction import Candidates, Objective, SearchRecord, Status
from parplan.planner.plan.reprice import Repriced, reprice
from parplan.planner.request import PlanRequest
from parplan.planner.search.find_plan import find_plan
from parplan.planner.stage_columns.mix_table import MixTable
from parplan.profiles.errors import InfeasibleError
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.units import GIB, gib

ROUNDING = 2e-6  # relative: a gap has six decimals in a plan, a step six digits
FRAMES = 10  # other layouts that are filled and climbed from
SCREENED = 60  # of those that the search has not, and of those that it has, how many are looked at
CLIMBED = 3  # of the filled ones
NEAR = 1.02  # of the plan's step: what is further is not climbed from
RANDOM_LAYOUTS = 12
SHARES = {
    "zero": 0.1,
    "recompute": 0.1,
    "moved": 0.2,
    "blocks": 0.2,
    "frames": 0.2,
    "climbed": 0.2,
}  # of the evaluations
UNSEARCHED = SearchRecord(
    objective=Objective.THROUGHPUT,
    status=Status.ESTIMATE,
    value=0.0,
    bound=0.0,
    gap=1.0,
    fastest_step_time_s=0.0,
    candidates=Candidates(considered=1, pruned=0, solved=1, left=0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an attack on one request found; values are seconds, or GiB of redundancy where that is
    the objective.

    plan: None where the search says that nothing fits; smaller_peak_gib: of a strategy as good as
    the plan, None where none is smaller
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
        """By what share of the plan the best attack is below it."""
        if self.plan is None:
            return float(self.best < INFINITY)
        return 1 - self.best / self.plan

    @property
    def beyond(self) -> float:
        """The same beyond the stated gap, 0 where it is within."""
        over = self.beats - self.gap
        return over if over > ROUNDING else 0.0


class Attack:
    """The attacks on the plan of one request; `plan` is None where the search finds none."""

    def __init__(self, request: Request, plan: Plan | None, evaluations: int, seed: int) -> None:
        asked = request.question
        self.request, self.asked, self.plan, self.evaluations = request, asked, plan, evaluations
        self.chance = random.Random(f"{seed} {request}")
        self.given: Repriced | None = None if plan is None else reprice(plan)
        price_cache = PriceCache(
            asked.model,
            asked.training,
            machine_for(asked.cluster),
            zero_ranks=request.pins.zero_ranks,
        )
        limit = limit_bytes(asked.cluster, asked.training.stack, request.options)
        slowest_s = (
            INFINITY
            if plan is None
            else plan.search.fastest_step_time_s
            * (1 + request.options.max_slowdown)
            * (1 + ROUNDING)
        )
        self.prices = Prices(price_cache, limit, request.objective, slowest_s)
        self.palette = Palette(
            MixTable(price_cache, request.pins.resolved(asked.training.stack)), request.pins, seed
        )
        self.layouts = Layouts(self.prices, self.palette, request.pins)
        self.excused = (
            frozenset(rule.name for rule, _ in refusals(plan)) if plan else frozenset[str]()
        )

    def start(self) -> Candidate | None:
        """The plan as the attack prices it. Raises AssertionError where that is not what the plan
        says, or it does not fit.
        """
        if self.given is None or self.plan is None:
            return None
        found = self.prices.price(self.given.strategy)
        assert found is not None, f"{self.request}: the plan does not fit its own limit"
        assert rounded_figures(found.step_s) == self.plan.predicted.step_time_s.value, (
            f"{self.request}: {found.step_s} s is not what the plan says"
        )
        self.prices.as_good = found.value * (1 + ROUNDING)
        self.prices.leanest = found.peak_bytes
        return found

    def counts(self, strategy: Strategy) -> bool:
        """Whether a strategy is none of what the search leaves out and says so."""
        return left_out(strategy, self.request.pins) is None

    def runs(self, strategy: Strategy) -> bool:
        """Whether the executor has nothing against it that it has not against the plan."""
        plan = assemble(
            strategy,
            price_step(strategy, self.prices.price_cache),
            UNSEARCHED,
            self.prices.price_cache,
        )
        return all(rule.name in self.excused for rule, _ in refusals(plan))

    def found(self) -> Iterator[tuple[str, Candidate]]:
        """The best of every kind of attack, by its name."""
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
        yield from (("estimate", best) for best in self._random())

    def _climb(self, alike: Alike) -> Climb:
        return Climb(self.prices, self.palette, self.chance, self.counts, self.runs, alike)

    def _of_frames(self, start: Candidate | None) -> Iterator[Candidate]:
        """Other layouts, filled and climbed from: those that the search does not have, and some
        that it has.
        """
        own = start.strategy.layout if start else None
        cut = start.value if start and self.request.objective is Objective.THROUGHPUT else INFINITY
        filled: list[Candidate] = []
        stop = self.prices.evaluations + int(SHARES["frames"] * self.evaluations)
        for layout in self._others(own, cut):
            if filled and self.prices.evaluations > stop:
                break
            found = self.layouts.best(layout, cut * NEAR)
            filled += [found] if found is not None and self.counts(found.strategy) else []
        filled.sort(key=lambda found: found.key)
        for found in filled[:CLIMBED]:
            yield self._climb(any_change).from_(
                found, int(SHARES["climbed"] * self.evaluations / CLIMBED)
            )

    def _others(self, own: ParallelLayout | None, cut: float) -> list[ParallelLayout]:
        """Layouts whose busiest rank would be below the cut if memory had no limit, of every mesh
        in turn.
        """
        known = frozenset(
            enumerate_candidates(
                PlanRequest(
                    model=self.asked.model,
                    cluster=self.asked.cluster,
                    training=self.asked.training,
                    constraints=self.request.pins,
                )
            ).layouts
        )
        every = [layout for layout in self._layouts() if layout != own]
        self.chance.shuffle(every)
        turn, seen = dict[ParallelLayout, int](), Counter[Mesh]()
        for layout in every:
            turn[layout], seen[layout.mesh] = seen[layout.mesh], seen[layout.mesh] + 1
        every.sort(key=lambda layout: (turn[layout], own is None or layout.mesh != own.mesh))
        chosen: list[ParallelLayout] = []
        for unknown, most in ((True, FRAMES), (False, FRAMES)):
            wanted = [layout for layout in every if (layout not in known) is unknown][:SCREENED]
            chosen += [layout for layout in wanted if self.layouts.roomy(layout) < cut][:most]
        return chosen

    def _layouts(self) -> list[ParallelLayout]:
        return [
            layout
            for layout in layouts(self.asked, self.request.pins)
            if layout.micro_batch_size <= MAX_MICRO_BATCH_SIZE
        ]

    def _random(self) -> Iterator[Candidate]:
        """Random layouts as `estimate` prices them."""
        possible = self._layouts()
        for _ in range(RANDOM_LAYOUTS if possible else 0):
            plan = random_layout(self.chance, self.asked, self.request.pins, possible)
            found = plan and self.prices.price(reprice(plan).strategy)
            if found and plan:
                assert (
                    self.prices.objective is Objective.MEMORY
                    or rounded_figures(found.value) == plan.predicted.step_time_s.value
                )
                yield found


def attacked(request: Request, evaluations: int, seed: int) -> Outcome:
    """The plan of a request, and the best of all attacks on it."""
    started = time.perf_counter()
    try:
        plan = find_plan(
            PlanRequest(
                model=request.question.model,
                cluster=request.question.cluster,
                training=request.question.training,
                objective=request.objective,
                constraints=request.pins,
                options=request.options,
            ),
            explain=_nothing_fits,
        )
    except InfeasibleError:
        plan = None
    searched = time.perf_counter()
    attack = Attack(request, plan, evaluations, seed)
    start = attack.start()
    best, by_kind = start, dict[str, float]()
    for name, found in attack.found():
        by_kind[name] = min(by_kind.get(name, INFINITY), found.value)
        if (
            (best is None or found.value < best.value)
            and attack.runs(found.strategy)
            and attack.counts(found.strategy)
        ):
            best = found
    return _outcome(
        request, attack, start, best, by_kind, searched - started, time.perf_counter() - searched
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
    return Outcome(
        request=request,
        plan=start.value / unit if start else None,
        gap=attack.plan.search.gap if attack.plan else 0.0,
        best=best.value / unit if best else INFINITY,
        kinds=change.kinds(start.strategy, best.strategy)
        if changed and start and best
        else ("found",)
        if best and not start
        else (),
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
