"""The fastest plan has the most goodput of all points of a tiny space, by brute force."""

from __future__ import annotations

from itertools import islice

from parplan.costmodels.step import price_step
from parplan.costmodels.usage.goodput import Failures
from parplan.planner.baselines.optimum import fits
from parplan.planner.plan.assemble import assemble
from parplan.planner.plan.plan_goodput import plan_goodput
from parplan.planner.plan.prediction import SearchRecord
from parplan.planner.search.find_plan import find_plan
from parplan.planner.search_methods.exhaustive import every_point
from parplan.planner.search_methods.method_space import MethodSpace
from tests.planner.search_methods.test_methods import tiny

FAILING = Failures(mtbf_s=3e5, restart_s=60.0, storage_bytes_per_s=1e8, repair_s=3600.0)


def advance(plan) -> float:
    """Steps that a plan advances in a second, failures included."""
    return plan_goodput(plan, FAILING).share / plan.predicted.step_time_s.value


def test_no_point_advances_more_than_the_fastest_plan():
    space = MethodSpace(tiny(4))
    fastest = find_plan(space.request)
    shares = set()
    for layout in space.layouts:
        for point in islice(every_point(space, layout), 0, None, 97):
            strategy = space.strategy(point)
            if fits(strategy, space.price_cache, space.limit_bytes):
                price = price_step(strategy, space.price_cache)
                record = SearchRecord.of_estimate(price.step_s, price.closed_form_s)
                plan = assemble(strategy, price, record, space.price_cache)
                shares.add(plan_goodput(plan, FAILING).share)
                assert advance(plan) <= advance(fastest) * (1 + 1e-4) / (1 - fastest.search.gap)

    assert shares == {plan_goodput(fastest, FAILING).share}
    assert 0 < min(shares) < 1
