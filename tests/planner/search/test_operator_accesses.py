"""Searches over blocks in chunks that are used an operator at a time, beside those by blocks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.host.state_location import Access, StateLocation
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.plan.plan_file import plan_from_document, plan_to_document
from parplan.planner.request import Constraints, PlanRequest, SearchOptions
from parplan.planner.search.estimate import ChunkRequest, UniformChoices, estimate_plan
from parplan.planner.search.find_plan import find_plan
from parplan.profiles.errors import InfeasibleError
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack, with_gpus
from parplan.profiles.models.model_catalog import load_family
from parplan.profiles.models.spec import Precision, TrainingSpec
from parplan.report.plans.chunk_tables import blocks_by_location
from tests.helpers.cases import mostly_slow

MODEL = load_family("gpt").of_width(8192, 5).spec
CLUSTER = with_gpus(load_cluster("v100-32gb"), 4)
OPERATOR, BLOCK = Access.OPERATOR, Access.BLOCK
TRAINING = TrainingSpec(
    global_batch_size=8,
    seq_length=1024,
    precision=Precision.FP16,
    gradient_precision=Precision.FP32,
    stack=load_stack("parplan"),
)
PINS = Constraints(
    pp=(1,),
    tp=(1,),
    dp=(4,),
    micro_batch_size=(1,),
    recompute=(Recompute.FULL,),
    megatron_sharding=True,
    offload=(Offload.OPTIMIZER, Offload.PARAMETERS),
)
COUNTS = [(host, optimizer) for host in range(6) for optimizer in range(6 - host)]


def request(limit_bytes, access=None):
    return PlanRequest(
        model=MODEL,
        cluster=CLUSTER,
        training=TRAINING,
        constraints=replace(PINS, access=access),
        options=SearchOptions(memory_limit_bytes=int(limit_bytes)),
    )


def by_hand(access, limit_bytes, host=5, optimizer=0):
    layout = ParallelLayout(
        mesh=Mesh(pp=1, dp=4, tp=1),
        schedule=Schedule.ONE_F_ONE_B,
        virtual_stages=1,
        micro_batch_size=1,
        num_micro_batches=2,
        sequence_parallel=False,
    )
    chunks = ChunkRequest(
        host_blocks=host, optimizer_blocks=optimizer, access=access, limit_bytes=int(limit_bytes)
    )
    choices = UniformChoices(recompute=Recompute.FULL, chunks=chunks)
    return estimate_plan(request(limit_bytes), layout, choices)


def total_gib(plan):
    return plan.predicted.memory_gib[0].total


def limit_of(tensor_bytes):
    """The memory of a device whose tensors may fill so many bytes."""
    context = CLUSTER.device.context_bytes + TRAINING.stack.nccl_bytes
    return tensor_bytes * (1 + TRAINING.stack.allocator_share) + context


@pytest.fixture(scope="module")
def smallest():
    return {access: by_hand(access, 64e9).chunks.ranks[0].smallest_bytes for access in Access}


@pytest.fixture(scope="module")
def between(smallest):
    """A limit in which operators fit and blocks do not."""
    assert smallest[OPERATOR] < 0.9 * smallest[BLOCK]
    return limit_of(0.99 * smallest[BLOCK])


@pytest.mark.slow
def test_where_blocks_do_not_fit_the_plan_uses_an_operator_at_a_time(between):
    with pytest.raises(InfeasibleError):
        find_plan(request(between, (BLOCK,)))

    plan = find_plan(request(between))

    assert plan.chunks.access is OPERATOR
    assert total_gib(plan) * 2**30 <= between
    assert plan == find_plan(request(between, (OPERATOR,)))
    assert plan_from_document(plan_to_document(plan), "it") == plan


def test_where_blocks_fit_they_are_one_access_as_before(smallest):
    limit = limit_of(1.4 * smallest[BLOCK])

    plan = find_plan(request(limit))

    assert plan.chunks.access is BLOCK
    assert plan == find_plan(request(limit, (BLOCK,)))


@pytest.mark.parametrize(
    "access",
    [
        pytest.param((OPERATOR,), id="operator"),
        pytest.param((BLOCK, OPERATOR), id="both", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("share", mostly_slow([1.0, 1.4], {1.0}))
def test_no_choice_of_locations_by_hand_is_below_the_bound(between, access, share):
    limit = share * between

    plan = find_plan(request(limit, access))

    steps_s = {}
    for each in access:
        for host, optimizer in COUNTS:
            try:
                tried = by_hand(each, limit, host, optimizer)
            except InfeasibleError:
                continue
            steps_s[each, host, optimizer] = tried.predicted.step_time_s.value
    homes = Counter({home: len(blocks) for (_, home), blocks in blocks_by_location(plan).items()})
    chosen = plan.chunks.access, homes[StateLocation.HOST], homes[StateLocation.OPTIMIZER]
    assert steps_s[chosen] == pytest.approx(plan.predicted.step_time_s.value)
    assert plan.search.bound <= min(steps_s.values()) <= steps_s[chosen]
