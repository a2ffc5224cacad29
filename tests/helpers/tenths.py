"""A tenth of the slow tests, chosen by a commit, so that the commits run all of them in turns."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import pytest

TENTHS = 10


def chosen_tenth(commit: str) -> int:
    """Returns the tenth that a commit id in hexadecimal chooses, from 0 to 9."""
    return zlib.crc32(commit.encode()) % TENTHS


def tenth_of(test: str, *, starts_processes: bool) -> int:
    """Returns the tenth that a test is in.

    Cases of one test that starts processes are in one tenth, for they share those processes.
    """
    return zlib.crc32((test.partition("[")[0] if starts_processes else test).encode()) % TENTHS


def split(tests: Iterable[pytest.Item], tenth: int) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Returns the tests of a tenth and those that are left out.

    Commands of the README are in every tenth.
    """
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for test in tests:
        own = tenth_of(
            test.nodeid, starts_processes=test.get_closest_marker("multiproc") is not None
        )
        (kept if own == tenth or test.get_closest_marker("readme") else left).append(test)
    return kept, left
