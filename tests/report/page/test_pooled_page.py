"""The page of a plan over unequal pools has the figures of each pool and of what joins them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from parplan.planner.plan.plan import BatchShare
from parplan.planner.plan.plan_file import write_plan
from tests.helpers.command_runs import succeed
from tests.helpers.laid_out_plans import laid_out
from tests.helpers.planning import find_plan
from tests.helpers.pools import pools_of, two_pools


@pytest.mark.slow
def test_the_page_has_every_pool_and_the_plans_of_equal_nodes(tmp_path):
    instance = two_pools(3)
    plan = find_plan(instance.model, instance.cluster, instance.training)
    write_plan(plan, tmp_path / "plan.yaml")

    succeed("report", str(tmp_path / "plan.yaml"), "-o", str(tmp_path / "page.html"))

    page = (tmp_path / "page.html").read_text()
    keys = set(re.findall(r'data-key="([^"]+)"', page))
    for number, pool in enumerate(pools_of(instance).pools):
        assert f"cluster.pools.{number}.device.memory_gib" in keys
        assert f"cluster.pools.{number}.node.nics" in keys
        assert pool.cluster.device.source in page
        assert f"{pool.name}-alone" in page
    assert "cluster.joins.0.gb_per_s_in_total" in keys
    assert "as-the-slowest" in page


def test_the_page_of_one_pool_starts_the_files_of_all_pools(tmp_path):
    plan = laid_out("gpt-2.5b", dp=4, tp=2)
    write_plan(replace(plan, batch_share=BatchShare(first=0, of=1024)), tmp_path / "plan.yaml")

    succeed("report", str(tmp_path / "plan.yaml"), "-o", str(tmp_path / "page.html"))

    page = (tmp_path / "page.html").read_text()
    assert "one job of the plan files of all pools" in page
    assert "plan.yaml OTHER_POOLS.yaml" in page
