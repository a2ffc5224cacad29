"""The line of the summary that says which levels of the network each axis leaves."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from parplan.costmodels.communication.mesh import Mesh
from parplan.profiles.inventory.cluster_draft import tier
from parplan.profiles.machines.machine_catalog import load_cluster
from parplan.report.plans.network_fact import network_facts

LEAF = tier("leaf", 4, 1.0, rails=True, source="made up")
POD = tier("pod", 8, 2.0, rails=False, source="made up")
FLAT = replace(load_cluster("h100-80gb"), nodes=16)


@pytest.mark.parametrize(
    ("mesh", "cluster", "phrases"),
    [
        pytest.param(Mesh(pp=1, dp=16, tp=8), FLAT, [], id="flat"),
        pytest.param(
            Mesh(pp=4, dp=4, tp=8),
            replace(FLAT, tiers=(LEAF, POD)),
            [("network", "tp in a node", "dp across nodes in a leaf, pp across each pod (2:1)")],
            id="tiers",
        ),
        pytest.param(
            Mesh(pp=1, dp=4, tp=2),
            load_cluster("h100-nvl"),
            [("network", "tp in a nvlink-bridge", "dp in a node")],
            id="island",
        ),
    ],
)
def test_each_axis_says_the_smallest_unit_that_holds_its_groups(mesh, cluster, phrases):
    assert list(network_facts(SimpleNamespace(mesh=mesh, cluster=cluster))) == phrases
