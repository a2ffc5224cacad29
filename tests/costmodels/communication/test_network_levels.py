"""Prices on networks with islands, meshes, oversubscribed tiers: by hand, and unlike flat ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.communication.collectives import (
    Collective,
    collective_time,
    point_to_point_time,
)
from parplan.costmodels.communication.mesh import (
    Axis,
    Mesh,
    MeshOrder,
    distinct_orders,
    place,
    place_axis,
    units_crossed,
)
from parplan.profiles.machines.hardware import Island, Link, Tier
from parplan.profiles.machines.machine_catalog import load_cluster
from parplan.profiles.machines.shipped_profiles import machine_for

FLAT = replace(load_cluster("a100-80gb"), nodes=16)
N_BYTES = 2**30


def leaf(nodes=4, oversubscription=4.0, latency_s=0.0):
    return Tier(
        name="leaf",
        nodes=nodes,
        oversubscription=oversubscription,
        latency_s=latency_s,
        rails=False,
        source="made up",
    )


def tiered(*tiers):
    return machine_for(replace(FLAT, tiers=tiers))


def seconds(machine, collective, degree, stride, ranks=128):
    where = place_axis(degree, stride, ranks, machine.cluster.gpus_per_node)
    return collective_time(collective, N_BYTES, where, machine).value_s


@pytest.mark.parametrize("collective", list(Collective))
def test_a_tier_with_as_much_bandwidth_upwards_and_no_latency_changes_nothing(collective):
    full = tiered(leaf(oversubscription=1.0))
    for degree, stride in ((128, 1), (16, 8), (4, 32), (8, 1), (2, 64)):
        assert seconds(full, collective, degree, stride) == pytest.approx(
            seconds(machine_for(FLAT), collective, degree, stride), rel=1e-12
        )


def test_a_group_with_one_node_in_a_leaf_pays_the_whole_oversubscription_and_with_four_none():
    """4 nodes of a leaf send 4 x 200 GB/s through 200 GB/s of uplinks.

    A leaf has 4 of 16 ranks at a distance of 8, which send once for the four of them, and one of 4
    ranks at a distance of 32.
    """
    flat, narrow = machine_for(FLAT), tiered(leaf())

    near = [seconds(machine, Collective.ALL_GATHER, 16, 8) for machine in (flat, narrow)]
    apart = [seconds(machine, Collective.ALL_GATHER, 4, 32) for machine in (flat, narrow)]

    assert near[1] == pytest.approx(near[0], rel=1e-9)
    wire_s = apart[0] - 3 * FLAT.nic.latency_s
    assert apart[1] == pytest.approx(4 * wire_s + 3 * FLAT.nic.latency_s, rel=1e-9)


def test_an_all_to_all_sends_most_of_its_bytes_out_of_a_leaf():
    """One rank a node: 15/16 n leave a node at 25 GB/s, 12/16 of 4 n leave a leaf at 4 x 25/4."""
    machine = tiered(leaf())
    share = machine.profile.inter.nic_share

    found = seconds(machine, Collective.ALL_TO_ALL, 16, 8)

    assert found == pytest.approx(
        4 * N_BYTES * (12 / 16) / (25e9 * share) + 15 * FLAT.nic.latency_s, rel=1e-9
    )


def test_leaving_a_unit_adds_its_latency_once_a_hop_between_units():
    slow = tiered(leaf(oversubscription=1.0, latency_s=1e-3))

    added_s = seconds(slow, Collective.ALL_GATHER, 16, 8) - seconds(
        machine_for(FLAT), Collective.ALL_GATHER, 16, 8
    )

    assert added_s == pytest.approx(3e-3)
    assert seconds(slow, Collective.ALL_GATHER, 4, 8) == seconds(
        machine_for(FLAT), Collective.ALL_GATHER, 4, 8
    )


def test_a_message_that_leaves_a_leaf_has_its_part_of_the_uplinks():
    """32 ranks of a leaf that all send share 200 GB/s of uplinks: 6.25 GB/s each instead of 25."""
    machine = tiered(leaf(latency_s=5e-6))
    share = machine.profile.inter.point_to_point_share

    near = point_to_point_time(10**9, level=1, sharing=32, machine=machine).value_s
    far = point_to_point_time(10**9, level=2, sharing=32, machine=machine).value_s
    alone = point_to_point_time(10**9, level=2, sharing=1, machine=machine).value_s

    assert near == pytest.approx(4e-6 + 1 / (25 * share))
    assert far == pytest.approx(9e-6 + 1 / (6.25 * share))
    assert alone == pytest.approx(9e-6 + 1 / (25 * share))


def test_the_levels_that_a_message_leaves_are_counted_from_the_node_outwards():
    mesh = Mesh(pp=8, dp=4, tp=4)  # a stage has 16 ranks: two nodes of 8, half a leaf of 32

    crossed = [int(units_crossed(mesh, here, here + 1, (8, 32, 64))) for here in range(7)]

    assert crossed == [1, 2, 1, 3, 1, 2, 1]


def test_orders_that_lie_alike_on_nodes_are_told_apart_by_their_leaves():
    """With 8 ranks a stage every axis but tp crosses nodes in both orders."""
    orders = (MeshOrder.PP_DP_TP, MeshOrder.DP_PP_TP)
    mesh = Mesh(pp=4, dp=4, tp=8)

    assert len(distinct_orders(mesh, orders, (8,))) == 1
    assert len(distinct_orders(mesh, orders, (8, 32))) == 2


def test_ranks_inside_an_island_have_its_link_and_those_between_islands_the_nodes():
    bridge = Link(name="bridge", bytes_per_s=300e9, latency_s=0.0, source="made up")
    pcie = Link(name="pcie4", bytes_per_s=30e9, latency_s=0.0, source="made up")
    machine = machine_for(
        replace(
            load_cluster("rtx3090-24gb"),
            intra_node=pcie,
            gpus_per_node=8,
            islands=(Island(gpus=2, link=bridge),),
        )
    )
    share = machine.profile.intra.link_share

    def all_gather_s(degree, stride):
        where = place_axis(degree, stride, 8, 8)
        return collective_time(Collective.ALL_GATHER, N_BYTES, where, machine).value_s

    assert all_gather_s(2, 1) == pytest.approx(N_BYTES / 2 / 300e9 / share)
    assert all_gather_s(2, 2) == pytest.approx(N_BYTES / 2 / 30e9 / share)
    assert all_gather_s(4, 1) == pytest.approx(N_BYTES * 3 / 4 / 30e9 / share)


def test_two_gpus_of_a_mesh_have_one_wire_and_all_of_them_all_wires():
    """MI300X: 7 wires of 64 GB/s a GPU, one to each other one."""
    machine = machine_for(load_cluster("mi300x"))
    share = machine.profile.intra.link_share

    def wire_s(ranks):
        where = place(Mesh(pp=1, dp=1, tp=ranks), Axis.TP, 8)
        found = collective_time(Collective.ALL_GATHER, N_BYTES, where, machine).value_s
        return found - (ranks - 1) * machine.cluster.intra_node.latency_s

    assert wire_s(2) == pytest.approx(N_BYTES / 2 / (64e9 * share))
    assert wire_s(4) == pytest.approx(N_BYTES * 3 / 4 / (3 * 64e9 * share))
    assert wire_s(8) == pytest.approx(N_BYTES * 7 / 8 / (7 * 64e9 * share))
