"""A plan whose pools divide the pipeline goes to launchers with the price on its own pools."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.planner.export.exported import export_plan
from parplan.planner.export.files.jobs import job
from parplan.planner.export.launcher_prices import launcher_prices
from parplan.planner.export.targets import TARGETS
from parplan.planner.request import Constraints
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack, with_gpus
from parplan.profiles.machines.unequal_cluster import Join, Pool, unequal_cluster
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.units import GIB
from parplan.report.plans.launcher_lines import launcher_lines
from tests.helpers.instances import Instance
from tests.helpers.planning import find_plan
from tests.helpers.pools import with_memory

MEGATRON = TARGETS["megatron"]
PINS = Constraints(pp=(2,), tp=(1,), micro_batch_size=(1,), zero=(1,), schedule=("1f1b",))


@pytest.fixture(scope="module")
def plan():
    pools = [
        Pool(name=name, cluster=with_gpus(load_cluster(kind), 4, 4))
        for name, kind in (("a", "a100-80gb"), ("h", "h100-80gb"))
    ]
    join = Join(name="line", latency_s=8e-6, source="stated", node_bytes_per_s=25e9)
    cluster = unequal_cluster("two", pools, (join,))
    training = TrainingSpec(
        global_batch_size=64, seq_length=1024, stack=load_stack("megatron-core")
    )
    return find_plan(load_model("gpt-2.5b").spec, cluster, training, constraints=PINS)


@pytest.mark.slow
def test_a_plan_over_pools_is_read_back_with_the_price_on_its_pools(plan):
    one = export_plan(plan, MEGATRON, "plan.yaml")

    blocks = [sum(len(run.indices) for run in stage.layers) for stage in plan.stages]
    assert blocks[0] != blocks[1], "the pools are not alike"
    assert plan.pools in (("a", "h"), ("h", "a"))
    assert one.configured.strategy.layout.pools == plan.pools
    assert one.configured.price.step_s == pytest.approx(one.plan.price.step_s, rel=1e-9)
    assert not one.losses
    assert "--pipeline-model-parallel-layout" in one.files["megatron.sh"]
    first, second = plan.pools
    assert (
        f"# node ranks count through the nodes of {first}, then of {second}\n"
        in (one.files["megatron.sh"])
    )


def test_memory_that_a_pool_lacks_is_counted_on_its_own_devices(plan):
    most = [stage.total * GIB for stage in plan.predicted.memory_gib]
    room = {plan.pools[0]: most[0] * 2, plan.pools[1]: most[1] / 2}
    instance = Instance(plan.model, plan.cluster, plan.training)
    small = with_memory(instance, tuple(int(room[name]) for name in plan.cluster.pool_names))
    cut = replace(plan, cluster=small.cluster)

    (price,) = launcher_prices(cut, [MEGATRON])
    (line,) = launcher_lines([price], 120)

    assert price.missing_bytes == pytest.approx(most[1] / 2, rel=0.01)
    assert line.endswith("GiB (does not fit)"), "plan --for needs equal nodes"


def test_nodes_with_unlike_numbers_of_gpus_are_refused(plan):
    pools = [
        replace(pool, cluster=with_gpus(pool.cluster, 4, gpus))
        for pool, gpus in zip(plan.cluster.pools, (2, 4), strict=True)
    ]
    unlike = replace(plan, cluster=unequal_cluster("two", pools, plan.cluster.joins))

    with pytest.raises(ConfigError, match="the pools of cluster two have 2 and 4 GPUs a node"):
        export_plan(unlike, MEGATRON, "plan.yaml")


def test_a_job_that_numbers_its_nodes_in_any_order_is_refused(plan):
    one = export_plan(plan, MEGATRON, "plan.yaml")

    with pytest.raises(ConfigError, match="numbers its nodes in any order"):
        job("slurm", plan, one.files, one.head)
