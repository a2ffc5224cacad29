"""A fixture that counts the bytes of priced collectives."""

from __future__ import annotations

import pytest

from parplan.costmodels.communication.collectives import Collective
from parplan.costmodels.keyed_cache import KeyedCache
from parplan.profiles.provenance import ZERO, Kind, Seconds


@pytest.fixture
def volumes(monkeypatch):
    """Makes collectives take one second a byte; returns the list of priced ones and their bytes."""
    seen = []

    def one_second_a_byte(collective, n_bytes, placement, machine):
        p = placement.num_ranks
        if p == 1:
            return ZERO
        seen.append((collective, n_bytes))
        return Seconds(
            (2 if collective is Collective.ALL_REDUCE else 1) * (p - 1) / p * n_bytes, Kind.ANALYTIC
        )

    for name in ("layers.layer_price", "layers.data_parallel", "communication.redistribution"):
        monkeypatch.setattr(f"parplan.costmodels.{name}.collective_time", one_second_a_byte)
    monkeypatch.setattr(KeyedCache, "__call__", lambda _, key, make: make())  # counts repeats
    return seen
