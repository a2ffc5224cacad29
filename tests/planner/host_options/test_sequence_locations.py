"""Costs of locations of unlike layers: those of equal blocks where layers are equal, and grids."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from parplan.costmodels.chunks.chunk_layout import first_tensors
from parplan.costmodels.chunks.group_size import common_group_size, group_size_of
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.host.state_location import StateLocation
from parplan.costmodels.price_cache import PriceCache
from parplan.planner.host_options.location_costs import block_costs, location_costs, tensors_of
from parplan.planner.host_options.sequence_locations import (
    MOST_COUNTS,
    sequence_locations,
    tried_counts,
)
from parplan.profiles.machines.machine_catalog import load_cluster
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.operator_graph import LayerKind
from tests.planner.traced.test_traced_search import CLUSTER, FRAME, LLAMA, TRAINING

HOST = (Offload.OPTIMIZER, Offload.PARAMETERS)


@pytest.mark.parametrize("dp", [1, 4])
def test_equal_layers_cost_what_equal_blocks_do(dp):
    layout = replace(FRAME, chunked=True, mesh=replace(FRAME.mesh, dp=dp))
    prices = PriceCache(LLAMA, TRAINING, machine_for(CLUSTER))
    costs = block_costs(layout, layout.sharding, HOST, prices)
    tensors = tensors_of(layout.sharding, prices)

    blocks = location_costs(tensors, 4, layout, costs, prices)
    layers = sequence_locations([LayerKind.BLOCK] * 4, layout, HOST, prices)

    assert np.array_equal(layers.host, blocks.host)
    assert np.array_equal(layers.optimizer, blocks.optimizer)
    for name in ("always_bytes", "host_bytes", "fetch_s", "send_s", "added_s", "once_s"):
        np.testing.assert_allclose(getattr(layers, name), getattr(blocks, name), rtol=1e-6)
    assert (layers.working_bytes <= blocks.working_bytes * (1 + 1e-12)).all()


def test_few_layers_have_all_counts_and_many_have_those_of_a_grid():
    host, optimizer = tried_counts(MOST_COUNTS - 1, StateLocation)
    assert len(host) == MOST_COUNTS * (MOST_COUNTS + 1) // 2

    host, optimizer = tried_counts(100, StateLocation)

    assert len(set(host.tolist())) == MOST_COUNTS
    assert {(0, 0), (100, 0), (0, 100)} <= set(zip(host.tolist(), optimizer.tolist(), strict=True))
    assert all(100 - each in optimizer[host == each] for each in set(host.tolist()))


@pytest.mark.parametrize("ranks", [1, 4])
def test_groups_of_unlike_layers_hold_every_tensor_with_little_padding(ranks):
    cluster = load_cluster("v100-32gb")
    attention, mlp = (3 * 4096**2, 4096**2), (4 * 4096**2, 4 * 4096**2)

    size = common_group_size([attention, mlp] * 3, ranks, cluster)

    assert size == 4 * 4096**2
    assert [len(first_tensors(each, 1, size)) for each in (attention, mlp)] == [1, 2]
    alike = common_group_size([mlp] * 3, ranks, cluster)
    assert alike == group_size_of(mlp, 3, ranks, cluster)
