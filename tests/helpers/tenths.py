"""A tenth of the slow tests, chosen by a commit, so that the commits run all of them in turns."""

from __future__ import annotations

import zlib
from collections.abc import Collection

import pytest

TENTHS = 10


def chosen_tenth(commit: str) -> int:
    """Returns the tenth that a commit id chooses, from 0 to 9."""
    return zlib.crc32(commit.encode()) % TENTHS


def split(
    tests: Collection[pytest.Item], tenth: int
) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Returns the tests of a tenth and those that are left out.

    A file that starts processes is in one tenth, for its tests share them. What is marked
    `in_every_tenth` is kept.
    """
    whole = {test.path for test in tests if test.get_closest_marker("multiproc")}
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for test in tests:
        name = test.nodeid.partition("::")[0] if test.path in whole else test.nodeid
        chosen = zlib.crc32(name.encode()) % TENTHS == tenth
        (kept if chosen or test.get_closest_marker("in_every_tenth") else left).append(test)
    return kept, left
