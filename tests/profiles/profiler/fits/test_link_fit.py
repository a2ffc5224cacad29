"""Curves of communication records: knots, link shares by hand, contention, and prices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.communication.collectives import (
    Collective,
    collective_time,
    point_to_point_time,
)
from parplan.costmodels.communication.mesh import Placement
from parplan.profiles.documents.schema import document, parse
from parplan.profiles.machines.machine_catalog import load_cluster
from parplan.profiles.machines.measurements import Case, CaseFigures, CaseOutcome, Record, Timing
from parplan.profiles.machines.shipped_profiles import Machine, machine_for
from parplan.profiles.machines.speeds import Profile
from parplan.profiles.profiler.communication.comm_cases import timed_case
from parplan.profiles.profiler.communication.group_shapes import Shape
from parplan.profiles.profiler.fits.link_fit import contention_of, curves_of, links_of
from parplan.profiles.provenance import Kind

CLUSTER = replace(
    load_cluster("a100-80gb"), nodes=2
)  # 8 GPUs and 8 NICs of 25 GB/s a node, 300 GB/s inside it


def record(work, n_bytes, time_us, nodes, ranks, groups, spread=0.02):
    case = timed_case(
        work, n_bytes, Shape(nodes=nodes, ranks_per_node=ranks, groups=groups), "bf16"
    )
    return Record(
        case=case,
        outcome=CaseOutcome.MEASURED,
        measured=CaseFigures(times={"time": Timing(median_us=time_us, spread=spread, repeats=9)}),
    )


def overlap(compute_s, communication_s, both_s):
    case = Case(
        work="overlap",
        sizes=(("bytes", 8), ("m", 1), ("n", 1), ("k", 1), ("nodes", 1), ("ranks_per_node", 2)),
        precision="bf16",
        passes=(),
    )
    figures = {
        "compute_alone_s": compute_s,
        "communication_alone_s": communication_s,
        "both_s": both_s,
    }
    return Record(case=case, outcome=CaseOutcome.MEASURED, measured=CaseFigures(figures=figures))


SIZES = ((2**10, 20.0), (2**20, 50.0), (2**30, 10_000.0))


def line(work, nodes, ranks, groups, factor=1.0):
    return [
        record(work, n_bytes, factor * time_us, nodes, ranks, groups) for n_bytes, time_us in SIZES
    ]


def own(records, cluster=CLUSTER):
    """The machine whose profile is fitted to `records`."""
    intra, inter, contention = links_of(records, cluster)
    return Machine(
        cluster,
        replace(machine_for(cluster).profile, intra=intra, inter=inter, contention=contention),
    )


def node(ranks, groups=1):
    return Placement(nodes=1, ranks_per_node=ranks, groups_per_node=groups)


def test_a_curve_has_a_knot_at_every_measured_size_in_rising_order_whatever_the_order_of_records():
    (curve,) = curves_of(reversed(line("all_reduce", 2, 4, 2)))

    assert (curve.collective, curve.nodes, curve.ranks, curve.groups) == ("all_reduce", 2, 4, 2)
    assert tuple(zip(curve.bytes, curve.time_us, strict=True)) == SIZES
    assert (curve.rows, curve.median_error) == (3, 0.02)


def test_placements_and_collectives_have_a_curve_each_and_failures_have_none():
    failed = replace(
        record("all_gather", 2**10, 1.0, 1, 8, 1), outcome=CaseOutcome.HUNG, measured=None
    )
    placed = {
        ("all_reduce", 8, 1),
        ("all_reduce", 4, 2),
        ("all_reduce", 4, 1),
        ("all_to_all", 8, 1),
    }
    intra, _, _ = links_of(
        [
            failed,
            *(point for work, ranks, groups in placed for point in line(work, 1, ranks, groups)),
        ],
        CLUSTER,
    )

    assert {(curve.collective, curve.ranks, curve.groups) for curve in intra.curves} == placed


def test_a_size_that_was_measured_twice_counts_with_its_median():
    (curve,) = curves_of(
        [record("all_reduce", 2**10, time_us, 1, 8, 1) for time_us in (10.0, 12.0, 50.0)]
    )

    assert (curve.time_us, curve.rows) == ((12.0,), 3)


def test_without_records_links_are_those_of_the_device():
    profile = machine_for(CLUSTER).profile

    assert links_of((), CLUSTER) == (profile.intra, profile.inter, None)


def test_the_share_of_the_link_is_what_the_largest_gather_on_most_ranks_reaches():
    intra, _, _ = links_of(
        [
            *line("all_gather", 1, 8, 1),
            *line("all_gather", 1, 2, 4, 0.1),
            *line("all_reduce", 1, 8, 1, 0.5),
        ],
        CLUSTER,
    )

    assert intra.link_share == pytest.approx(
        7 / 8 * 2**30 / 10e-3 / CLUSTER.intra_node.bytes_per_s, rel=1e-3
    )
    assert intra.kind is Kind.MEASURED


def test_without_a_gather_the_all_reduce_goes_round_the_ring_twice():
    intra, _, _ = links_of(line("all_reduce", 1, 4, 2), CLUSTER)

    assert intra.link_share == pytest.approx(
        2 * 3 / 4 * 2**30 / 10e-3 / CLUSTER.intra_node.bytes_per_s, rel=1e-3
    )


def test_the_share_of_the_nics_is_that_of_groups_that_use_them_all_at_once():
    """Eight groups of one rank a node have a NIC of 25 GB/s each.

    One such group alone is faster and does not count.
    """
    records = [*line("all_gather", 2, 1, 8, 3.0), *line("all_gather", 2, 1, 1)]
    _, inter, _ = links_of(records, CLUSTER)

    assert inter.nic_share == pytest.approx(1 / 2 * 2**30 / 30e-3 / 25e9, rel=1e-3)
    assert inter.kind is Kind.ANALYTIC


def test_messages_give_the_shares_of_the_link_and_of_a_nic():
    intra, inter, _ = links_of(
        [*line("point_to_point", 1, 2, 1), *line("point_to_point", 2, 1, 1, 6.0)], CLUSTER
    )

    assert intra.point_to_point_share == pytest.approx(
        2**30 / 10e-3 / CLUSTER.intra_node.bytes_per_s, rel=1e-3
    )
    assert inter.point_to_point_share == pytest.approx(2**30 / 60e-3 / 25e9, rel=1e-3)


@pytest.mark.parametrize(
    ("compute_s", "communication_s", "both_s", "expected"),
    [
        pytest.param(3.0, 2.0, 3.0, 0.0, id="hidden-for-nothing"),
        pytest.param(3.0, 2.0, 3.5, 0.25, id="half-a-second-for-two"),
        pytest.param(3.0, 2.0, 5.0, 1.0, id="nothing-is-gained"),
        pytest.param(
            2.0, 3.0, 3.5, 0.25, id="a-second-sticks-out"
        ),  # 1 exposed, 2 under compute that takes 2.5
        pytest.param(3.0, 2.0, 2.9, 0.0, id="never-below-nothing"),
    ],
)
def test_contention_by_hand(compute_s, communication_s, both_s, expected):
    assert contention_of([overlap(compute_s, communication_s, both_s)]) == pytest.approx(expected)


def test_contention_is_the_median_and_none_without_a_measurement():
    assert contention_of(
        [overlap(3.0, 2.0, both_s) for both_s in (3.2, 3.4, 5.0)]
    ) == pytest.approx(0.2)
    assert contention_of(line("all_reduce", 1, 8, 1)) is None


@pytest.mark.parametrize(
    ("n_bytes", "kind", "time_us"),
    [
        pytest.param(2**20, Kind.MEASURED, 50.0, id="at-a-knot"),
        pytest.param(2**15, Kind.INTERPOLATED, (20.0 * 50.0) ** 0.5, id="half-way-between-two"),
        pytest.param(2**31, Kind.ANALYTIC, 20_000.0, id="beyond-the-last"),
        pytest.param(2**5, Kind.ANALYTIC, 20.0, id="below-the-first"),
    ],
)
@pytest.mark.parametrize(
    ("placement", "of"),
    [
        pytest.param(node(8), (1, 8, 1), id="inside-a-node"),
        pytest.param(
            Placement(nodes=2, ranks_per_node=2, groups_per_node=4), (2, 2, 4), id="across-nodes"
        ),
    ],
)
def test_a_curve_of_a_placement_prices_it(placement, of, n_bytes, kind, time_us):
    priced = collective_time(
        Collective.ALL_REDUCE, n_bytes, placement, own(line("all_reduce", *of))
    )

    assert priced.value_s * 1e6 == pytest.approx(time_us)
    assert priced.kind is kind


def test_inside_a_node_all_groups_of_an_axis_run_at_once():
    machine = own([*line("all_reduce", 1, 2, 4, 2.0), *line("all_reduce", 1, 2, 1)])
    one_pair = own([*line("all_reduce", 1, 2, 1)])

    assert collective_time(
        Collective.ALL_REDUCE, 2**20, node(2), machine
    ).value_s * 1e6 == pytest.approx(100.0)
    assert collective_time(
        Collective.ALL_REDUCE, 2**20, node(2), one_pair
    ).value_s * 1e6 == pytest.approx(50.0)


def test_between_two_numbers_of_ranks_a_price_is_interpolated_even_at_a_knot():
    machine = own([*line("all_reduce", 1, 2, 1), *line("all_reduce", 1, 8, 1, 4.0)])
    priced = collective_time(Collective.ALL_REDUCE, 2**20, node(4), machine)

    assert priced.value_s * 1e6 == pytest.approx(100.0)  # the geometric mean of 50 and 200
    assert priced.kind is Kind.INTERPOLATED


def test_a_placement_across_nodes_without_a_curve_is_analytic_with_the_fitted_share():
    machine = own(line("all_gather", 2, 1, 8, 3.0))
    priced = collective_time(
        Collective.ALL_GATHER,
        2**30,
        Placement(nodes=4, ranks_per_node=1, groups_per_node=8),
        machine,
    )

    reached = 1 / 2 * 2**30 / 30e-3
    assert priced.kind is Kind.ANALYTIC
    assert priced.value_s == pytest.approx(
        3 / 4 * 2**30 / reached + 3 * CLUSTER.nic.latency_s, rel=1e-3
    )


@pytest.mark.parametrize(
    ("crosses", "sharing", "kind", "time_us"),
    [
        pytest.param(False, 1, Kind.MEASURED, 50.0, id="one-inside-a-node"),
        pytest.param(False, 4, Kind.MEASURED, 100.0, id="four-inside-a-node"),
        pytest.param(False, 3, Kind.MEASURED, 50.0, id="three-as-one-alone"),
        pytest.param(True, 8, Kind.MEASURED, 150.0, id="eight-between-nodes"),
    ],
)
def test_a_message_is_priced_by_the_curve_of_as_many_at_once(crosses, sharing, kind, time_us):
    records = [
        *line("point_to_point", 1, 2, 1),
        *line("point_to_point", 1, 2, 4, 2.0),
        *line("point_to_point", 2, 1, 8, 3.0),
    ]
    priced = point_to_point_time(2**20, level=int(crosses), sharing=sharing, machine=own(records))

    assert priced.value_s * 1e6 == pytest.approx(time_us)
    assert priced.kind is kind


def test_a_message_that_no_curve_is_of_is_analytic_also_beside_curves_of_collectives():
    machine = own(line("all_reduce", 1, 8, 1))

    assert point_to_point_time(2**20, level=0, sharing=1, machine=machine).kind is Kind.ANALYTIC
    assert (
        point_to_point_time(
            2**20, level=1, sharing=3, machine=own(line("point_to_point", 2, 1, 8))
        ).kind
        is Kind.ANALYTIC
    )


def test_curves_hold_on_the_links_alone_that_they_were_measured_on():
    machine = own([*line("all_reduce", 1, 8, 1), *line("all_reduce", 2, 8, 1)])
    slow_link = replace(CLUSTER, intra_node=replace(CLUSTER.intra_node, bytes_per_s=25e9))
    few_nics = replace(CLUSTER, nics_per_node=1)

    assert {placed[1] for placed in machine.placed_curves} == {1, 2}
    assert {placed[1] for placed in Machine(slow_link, machine.profile).placed_curves} == {2}
    assert {placed[1] for placed in Machine(few_nics, machine.profile).placed_curves} == {1}


def test_a_profile_with_curves_of_its_own_is_the_same_after_a_file():
    profile = own([*line("all_reduce", 1, 8, 1), *line("all_reduce", 2, 8, 1)]).profile

    assert document(parse(Profile, document(profile), "a file")) == document(profile)
