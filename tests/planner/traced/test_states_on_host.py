"""A search that may leave the states of a traced module to the hosts finds brute force's choice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.host.offload import Offload
from parplan.costmodels.schedules.schedule import Schedule
from parplan.planner.objective import Objective
from parplan.planner.plan.prediction import Status
from parplan.planner.request import Constraints, SearchOptions
from parplan.planner.search.find_plan import search
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.stack import NEUTRAL
from parplan.profiles.units import MIB
from tests.helpers.cases import mostly_slow
from tests.helpers.planning import find_traced_plan
from tests.planner.traced.test_traced_search import (
    CLUSTER,
    OBJECTIVES,
    check_objectives,
    every_price,
    of_classes,
    searched,
)


@pytest.mark.parametrize("pattern", mostly_slow(["abab", "abc"], {"abc"}))
@pytest.mark.parametrize("share", mostly_slow([0.0, 0.1, 0.4], {0.0, 0.4}))
@pytest.mark.parametrize("host_share", mostly_slow([0.3, 1.0], {0.3}))
def test_every_objective_with_states_on_the_hosts_finds_what_enumeration_finds(
    pattern, share, host_share
):
    """The hosts have room for `host_share` of the way from the least to the most host bytes."""
    training = TrainingSpec(global_batch_size=65536, seq_length=1, stack=NEUTRAL)
    pins = Constraints(
        pp=(2,),
        schedule=(Schedule.ONE_F_ONE_B,),
        micro_batch_size=(8192,),
        zero=(0, 2),
        offload=(Offload.STATES,),
    )
    cluster, sharded = replace(CLUSTER, nodes=1, gpus_per_node=4), of_classes(pattern, scale=16)
    everything = every_price(searched(sharded, pins, training=training, cluster=cluster))
    hosted = sorted({plan.host for plan in everything if plan.host})
    room = round(hosted[0] + host_share * (hosted[-1] - hosted[0]))
    cluster = replace(cluster, host_memory_bytes=4 * room)
    plans = [plan for plan in everything if plan.host <= room]
    peaks = sorted({plan.peak for plan in plans})
    limit = int(peaks[0] + share * (peaks[-1] - peaks[0])) + 1
    options = SearchOptions(memory_limit_bytes=limit, max_slowdown=9.0)
    prices = searched(sharded, pins, options, training=training, cluster=cluster).prices

    found = {objective: search(prices, objective, options) for objective in OBJECTIVES}

    check_objectives(found, [plan for plan in plans if plan.peak <= limit], options)
    assert max(memory.host for memory in found[Objective.PEAK].price.memory) <= room
    if share == 0.0:
        assert found[Objective.THROUGHPUT].strategy.layout.states_on_host


def test_the_memory_objective_holds_no_more_on_a_device_with_the_hosts_than_without():
    training = TrainingSpec(global_batch_size=65536, seq_length=1, stack=NEUTRAL)
    pins = Constraints(
        pp=(2,), schedule=(Schedule.ONE_F_ONE_B,), micro_batch_size=(8192,), zero=(0, 2)
    )
    cluster, sharded = replace(CLUSTER, nodes=1, gpus_per_node=4), of_classes("abc", scale=16)
    options = SearchOptions(max_slowdown=9.0)
    alone = every_price(searched(sharded, pins, training=training, cluster=cluster))
    pins = replace(pins, offload=(Offload.STATES,))
    hosted = every_price(searched(sharded, pins, training=training, cluster=cluster))
    slowest_s = 10 * min(plan.step_s for plan in alone) * (1 + 1e-9)
    redundant = min(plan.redundant for plan in alone if plan.step_s <= slowest_s)
    peak = min(
        plan.peak for plan in alone if plan.step_s <= slowest_s and plan.redundant <= redundant + 1
    )
    expected = min(
        plan.redundant for plan in hosted if plan.step_s <= slowest_s and plan.peak <= peak + MIB
    )

    found = find_traced_plan(
        sharded.model,
        cluster,
        training,
        objective=Objective.MEMORY,
        constraints=pins,
        options=options,
    )

    assert expected < redundant
    assert found.best.value == pytest.approx(expected, rel=1e-6)
    assert max(memory.total for memory in found.price.memory) <= peak + 2 * MIB
    assert found.plan.offload == (Offload.STATES,)
    assert found.plan.search.status is Status.OPTIMAL
