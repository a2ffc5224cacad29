"""Products, messages and all-reduces take the stated times, in order."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from benchmarks.executor import artificial_times
from benchmarks.executor.artificial_times import (
    ArtificialTimes,
    Clock,
    DelayedMessages,
    DelayedSums,
)


class VirtualTime:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def virtual(monkeypatch):
    clock = VirtualTime()
    monkeypatch.setattr(artificial_times, "time", clock)
    return clock


@pytest.fixture
def lone_rank(tmp_path):
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


def test_work_takes_its_time_since_the_end_before_and_late_work_is_not_made_up_for(virtual):
    clock = Clock()

    virtual.sleep(1.0)  # other computation, within the time of the product
    clock.work(3.0)
    assert virtual.now_s == 3.0

    virtual.sleep(5.0)  # longer than the product
    clock.work(3.0)
    clock.work(2.0)
    assert virtual.now_s == 3.0 + 5.0 + 2.0

    virtual.sleep(4.0)
    clock.ended()
    clock.work(1.0)
    assert virtual.now_s == 15.0


def test_a_product_takes_its_time_by_its_sequences_forward_and_twice_that_backward(virtual):
    times = ArtificialTimes()
    times.set(
        artificial_times.Seconds(product_s=8.0), artificial_times.Sizes(sequences=4, half_bytes=1)
    )
    weight = torch.ones(3, 3, requires_grad=True)

    out = times._product(lambda x: x @ weight, torch.ones(2, 3, requires_grad=True))
    assert virtual.now_s == 4.0

    out.sum().backward()
    assert virtual.now_s == 12.0
    assert weight.grad.tolist() == [[2.0] * 3] * 3


def test_all_reduces_share_a_link_and_are_waited_for_no_longer_than_they_take(virtual, lone_rank):
    functional = torch.ops._c10d_functional
    clock = Clock()
    with DelayedSums(0.5, clock):  # 4 bytes take 2 seconds
        first = functional.all_reduce(torch.ones(1), "sum", lone_rank)
        second = functional.all_reduce(torch.ones(2), "sum", lone_rank)
        assert virtual.now_s == 0.0

        functional.wait_tensor(first)
        assert virtual.now_s == 2.0
        functional.wait_tensor(second)
        assert virtual.now_s == 6.0

        third = functional.all_reduce(torch.ones(1), "sum", lone_rank)
        clock.work(5.0)  # hides it
        functional.wait_tensor(third)
        assert virtual.now_s == 11.0
        assert third.tolist() == [1.0]


def test_sends_are_posted_in_their_order_and_not_before_their_delay():
    posted = []

    def isend(tensor, **_):
        posted.append((tensor, time.perf_counter()))
        return SimpleNamespace(wait=lambda: None)

    def send(number):
        return SimpleNamespace(op=isend, tensor=number, group=None, tag=0, group_peer=1)

    messages = DelayedMessages(0.02, Clock())
    issued_s, works = [], []
    for number in range(5):
        issued_s.append(time.perf_counter())
        works += messages([send(number)])
    for work in works:
        work.wait()

    assert [number for number, _ in posted] == list(range(5))
    assert all(at_s >= begun_s + 0.02 for (_, at_s), begun_s in zip(posted, issued_s, strict=True))
