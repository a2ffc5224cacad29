"""A fiftieth of the slow tests, chosen by a commit: the commits run all of them in turns."""

from __future__ import annotations

import zlib
from collections.abc import Collection

import pytest

PARTS = 50


def chosen_part(commit: str) -> int:
    """Returns the part that a commit id chooses, from 0 to 49."""
    return zlib.crc32(commit.encode()) % PARTS


def split(tests: Collection[pytest.Item], part: int) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Returns the tests of a part and those that are left out.

    A file that starts processes is in one part, for its tests share them. What is marked
    `in_every_part` is kept.
    """
    whole = {test.path for test in tests if test.get_closest_marker("multiproc")}
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for test in tests:
        name = test.nodeid.partition("::")[0] if test.path in whole else test.nodeid
        chosen = zlib.crc32(name.encode()) % PARTS == part
        (kept if chosen or test.get_closest_marker("in_every_part") else left).append(test)
    return kept, left
