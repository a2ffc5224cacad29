"""Sub-pipelined tensor parallelism: its published table, and an independent event simulation."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Sequence

import pytest

from parplan.costmodels.layers.sub_pipeline import HalfTime, block_s, linear_s, pace_s, row_s
from tests.helpers.cases import mostly_slow

A_HALF_S, M_HALF_S = 3.0, 5.0  # attention and feed-forward, half a micro-batch each
X_S = 2 * (A_HALF_S + M_HALF_S)


def block(c: float, a: float = A_HALF_S, m: float = M_HALF_S, tail: float = 0.0) -> list[HalfTime]:
    return [HalfTime(a, c), HalfTime(m, c), *([HalfTime(tail)] if tail else [])]


def simulated_s(parts: Sequence[HalfTime], blocks: int) -> float:
    """Seconds of two queues, one of compute and one of a sending stream.

    Tasks start in order, each when the task that it waits for is over.
    """
    cuts = [index for index, part in enumerate(parts) if part.sent_s]
    head, tail = parts[: cuts[-1] + 1], sum(part.compute_s for part in parts[cuts[-1] + 1 :])
    row = [
        HalfTime(part.compute_s + (tail if number and not index else 0.0), part.sent_s)
        for number in range(blocks)
        for index, part in enumerate(head)
    ]
    row += [HalfTime(tail)] if tail else []
    order = list(itertools.product(range(len(row)), range(2)))
    queues = {
        "compute": [("compute", *key) for key in order],
        "send": [("send", *key) for key in order if row[key[0]].sent_s],
    }
    wait = {}
    over = set()
    now = 0.0
    running = []
    for k, half in order:
        if k:
            wait["compute", k, half] = ("send" if row[k - 1].sent_s else "compute", k - 1, half)
        wait["send", k, half] = ("compute", k, half)
    busy = set()
    while any(queues.values()) or running:
        for stream, queue in queues.items():
            if stream not in busy and queue and wait.get(queue[0]) in (None, *over):
                task = queue.pop(0)
                seconds = row[task[1]].compute_s if stream == "compute" else row[task[1]].sent_s
                heapq.heappush(running, (now + seconds, task))
                busy.add(stream)
        now, task = heapq.heappop(running)
        over.add(task)
        busy.discard(task[0])
    return now


@pytest.mark.parametrize("c", [0.0, 0.25, 1.0, A_HALF_S])
def test_the_table_of_the_levels_holds_where_an_all_reduce_is_no_longer_than_half_a_part(c):
    parts = block(c)

    assert linear_s(A_HALF_S, c) + linear_s(M_HALF_S, c) == X_S + 2 * c
    assert block_s(parts) == X_S + c
    assert pace_s(parts) == X_S
    assert (
        row_s(parts, 7) == 7 * X_S + c
    )  # the last all-reduce of the last block has nothing to hide under


def test_across_blocks_communication_bounds_the_pace_at_four_all_reduces():
    parts = block(8.0)

    assert pace_s(parts) == 4 * 8.0
    assert row_s(parts, 5) == A_HALF_S + 5 * 4 * 8.0


def test_between_the_bounds_an_uneven_block_waits_for_its_longer_part():
    """A1 takes 1 s, M1 takes 3 s and an all-reduce takes 2 s.

    M2 begins after M1; its all-reduce and that of A1 are sent before the next M1.
    """
    parts = block(2.0, a=1.0, m=3.0)

    assert pace_s(parts) == 2 * 3.0 + 2 * 2.0
    assert pace_s(parts) > max(2 * (1.0 + 3.0), 4 * 2.0)


@pytest.mark.parametrize("seed", mostly_slow(range(40), range(30)))
def test_random_blocks_take_what_two_streams_take(seed):
    draw = random.Random(seed)

    def some() -> float:
        return draw.random() * draw.choice((0.1, 1.0, 4.0))

    parts = [
        *(HalfTime(some(), some()) for _ in range(draw.choice((1, 2, 2, 3)))),
        HalfTime(some() * draw.choice((0, 1))),
    ]
    for blocks in (1, 2, 5):
        assert row_s(parts, blocks) == pytest.approx(simulated_s(parts, blocks), rel=1e-12)
        assert row_s(parts, blocks) == pytest.approx(
            block_s(parts) + (blocks - 1) * pace_s(parts), rel=1e-12
        )


@pytest.mark.parametrize("seed", mostly_slow(range(11), range(10)))
def test_a_higher_level_never_takes_longer_and_no_part_that_takes_longer_speeds_one_up(seed):
    draw = random.Random(seed)
    a, m, c = (draw.random() * draw.choice((0.5, 2.0)) for _ in range(3))
    undivided_s, levels = (
        2 * (a + m) + 4 * c,
        (linear_s(a, c) + linear_s(m, c), block_s(block(c, a, m)), pace_s(block(c, a, m))),
    )

    assert undivided_s >= levels[0] >= levels[1] >= levels[2] >= 2 * max(a + m, 2 * c) * (1 - 1e-12)
    for longer in (block(c * 1.2, a, m), block(c, a * 1.2, m), block(c, a, m * 1.2)):
        assert block_s(longer) >= block_s(block(c, a, m))
        assert pace_s(longer) >= pace_s(block(c, a, m))


def test_without_anything_sent_there_is_only_compute():
    parts = [HalfTime(1.0), HalfTime(2.0)]

    assert (block_s(parts), pace_s(parts), row_s(parts, 3), linear_s(1.0, 0.0)) == (
        6.0,
        6.0,
        18.0,
        2.0,
    )
