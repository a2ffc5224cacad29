"""The parts of the slow tests are disjoint, about equal, and together all of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers.parts import PARTS, chosen_part, split


def item(name: str, *markers: str) -> pytest.Item:
    return SimpleNamespace(  # type: ignore[return-value]
        nodeid=name,
        path=Path(name.partition("::")[0]),
        get_closest_marker=lambda marker: marker if marker in markers else None,
    )


def test_every_test_is_in_one_part_and_the_parts_are_about_equal():
    tests = [item(f"tests/test_it.py::test_case[{number}]") for number in range(20_000)]
    parts = [split(tests, part) for part in range(PARTS)]

    assert Counter(id(test) for kept, _ in parts for test in kept) == Counter(map(id, tests))
    assert all(len(kept) + len(left) == len(tests) for kept, left in parts)
    assert all(abs(len(kept) - len(tests) / PARTS) < 80 for kept, _ in parts)


def test_tests_that_share_processes_are_in_one_part():
    tests = [item(f"tests/test_it.py::test_world[{number}]") for number in range(50)]
    tests.append(item("tests/test_it.py::test_start", "multiproc"))

    assert sorted(len(split(tests, part)[0]) for part in range(PARTS)) == [0] * (PARTS - 1) + [51]


def test_a_test_may_be_in_every_part():
    command = item("tests/docs/test_it.py::test_command[plan]", "slow", "in_every_part")

    assert all(split([command], part) == ([command], []) for part in range(PARTS))


def test_every_part_is_chosen_by_some_commit_and_a_commit_chooses_the_same_again():
    commits = [f"{number:040x}" for number in range(2000)]

    assert {chosen_part(commit) for commit in commits} == set(range(PARTS))
    assert chosen_part(commits[3]) == chosen_part(commits[3])
