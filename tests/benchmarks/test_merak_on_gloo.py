"""A step of the executor takes what is predicted, to the last digit, on a clock without noise.

The processes and their messages are real. Their clocks are virtual: only stated times move them,
and each message carries the time at which it arrives.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.executor import artificial_times, merak_on_gloo
from benchmarks.executor.artificial_times import Seconds, sleep_until
from benchmarks.executor.merak_on_gloo import (
    SCHEDULES,
    Case,
    layout_of,
    level_cases,
    measure,
    pipeline_cases,
    pipeline_s,
    plan_of,
    planned_order,
    table,
)
from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from tests.benchmarks.test_artificial_times import VirtualTime

pytestmark = pytest.mark.multiproc

PIPELINE = Seconds(product_s=10.0, message_s=7.0)


class VirtualMessages:
    """Messages that are posted at once and arrive `delay_s` later by the sender's clock."""

    def __init__(self, delay_s: float, clock: artificial_times.Clock) -> None:
        self.delay_s = delay_s
        self._clock = clock
        self._count: Counter[tuple[int, int]] = Counter()

    def __call__(self, operations: list[dist.P2POp], desc: str | None = None) -> list[Any]:
        return [self._begun(each) for each in operations]

    def _begun(self, each: dist.P2POp) -> _VirtualWork:
        sends = each.op is dist.isend
        ends = (dist.get_rank(), each.group_peer)
        ends = ends if sends else ends[::-1]
        name = f"{ends} {self._count[ends]}"
        self._count[ends] += 1
        store = dist.distributed_c10d._get_default_store()
        if sends:
            store.set(name, repr(artificial_times.time.perf_counter() + self.delay_s))
        peer = {"group_dst" if sends else "group_src": each.group_peer}
        work = each.op(each.tensor, group=each.group, tag=each.tag, **peer)
        return _VirtualWork(work, name, self._clock)


class _VirtualWork:
    def __init__(self, work: dist.Work, name: str, clock: artificial_times.Clock) -> None:
        self._work = work
        self._name = name
        self._clock = clock

    def wait(self) -> None:
        self._work.wait()
        sleep_until(float(dist.distributed_c10d._get_default_store().get(self._name)))
        self._clock.ended()


@pytest.fixture(autouse=True)
def virtual(monkeypatch):
    """Every process has a clock of its own, because it is forked from this one."""
    clock = VirtualTime()
    monkeypatch.setattr(artificial_times, "time", clock)
    monkeypatch.setattr(merak_on_gloo, "time", clock)
    monkeypatch.setattr(artificial_times, "DelayedMessages", VirtualMessages)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pp", "micro_batches", "sooner"),
    [
        pytest.param(4, 5, {}, id="pp4", marks=pytest.mark.slow),
        # under SCP the inputs of the second and third forward arrive while the last rank still
        # computes, and the simulator charges every receive in full
        pytest.param(2, 4, {"SCP": 1}, id="pp2"),
    ],
)
def test_the_executor_takes_the_simulated_step_in_the_order_of_the_lists(pp, micro_batches, sooner):
    cases = pipeline_cases(pp, micro_batches, PIPELINE)

    runs = measure(cases, rounds=1)

    assert [case.name for case in cases] == list(SCHEDULES)
    for case, run in zip(cases, runs, strict=True):
        assert run.order == planned_order(case.plan), case.name
        hidden_s = sooner.get(case.name, 0) * PIPELINE.message_s
        assert run.step_s == [pytest.approx(case.predicted_s - hidden_s)], case.name


@pytest.mark.slow
def test_gpipe_hides_messages_that_the_simulator_charges_in_full():
    pp, micro_batches = 4, 4
    layout = replace(layout_of(Mesh(pp=pp, dp=1, tp=1), 1, micro_batches), schedule=Schedule.GPIPE)
    plan = plan_of(layout, pp, Recompute.NONE)
    predicted_s = pipeline_s(plan, PIPELINE)
    case = Case(name="GPipe", plan=plan, seconds=PIPELINE, predicted_s=predicted_s)

    (run,) = measure([case], rounds=1)

    hidden_s = 2 * (micro_batches - 1) * PIPELINE.message_s
    assert run.step_s == [pytest.approx(predicted_s - hidden_s)]


@pytest.mark.slow
@pytest.mark.parametrize("sum_s", [4.0, 15.0, 30.0, 50.0], ids="{:.0f} s".format)
def test_every_level_of_sub_pipelining_takes_the_time_of_the_recursion(sum_s):
    cases = level_cases(2, 1, Seconds(product_s=20.0, sum_s=sum_s))

    runs = measure(cases, rounds=1)

    for case, run in zip(cases, runs, strict=True):
        assert run.step_s == [pytest.approx(case.predicted_s)], case.name


def test_the_table_refuses_runs_that_train_differently_or_in_another_order():
    first, *others = pipeline_cases(2, 4, PIPELINE)
    run = merak_on_gloo.Run(step_s=[2.0], loss=1.0, order=planned_order(first.plan))
    second = replace(run, step_s=[1.5], order=planned_order(others[0].plan))

    assert "0.500" in table("pp 2", [first, others[0]], [run, second])
    with pytest.raises(AssertionError, match="train differently"):
        table("pp 2", [first, others[0]], [run, replace(second, loss=2.0)])
    with pytest.raises(AssertionError, match="early recompute ran in another order"):
        table("pp 2", [first, others[0]], [run, replace(second, order=run.order)])
