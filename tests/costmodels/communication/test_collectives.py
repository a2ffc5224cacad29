"""Collectives: textbook forms by hand, limits, placements on nodes, and measured curves."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parplan.costmodels.communication.collectives import (
    Collective,
    all_reduce_s,
    collective_time,
    exchange_once_time,
    group_nic_bytes_per_s,
    pairwise_all_to_all_s,
    point_to_point_time,
    ring_all_gather_s,
    ring_all_reduce_s,
    send_s,
    tree_all_reduce_s,
)
from parplan.costmodels.communication.mesh import Placement
from parplan.profiles.machines.curves import CollectiveCurve
from parplan.profiles.machines.hardware import Link
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.machines.shipped_profiles import Machine, machine_for
from parplan.profiles.provenance import ZERO, Kind

LINK = Link(name="made up", latency_s=1e-6, bytes_per_s=100e9, source="made up")
A100 = machine_for(replace(load_cluster("a100-80gb"), nodes=16))
CPU = machine_for(replace(load_cluster("cpu"), nodes=4))
NODE = Placement(nodes=1, ranks_per_node=8, groups_per_node=1)
EVERY = pytest.mark.parametrize("collective", list(Collective))


@pytest.mark.parametrize(
    ("price", "p", "n_bytes", "expected_s"),
    [
        pytest.param(ring_all_reduce_s, 1, 10**9, 0.0, id="all-reduce-of-one-rank-is-free"),
        pytest.param(
            ring_all_reduce_s, 2, 10**8, 2e-6 + 1e-3, id="all-reduce-of-two"
        ),  # 2 (2-1) (1us + 1e8 / (2 100e9))
        pytest.param(ring_all_reduce_s, 4, 0, 6e-6, id="all-reduce-of-nothing-is-latency"),
        pytest.param(ring_all_gather_s, 1, 10**9, 0.0, id="all-gather-of-one-rank-is-free"),
        pytest.param(
            ring_all_gather_s, 4, 4 * 10**8, 3e-6 + 3e-3, id="all-gather-of-four"
        ),  # 3 (1us + 4e8 / (4 100e9))
        pytest.param(pairwise_all_to_all_s, 1, 10**9, 0.0, id="all-to-all-of-one-rank-is-free"),
        pytest.param(pairwise_all_to_all_s, 2, 10**8, 1e-6 + 5e-4, id="all-to-all-of-two"),
        pytest.param(tree_all_reduce_s, 1, 10**9, 0.0, id="tree-of-one-rank-is-free"),
        pytest.param(
            tree_all_reduce_s, 8, 10**8, 6e-6 + 2e-3, id="tree-of-eight"
        ),  # 2 log2(8) us + 2 1e8 / 100e9
        pytest.param(tree_all_reduce_s, 9, 0, 8e-6, id="tree-of-nine-has-four-levels"),
        pytest.param(all_reduce_s, 64, 0, 12e-6, id="small-messages-go-up-a-tree"),
        pytest.param(
            all_reduce_s, 64, 64 * 10**9, 126 * (1e-6 + 1e-2), id="large-messages-go-round-a-ring"
        ),
    ],
)
def test_textbook_form_by_hand(price, p, n_bytes, expected_s):
    assert price(n_bytes, p, LINK) == pytest.approx(expected_s, rel=1e-12)


def test_one_message_by_hand():
    assert send_s(10**8, LINK) == pytest.approx(1e-6 + 1e-3, rel=1e-12)


@EVERY
@pytest.mark.parametrize("machine", [pytest.param(A100, id="a100"), pytest.param(CPU, id="cpu")])
def test_a_group_of_one_rank_costs_exactly_nothing(collective, machine):
    assert (
        collective_time(
            collective, 10**9, Placement(nodes=1, ranks_per_node=1, groups_per_node=1), machine
        )
        == ZERO
    )


@EVERY
@given(
    n_bytes=st.integers(0, 2**34),
    nodes=st.sampled_from((1, 2, 4, 16)),
    ranks=st.sampled_from((1, 2, 3, 4, 8)),
)
def test_more_bytes_never_take_less_time(collective, n_bytes, nodes, ranks):
    placement = Placement(
        nodes=nodes, ranks_per_node=ranks, groups_per_node=8 // ranks if nodes > 1 else 1
    )
    less = collective_time(collective, n_bytes, placement, A100).value_s
    more = collective_time(collective, 2 * n_bytes + 1, placement, A100).value_s

    assert 0 <= less <= more * (1 + 1e-12)


@EVERY
def test_a_measured_curve_interpolates_inside_its_range_only(collective):
    assert collective_time(collective, 2**24, NODE, A100).kind is Kind.INTERPOLATED
    assert collective_time(collective, 2**40, NODE, A100).kind is Kind.ANALYTIC
    assert (
        collective_time(
            collective, 2**24, Placement(nodes=2, ranks_per_node=8, groups_per_node=1), A100
        ).kind
        is Kind.ANALYTIC
    )
    assert (
        collective_time(
            collective, 2**24, Placement(nodes=1, ranks_per_node=2, groups_per_node=1), CPU
        ).kind
        is Kind.ANALYTIC
    )


def test_three_ranks_lie_between_two_and_four():
    two, three, four = (
        collective_time(
            Collective.ALL_REDUCE,
            2**26,
            Placement(nodes=1, ranks_per_node=r, groups_per_node=1),
            A100,
        )
        for r in (2, 3, 4)
    )

    assert two.value_s < three.value_s < four.value_s
    assert three.kind is Kind.INTERPOLATED


def test_beyond_the_last_curve_latency_grows_by_steps_and_bytes_as_those_that_leave_a_rank():
    gb200 = machine_for(with_gpus(load_cluster("gb200-186gb"), 64, 64))
    four, all_ranks = (
        Placement(nodes=1, ranks_per_node=ranks, groups_per_node=1) for ranks in (4, 64)
    )

    def seconds(n_bytes, placement):
        return collective_time(Collective.ALL_TO_ALL, n_bytes, placement, gb200).value_s

    assert seconds(512, all_ranks) == pytest.approx(3 * seconds(512, four))  # log2 64 / log2 4
    latency_s, moved_s = seconds(512, four), seconds(2**29, four) - seconds(512, four)
    expected_s = 3 * latency_s + moved_s * (63 / 64) / (3 / 4)
    assert seconds(2**29, all_ranks) == pytest.approx(expected_s)


# Rows of collectives.csv of the measurements: ai-dynamo/aiconfigurator (Apache-2.0), nccl-tests, 8
# GPUs of one node, us.
@pytest.mark.parametrize(
    ("device", "n_bytes", "time_us"),
    [
        pytest.param("a100-80gb", 2**24, 216.5, id="a100-16-mib"),
        pytest.param("a100-80gb", 2**28, 2182.5, id="a100-256-mib"),
        pytest.param("h100-80gb", 2**24, 121.91, id="h100-16-mib"),
        pytest.param("h100-80gb", 2**28, 1092.1, id="h100-256-mib"),
    ],
)
def test_all_reduce_in_a_node_is_within_a_tenth_of_published_times(device, n_bytes, time_us):
    machine = machine_for(load_cluster(device))

    assert collective_time(
        Collective.ALL_REDUCE, n_bytes, NODE, machine
    ).value_s * 1e6 == pytest.approx(time_us, rel=0.10)


def test_eight_groups_that_cross_share_the_nics_of_a_node():
    share = A100.profile.inter.nic_share
    alone = Placement(nodes=4, ranks_per_node=8, groups_per_node=1)
    together = Placement(nodes=4, ranks_per_node=1, groups_per_node=8)

    assert group_nic_bytes_per_s(alone, A100) == pytest.approx(
        200e9 * share
    )  # all 8 NICs of 25 GB/s
    assert group_nic_bytes_per_s(together, A100) == pytest.approx(25e9 * share)  # one NIC each


def test_one_rank_a_node_does_not_reach_the_other_ranks_nics():
    lonely = Placement(nodes=4, ranks_per_node=1, groups_per_node=1)

    assert group_nic_bytes_per_s(lonely, A100) == pytest.approx(25e9 * A100.profile.inter.nic_share)


def test_across_nodes_the_ring_is_as_slow_as_its_nics():
    placement = Placement(nodes=4, ranks_per_node=1, groups_per_node=8)
    wire_s = 2 * 10**10 * 3 / 4 / (25e9 * A100.profile.inter.nic_share)

    expected_s = wire_s + 6 * A100.cluster.nic.latency_s  # 2 (4 - 1) hops
    assert collective_time(Collective.ALL_REDUCE, 10**10, placement, A100).value_s == pytest.approx(
        expected_s, rel=1e-12
    )
    gathered_s = wire_s / 2 + 3 * A100.cluster.nic.latency_s
    assert collective_time(Collective.ALL_GATHER, 10**10, placement, A100).value_s == pytest.approx(
        gathered_s, rel=1e-12
    )


def test_a_ring_over_whole_nodes_passes_every_rank_of_them():
    placement = Placement(nodes=64, ranks_per_node=8, groups_per_node=1)
    cluster = A100.cluster
    nearly_nothing = collective_time(Collective.ALL_GATHER, 512, placement, A100).value_s
    inside_s = collective_time(Collective.ALL_GATHER, 512, NODE, A100).value_s

    hops_s = 63 * cluster.nic.latency_s + 63 * 7 * cluster.intra_node.latency_s
    assert nearly_nothing == pytest.approx(inside_s + hops_s, rel=1e-3)


def test_across_nodes_a_part_inside_the_node_that_is_slower_decides():
    slow = replace(A100.cluster, nic=replace(A100.cluster.nic, bytes_per_s=1e12))
    placement = Placement(nodes=2, ranks_per_node=8, groups_per_node=1)
    inside_s = collective_time(Collective.ALL_REDUCE, 2**28, NODE, A100).value_s

    assert (
        collective_time(Collective.ALL_REDUCE, 2**28, placement, machine_for(slow)).value_s
        >= inside_s
    )


def test_all_to_all_sends_what_belongs_to_other_nodes_through_the_nics():
    placement = Placement(nodes=4, ranks_per_node=8, groups_per_node=1)
    wire_s = 8 * 10**9 * 3 / 4 / (200e9 * A100.profile.inter.nic_share)

    expected_s = wire_s + 3 * A100.cluster.nic.latency_s
    assert collective_time(Collective.ALL_TO_ALL, 10**9, placement, A100).value_s == pytest.approx(
        expected_s, rel=1e-12
    )


def test_tokens_sent_once_leave_a_node_once_for_each_node_with_one_of_their_experts():
    placement = Placement(nodes=2, ranks_per_node=8, groups_per_node=1)
    copies, token_bytes = 8, 10**9
    once = exchange_once_time(copies * token_bytes, copies, placement, A100)
    to_nodes = 2 * (1 - 0.5**8) * token_bytes
    wire_s = 8 * to_nodes / 2 / (200e9 * A100.profile.inter.nic_share)

    assert once.value_s == pytest.approx(wire_s + A100.cluster.nic.latency_s)
    every_copy = collective_time(Collective.ALL_TO_ALL, copies * token_bytes, placement, A100)
    assert once.value_s < every_copy.value_s / 3


def test_in_a_node_tokens_sent_once_go_to_each_rank_with_one_of_their_experts():
    to_ranks = 8 * (1 - (7 / 8) ** 6) * 10**7
    once = exchange_once_time(6 * 10**7, 6, NODE, A100)

    assert once == collective_time(Collective.ALL_TO_ALL, to_ranks, NODE, A100)
    one_rank = Placement(nodes=1, ranks_per_node=1, groups_per_node=1)
    assert exchange_once_time(6 * 10**7, 6, one_rank, A100) == ZERO


def test_messages_between_nodes_share_the_nics_only_when_there_are_more_than_nics():
    few = Machine(replace(A100.cluster, nics_per_node=4), A100.profile)

    def wire_s(sharing, machine):
        message = point_to_point_time(10**9, level=1, sharing=sharing, machine=machine)
        return message.value_s - machine.cluster.nic.latency_s

    assert wire_s(8, A100) == pytest.approx(wire_s(1, A100))
    assert wire_s(4, few) == pytest.approx(wire_s(1, few))
    assert wire_s(8, few) == pytest.approx(2 * wire_s(4, few))
    assert wire_s(64, few) == pytest.approx(wire_s(8, few))  # a node has no more ranks that send


def test_a_message_of_nothing_is_latency_only():
    between = point_to_point_time(0, level=1, sharing=8, machine=A100)
    inside = point_to_point_time(0, level=0, sharing=1, machine=A100)

    assert between.value_s == A100.cluster.nic.latency_s
    assert inside.value_s == A100.cluster.intra_node.latency_s
    assert inside.kind is Kind.INTERPOLATED


def own(*curves):
    """A100 nodes whose profile has these curves.

    A curve is (collective, nodes, ranks per node, groups at once, time factor).
    """
    made = [
        CollectiveCurve(
            collective=name,
            nodes=nodes,
            ranks=ranks,
            groups=groups,
            bytes=(2**10, 2**20, 2**30),
            rows=3,
            median_error=0.01,
            time_us=(20.0 * factor, 50.0 * factor, 9000.0 * factor),
        )
        for name, nodes, ranks, groups, factor in curves
    ]
    profile = A100.profile
    return Machine(
        A100.cluster,
        replace(
            profile,
            intra=replace(
                profile.intra,
                kind=Kind.MEASURED,
                curves=tuple(curve for curve in made if curve.nodes == 1),
            ),
            inter=replace(
                profile.inter,
                node_bytes_per_s=A100.cluster.node_bytes_per_s,
                crossing=tuple(curve for curve in made if curve.nodes > 1),
            ),
        ),
    )


@EVERY
@given(n_bytes=st.integers(1, 2**34))
def test_a_measured_placement_costs_more_with_more_bytes_and_is_measured_at_its_knots_alone(
    collective, n_bytes
):
    machine, placement = (
        own((collective, 4, 2, 4, 1.0)),
        Placement(nodes=4, ranks_per_node=2, groups_per_node=4),
    )
    less = collective_time(collective, n_bytes, placement, machine)
    more = collective_time(collective, 2 * n_bytes, placement, machine)

    assert 0 < less.value_s <= more.value_s * (1 + 1e-12)
    assert (less.kind is Kind.MEASURED) is (n_bytes in (2**10, 2**20, 2**30))
    assert (less.kind is Kind.ANALYTIC) is not (2**10 <= n_bytes <= 2**30)


def test_a_curve_prices_no_other_placement_across_nodes():
    machine = own((Collective.ALL_REDUCE, 4, 2, 4, 1000.0))
    rest = (
        Placement(nodes=2, ranks_per_node=2, groups_per_node=4),
        Placement(nodes=4, ranks_per_node=1, groups_per_node=8),
        Placement(nodes=4, ranks_per_node=2, groups_per_node=1),
    )

    for placement in rest:
        assert (
            collective_time(Collective.ALL_REDUCE, 2**20, placement, machine).kind is Kind.ANALYTIC
        )
        assert collective_time(Collective.ALL_REDUCE, 2**20, placement, machine).value_s < 1e-2


def test_a_curve_prices_no_other_collective():
    machine = own((Collective.ALL_REDUCE, 1, 8, 1, 1.0))

    assert collective_time(Collective.ALL_GATHER, 2**20, NODE, machine).kind is Kind.ANALYTIC


def test_inside_a_node_a_group_is_priced_among_all_that_the_node_holds():
    machine = own((Collective.ALL_REDUCE, 1, 4, 1, 1.0), (Collective.ALL_REDUCE, 1, 4, 2, 3.0))
    priced = collective_time(
        Collective.ALL_REDUCE,
        2**20,
        Placement(nodes=1, ranks_per_node=4, groups_per_node=1),
        machine,
    )

    assert priced.value_s == pytest.approx(150e-6)


def test_a_measured_message_is_priced_by_how_many_leave_the_node_at_once():
    machine = own(("point_to_point", 2, 1, 1, 1.0), ("point_to_point", 2, 1, 8, 2.0))

    assert point_to_point_time(2**20, level=1, sharing=1, machine=machine).value_s == pytest.approx(
        50e-6
    )
    assert point_to_point_time(2**20, level=1, sharing=8, machine=machine).value_s == pytest.approx(
        100e-6
    )
    assert point_to_point_time(2**20, level=1, sharing=4, machine=machine).kind is Kind.ANALYTIC


@pytest.mark.parametrize("machine", [pytest.param(A100, id="a100"), pytest.param(CPU, id="cpu")])
def test_a_shipped_profile_prices_no_placement_as_measured(machine):
    assert not machine.placed_curves
