from __future__ import annotations

from itertools import pairwise

import pytest

from parplan.executor.data.shuffle import shuffled_item


@pytest.mark.parametrize("num", [1, 2, 3, 4, 5, 16, 17, 64, 65, 1000])
def test_every_thing_comes_once(num):
    for epoch in range(2):
        assert sorted(
            shuffled_item(place, num, seed=3, epoch=epoch) for place in range(num)
        ) == list(range(num))


def test_seeds_and_epochs_have_orders_of_their_own():
    orders = {
        tuple(shuffled_item(place, 100, seed=seed, epoch=epoch) for place in range(100))
        for seed in range(3)
        for epoch in range(3)
    }

    assert len(orders) == 9


def test_an_order_looks_random():
    num = 4096
    order = [shuffled_item(place, num, seed=0, epoch=0) for place in range(num)]
    mean = (num - 1) / 2
    # for a random order the correlation of place and thing, and of neighbours, is 0 with a
    # deviation of 1 / sqrt(num) = 0.016
    spread = sum((place - mean) ** 2 for place in range(num))
    by_place = sum((place - mean) * (thing - mean) for place, thing in enumerate(order)) / spread
    by_neighbour = sum((a - mean) * (b - mean) for a, b in pairwise(order)) / spread

    assert abs(by_place) < 0.06
    assert abs(by_neighbour) < 0.06
    assert sum(place == thing for place, thing in enumerate(order)) < 8  # one on average


def test_a_trillion_things_need_no_list():
    num = 10**12
    actual = {shuffled_item(place, num, seed=1, epoch=0) for place in range(1000)}

    assert len(actual) == 1000
    assert max(actual) < num
    assert min(actual) < num // 100 < num - num // 100 < max(actual)
