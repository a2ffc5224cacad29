"""Caches compute a result once, or hold only the last of them."""

from __future__ import annotations

from parplan.costmodels.keyed_cache import KeyedCache, RecentCache


def test_a_result_is_computed_once():
    made: list[str] = []
    once = KeyedCache()

    assert [once("a", lambda: made.append("a")) for _ in range(3)] == [None] * 3
    assert made == ["a"]


def test_a_recent_cache_drops_the_result_that_was_asked_for_longest_ago():
    made: list[str] = []
    recent = RecentCache(2)

    def ask(key):
        return recent(key, lambda: made.append(key) or key)

    assert [ask(key) for key in "abacab"] == list("abacab")
    assert made == ["a", "b", "c", "b"]
    assert len(recent) == 2
