"""Pools that would go on from different steps end with one error."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from parplan.executor.pools.joined_ranks import PoolPlace
from parplan.executor.run_plan import require_one_step
from parplan.profiles.errors import ConfigError

PLACE = PoolPlace(sizes=(2, 1, 2), rank=0)


def joined(*steps):
    return SimpleNamespace(place=PLACE, everyone=lambda _: list(steps))


def test_pools_that_read_different_checkpoints_are_refused():
    require_one_step(5, joined(5, 5, 5, 5, 5))

    with pytest.raises(ConfigError, match="pool 0 goes on after step 5, pool 2 after step 0: "):
        require_one_step(5, joined(5, 5, 5, 0, 0))
