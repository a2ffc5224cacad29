"""Factors: axes as products of indices that are split and joined."""

from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from parplan.profiles.tracing.factors import Factors


def test_a_view_splits_an_index_for_all_axes_that_run_over_it():
    factors = Factors()
    features = factors.new(12)

    heads, size = factors.cut(features, (3, 4))

    assert factors.leaves(features) == (*heads, *size)
    assert [factors.extent(axis) for axis in (heads, size)] == [3, 4]


def test_indices_that_are_read_as_one_are_one():
    factors = Factors()
    features, other = factors.new(12), factors.new(12)
    heads, _ = factors.cut(features, (3, 4))

    assert factors.join(other, features)
    assert factors.leaves(other) == factors.leaves(features)
    assert factors.cut(other, (3, 4))[0] == heads


def test_grouped_heads_are_the_heads_of_keys_and_their_number():
    factors = Factors()
    queries, keys, group = factors.new(8), factors.new(2), factors.new(4)

    assert factors.join(queries, (*keys, *group))
    assert factors.leaves(queries) == (*keys, *group)


def test_axes_whose_factors_do_not_match_are_told():
    factors = Factors()
    six, four = factors.new(6), factors.new(4)

    assert not factors.join(six, four)
    assert factors.cut(six, (4, 3)) is None
    assert factors.new(1) == ()


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.data())
def test_a_cut_has_the_sizes_and_all_factors_in_order(sizes, data):
    factors = Factors()
    axis = tuple(factor for size in sizes for factor in factors.new(size))
    ends = data.draw(st.lists(st.integers(0, len(sizes)), max_size=3).map(sorted))
    bounds = [0, *ends, len(sizes)]
    wanted = [math.prod(sizes[first:end]) for first, end in pairwise(bounds)]

    pieces = factors.cut(axis, wanted)

    assert [factors.extent(piece) for piece in pieces] == wanted
    assert factors.leaves(factor for piece in pieces for factor in piece) == factors.leaves(axis)
