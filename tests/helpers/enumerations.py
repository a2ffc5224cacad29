"""All plans of tiny models, priced one by one, beside what a search finds."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from parplan.planner.objective import Objective
from parplan.planner.request import SearchOptions
from parplan.planner.search.search_results import SearchResult
from parplan.profiles.units import GIB, MIB


class Point(NamedTuple):
    """A plan's seconds, its redundant bytes, its peak bytes, and the host bytes of a rank.

    step_s, simulated_s   of the closed form, and of the simulator
    """

    step_s: float
    simulated_s: float
    redundant: float
    peak: float
    host: float


OBJECTIVES = (Objective.THROUGHPUT, Objective.MEMORY, Objective.PEAK)


def check_objectives(
    found: dict[Objective, SearchResult | None], fitting: list[Point], options: SearchOptions
) -> None:
    """Requires the best of all plans that fit, by each objective, with a bound that holds.

    A slowdown limits the simulated step. What the search finds is no worse than the best plan whose
    closed form is within it too.
    """
    fastest_s, slowdown = min(plan.step_s for plan in fitting), 1 + options.max_slowdown
    most_s = slowdown * found[Objective.PEAK].fastest_s * (1 + 1e-9)
    allowed = [plan for plan in fitting if plan.simulated_s <= most_s]
    in_time = [plan for plan in allowed if plan.step_s <= slowdown * fastest_s * (1 + 1e-9)]
    assert found[Objective.THROUGHPUT].fastest.value == pytest.approx(fastest_s, rel=1e-9)
    assert found[Objective.THROUGHPUT].plan.search.bound <= fastest_s + 1e-6
    lean, leanest = (min(plan.redundant for plan in plans) for plans in (in_time, allowed))
    assert leanest - 1e-6 * abs(leanest) <= found[Objective.MEMORY].best.value
    assert found[Objective.MEMORY].best.value <= lean + 1e-6 * abs(lean)
    held = max(memory.total for memory in found[Objective.PEAK].price.memory)
    assert held <= min(plan.peak for plan in in_time) + 2 * MIB
    assert held >= min(plan.peak for plan in allowed) * (1 - 1e-9)


def check_memory_first(
    found: SearchResult | None, fitting: list[Point], options: SearchOptions
) -> None:
    """Requires the fastest of all plans that hold little more than the leanest of all."""
    least = min(plan.redundant for plan in fitting)
    most = least + options.memory_slack * abs(least)
    fastest_s = min(plan.step_s for plan in fitting if plan.redundant <= most * (1 + 1e-9))
    record = found.plan.search
    assert record.value == pytest.approx(least / GIB, rel=1e-5, abs=1e-5)
    assert found.best.choice.redundant_bytes <= most * (1 + 1e-5)
    assert found.best.choice.step_s == pytest.approx(fastest_s, rel=1e-6)
    assert record.memory_first.step_bound_s <= fastest_s + 1e-6
