"""The plan and the number of nodes with the most goodput, against every other choice."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest

from parplan.commands.options.target_options import TargetOptions
from parplan.commands.requests.requests import request_of
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.step import price_step
from parplan.costmodels.usage.goodput import Failures
from parplan.planner.baselines.optimum import fits
from parplan.planner.plan.assemble import assemble
from parplan.planner.plan.plan_goodput import plan_goodput
from parplan.planner.plan.prediction import SearchRecord
from parplan.planner.request import Constraints, Request
from parplan.planner.search.find_plan import find_plan
from parplan.planner.search.most_goodput import find_most_goodput, least_work, legal_meshes
from parplan.planner.search.price_factory import DescribedFactory
from parplan.planner.search_methods.exhaustive import every_point
from parplan.planner.search_methods.method_space import MethodSpace
from parplan.profiles.errors import ConfigError, InfeasibleError
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


PLAIN = Constraints(
    schedule=(Schedule.ONE_F_ONE_B,),
    recompute=(Recompute.NONE,),
    zero=(1,),
    tp=(1,),
    megatron_sharding=True,
    offload=(),
)


def on_nodes(nodes: int, constraints: Constraints = PLAIN) -> Request:
    """Returns a small request on some nodes of two GPUs."""
    target = TargetOptions(
        model="gpt-1.5b", gpu="a100-80gb", gpus=2 * nodes, gpus_per_node=2, global_batch_size=96
    )
    return replace(request_of(target), constraints=constraints)


def every_advance_s(most: int, failures: Failures) -> dict[int, float]:
    """Seconds of the cluster for a step, by the number of nodes that train."""
    found = {}
    for nodes in range(1, most + 1):
        stated = replace(failures, spare_nodes=most - nodes)
        try:
            plan = find_plan(on_nodes(nodes))
        except (ConfigError, InfeasibleError):
            continue
        found[nodes] = plan.predicted.step_time_s.value / plan_goodput(plan, stated).share
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mtbf_s", "repair_s", "spares"),
    [
        (1e9, 3600.0, 1),  # seven nodes have no mesh as fast as six
        (3e5, 86_400.0, 3),
    ],
)
def test_the_chosen_number_of_nodes_is_the_best_of_all(mtbf_s, repair_s, spares):
    failures = Failures(mtbf_s=mtbf_s, restart_s=60, storage_bytes_per_s=1e9, repair_s=repair_s)
    every = every_advance_s(7, failures)

    plan = find_most_goodput(on_nodes(7), failures)

    choice = plan.search.spares
    assert choice is not None
    assert choice.finished
    assert plan.cluster.nodes == 7 - spares
    assert choice.advance_s == pytest.approx(min(every.values()), rel=1e-5)
    assert choice.bound_s <= min(every.values()) * (1 + 1e-5)
    assert choice.searched < len(every) == 7
    assert choice.failures.spare_nodes == spares


def test_two_nodes_may_divide_sequences_that_one_does_not_and_are_not_left_out():
    def on(nodes: int) -> Request:
        target = TargetOptions(
            model="llama3-8b",
            gpu="h100-80gb",
            gpus=4 * nodes,
            gpus_per_node=4,
            global_batch_size=4,
            seq_length=2048,
        )
        pins = replace(PLAIN, schedule=None, micro_batch_size=(2,))
        return replace(request_of(target), constraints=pins)

    failures = Failures(mtbf_s=4e5, restart_s=60, storage_bytes_per_s=1e10, repair_s=86_400)
    two = DescribedFactory(on(2)).least_step_s() * 8
    assert least_work(on(1)).step < two < DescribedFactory(on(1)).least_step_s() * 4

    choice = find_most_goodput(on(2), failures).search.spares

    assert choice is not None
    assert choice.is_proven
    assert choice.searched == 1
    assert choice.failures.spare_nodes == 0


def test_no_number_of_nodes_here_needs_less_work_than_one():
    work = least_work(on_nodes(1))

    for nodes in (2, 3, 4, 6):
        each = on_nodes(nodes)
        assert DescribedFactory(each).least_step_s() * 2 * nodes >= work.step * (1 - 1e-9)
        assert work.blocks <= work.step


def test_numbers_of_nodes_without_a_plan_are_errors():
    hourly = Failures(mtbf_s=1.0, restart_s=3600, storage_bytes_per_s=1e9, repair_s=1.0)
    with pytest.raises(ConfigError, match="failures leave no number of 2 nodes any time"):
        find_most_goodput(on_nodes(2), hourly)
    with pytest.raises(ConfigError, match="no legal way to use"):
        find_most_goodput(on_nodes(2, Constraints(tp=(64,))), FAILING)
    assert list(legal_meshes(on_nodes(2, Constraints(tp=(64,))))) == []
