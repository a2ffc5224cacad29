"""Corners have one figure off, and regrets equal hand calculation."""

from __future__ import annotations

import math
from dataclasses import replace

from parplan.planner.plan.corners import (
    SPEEDS,
    USUAL_SHARE,
    changes,
    corners,
    figure_of,
    regrets,
    worst_regrets,
)
from parplan.profiles.machines.machine_catalog import load_cluster


def test_the_regret_is_against_the_best_plan_of_each_corner():
    as_priced, slow_network = (10.0, 11.0), (15.0, 12.0)

    assert worst_regrets([as_priced]) == [0.0, 0.1]
    assert worst_regrets([as_priced, slow_network]) == [0.25, 0.1]


def test_a_plan_that_does_not_fit_where_another_does_has_infinite_regret():
    assert regrets([None, 12.0, 15.0]) == [math.inf, 0.0, 0.25]
    assert regrets([None, None]) == [0.0, 0.0]  # such a corner tells nothing apart


def test_each_speed_is_20_percent_off_in_both_directions_and_alone():
    speeds = [(s.compute, s.inside_node, s.across_nodes) for s in corners(USUAL_SHARE, SPEEDS)]

    assert len(set(speeds)) == 6
    for of_scenario in speeds:
        assert sorted(of_scenario) in ([0.8, 1.0, 1.0], [1.0, 1.0, 1.25])


def test_a_corner_names_its_figure_and_memory_is_one_of_them():
    named = [figure_of(corner) for corner in corners(0.5)]

    assert named[:2] == [("compute", 0.5), ("compute", 2.0)]
    assert named[-2:] == [("memory", 0.5), ("memory", 2.0)]


def test_a_cluster_without_a_link_has_no_corners_of_it():
    plain = load_cluster("a100-80gb")
    figures = {
        figure_of(corner)[0] for corner in corners(0.2) if changes(corner, replace(plain, nodes=1))
    }

    assert figures == {"compute", "inside_node", "memory"}
