"""Prices of the links inside a node beside measured steps and collectives."""

from __future__ import annotations

import pytest

from benchmarks.prices.tensor_parallel_price import (
    DEVICE,
    SLOWER,
    collective_table,
    step_table,
    tensor_row,
)
from parplan.planner.validation.priced_rows import price_row
from parplan.profiles.machines.machine_catalog import load_cluster
from parplan.profiles.machines.shipped_profiles import machine_for
from tests.helpers.measured_rows import FULL


def test_a_step_as_priced_asks_for_the_links_as_priced():
    priced_s = price_row(FULL, held_out=True).predicted_s
    found = tensor_row({**FULL, "step_time_s": repr(priced_s)})

    assert found.asked == pytest.approx(1.0)
    slower = tensor_row({**FULL, "step_time_s": repr(found.slower_s)})
    assert slower.asked == pytest.approx(SLOWER)
    assert list(step_table([found, slower]).columns[2].cells) == ["2"]


@pytest.mark.parametrize("change", [{"tp": "1", "dp": "8"}, {"gpu": "h100-80g-sxm"}])
def test_other_rows_say_nothing_of_links_inside_a_node_of_a100(change):
    assert tensor_row({**FULL, **change}) is None


def test_collectives_are_read_between_two_measured_sizes():
    row = {"gpu": "A100-SXM4-80GB", "collective": "all_reduce", "nodes": "1", "flag": ""}
    rows = [
        {**row, "ranks_per_node": "4", "source": "made up", "bytes": str(size), "time_us": text}
        for size, text in ((2**25, "300"), (2**26, "500"), (2**27, "900"))
    ]
    table = collective_table(rows, machine_for(load_cluster(DEVICE)))

    assert [next(iter(column.cells)) for column in table.columns][:2] == ["all_reduce", "4"]
    assert 300 < float(next(iter(table.columns[2].cells))) < 500
