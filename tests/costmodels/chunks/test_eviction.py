"""Chunk eviction: against the fewest fetches of any choice, and the definition of each policy."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parplan.costmodels.chunks.eviction import Residency, residencies
from parplan.costmodels.host.state_location import Eviction


@st.composite
def sequences(draw, chunks=5, slots=8):
    """By slot what is needed, perhaps nothing, and room for at least that."""
    needs = draw(
        st.lists(
            st.lists(st.integers(0, chunks - 1), unique=True, max_size=3),
            min_size=1,
            max_size=slots,
        )
    )
    room = [len(need) + draw(st.integers(0, 3)) for need in needs]
    return needs, room


def fewest(needs, room):
    """Fetches of the best choice: every set of chunks that may be there is tried."""
    reached = {frozenset(): 0}
    for need, free in zip(needs, room, strict=True):
        fetches = {}
        for there, fetched in reached.items():
            rest, cost = there - set(need), fetched + len(set(need) - there)
            for kept in range(min(len(rest), free - len(need)) + 1):
                for chosen in combinations(sorted(rest), kept):
                    after = frozenset((*need, *chosen))
                    fetches[after] = min(cost, fetches.get(after, cost))
        reached = fetches
    return min(reached.values())


def one_by_one(needs, room, policy, key):
    """Slots of the first and the last use of every stay.

    The chunk with the least `key` goes, among chunks that a slot does not need.
    """
    there = {}
    used = {}
    stays = []
    for slot, (need, free) in enumerate(zip(needs, room, strict=True)):
        while len(set(there) | set(need)) > free:
            victim = min(
                (c for c in there if c not in need), key=lambda c: key(c, slot, there, used, needs)
            )
            stays.append((victim, there.pop(victim), used[victim][0]))
        for chunk in need:
            there.setdefault(chunk, slot)
            used[chunk] = (slot, need.index(chunk))
    return sorted((*stays, *((chunk, first, used[chunk][0]) for chunk, first in there.items())))


@given(sequences())
@settings(max_examples=80, deadline=None)
def test_opt_fetches_as_little_as_any_choice_can_whatever_the_room(case):
    needs, room = case

    assert len(residencies(needs, room, Eviction.OPT)) == fewest(needs, room)


@given(sequences(chunks=12, slots=40))
@settings(max_examples=80, deadline=None)
def test_opt_never_fetches_more_than_lru_or_fifo(case):
    needs, room = case
    fetches = {policy: len(residencies(needs, room, policy)) for policy in Eviction}

    assert fetches[Eviction.OPT] <= min(fetches[Eviction.LRU], fetches[Eviction.FIFO])


@given(sequences(chunks=8, slots=20))
@settings(max_examples=60, deadline=None)
def test_lru_gives_up_what_was_used_longest_ago_and_fifo_what_came_first(case):
    needs, room = case
    keys = {
        Eviction.LRU: lambda chunk, slot, there, used, needs: used[chunk],
        Eviction.FIFO: lambda chunk, slot, there, used, needs: (
            there[chunk],
            needs[there[chunk]].index(chunk),
        ),
    }

    for policy, key in keys.items():
        assert sorted(
            (stay.chunk, stay.first, stay.last) for stay in residencies(needs, room, policy)
        ) == one_by_one(needs, room, policy, key)


@given(sequences(chunks=8, slots=20), st.sampled_from(Eviction), st.booleans())
@settings(max_examples=80, deadline=None)
def test_what_is_needed_is_there_once_and_never_more_than_there_is_room_for(case, policy, forgets):
    needs, room = case
    there = [Counter() for _ in needs]
    for stay in residencies(needs, room, policy, forgets=forgets):
        for slot in range(stay.first, stay.last + 1):
            there[slot][stay.chunk] += 1

    assert all(
        set(need) <= set(present) and max(present.values(), default=1) == 1
        for need, present in zip(needs, there, strict=True)
    )
    assert all(len(present) <= free for present, free in zip(there, room, strict=True))


def test_room_that_shrinks_makes_the_farthest_use_go_first_and_the_others_stay():
    needs, room = [[0], [1], [2], [], [2], [1], [0]], [3, 3, 3, 2, 3, 3, 3]

    assert residencies(needs, room, Eviction.OPT) == (
        Residency(0, 0, 0),
        Residency(1, 1, 5),
        Residency(2, 2, 4),
        Residency(0, 6, 6),
    )
    assert [stay.chunk for stay in residencies(needs, room, Eviction.FIFO)] == [0, 1, 2, 0]
    assert [stay.chunk for stay in residencies(needs, [3, 3, 3, 2, 2, 2, 3], Eviction.LRU)] == [
        0,
        1,
        2,
        0,
    ]


def test_a_chunk_is_given_up_behind_the_use_after_which_it_will_not_be_there():
    assert residencies([[0], [1], [2], [1], [0]], [2] * 5, Eviction.OPT) == (
        Residency(0, 0, 0),
        Residency(1, 1, 3),
        Residency(2, 2, 2),
        Residency(0, 4, 4),
    )


@pytest.mark.parametrize("policy", [Eviction.LRU, Eviction.FIFO])
def test_chunks_that_are_void_after_their_last_use_make_room_at_once(policy):
    needs = [[1], [0], [2], [1]]

    assert len(residencies(needs, [2] * 4, policy)) == 4
    assert len(residencies(needs, [2] * 4, policy, forgets=True)) == 3
