"""A plan over pools stands beside the plans of equal nodes, which a search of each finds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.planner.launchers.compare_described import compare
from parplan.planner.search.comparison import ComparisonRow
from parplan.planner.search.equal_baselines import SLOWEST, equal_baseline
from parplan.report.searches.comparison_document import comparison_document
from parplan.report.searches.comparison_tables import comparison_notes, verdicts
from tests.helpers.instances import Instance
from tests.helpers.planning import find_plan, request
from tests.helpers.pools import pools_of, two_pools


def compared(instance: Instance):
    parts = instance.model, instance.cluster, instance.training
    return compare(find_plan(*parts), ("zero-1",))


@pytest.mark.slow
def test_the_baselines_are_the_fastest_plans_of_equal_nodes():
    instance = two_pools(5)
    cluster = pools_of(instance)
    comparison = compared(instance)

    alone = {f"{pool.name}-alone": pool.cluster for pool in cluster.pools}
    machines = {SLOWEST: cluster.as_slowest, **alone}
    assert [row.name for row in comparison.rows] == [*machines, "zero-1"]
    document = {row.name: row for row in comparison_document(comparison).baselines}
    ours_s = comparison.ours.step_s
    for name, machine in machines.items():
        equal_s = find_plan(instance.model, machine, instance.training).search.value
        assert document[name].step_time_s == pytest.approx(equal_s, abs=1e-6)
        slower = document[name].step_time_s / ours_s - 1  # also where it has fewer GPUs
        assert document[name].slower == pytest.approx(slower, rel=1e-9)
    assert document["zero-1"].step_time_s >= document[SLOWEST].step_time_s * (1 - 1e-9)
    assert any("as if every GPU were the slowest" in n for n in notes(comparison))


@pytest.mark.slow
def test_a_machine_without_room_is_said_to_have_no_plan():
    comparison, instance = compared(two_pools(3)), two_pools(3, (2**20, 2**20))
    cluster = pools_of(instance).pools[0].cluster
    baseline, found = equal_baseline(
        "p0-alone", request(instance.model, cluster, instance.training)
    )

    assert found is None
    unfit = replace(comparison, rows=(ComparisonRow(baseline=baseline, side=None),))
    assert any("p0-alone has no plan that fits" in line for line in verdicts(unfit))


def notes(comparison) -> list[str]:
    return [*comparison_notes(comparison, pinned=False)]
