"""Layout costs on a machine that measured them: the growth of each price."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.communication.collectives import Collective, collective_time
from parplan.costmodels.communication.mesh import Mesh, place_axis
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.stage_costs import step_costs
from parplan.costmodels.strategy import ParallelLayout
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack, with_gpus
from parplan.profiles.machines.shipped_profiles import Machine, analytic_profile
from parplan.profiles.machines.speeds import InStep, LayerCost
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import Precision, TrainingSpec
from tests.helpers.uniform_strategies import uniform

MODEL = load_model("gpt-tiny").spec
STACK = replace(load_stack("parplan"), host_operator_s=0.0)
TRAINING = TrainingSpec(
    global_batch_size=16,
    seq_length=64,
    precision=Precision.FP32,
    stack=STACK,
    overlap_grad_reduce=False,
)
PLAIN = InStep(
    stack="parplan",
    kernel_slowdown=1.0,
    forward_s=0.0,
    backward_s=0.0,
    host_adds=True,
    source="made up",
)
BLOCK_PARAMETERS = 12 * 64**2 + 13 * 64


def price_cache(in_step: InStep, num_gpus: int = 2) -> PriceCache:
    cluster = with_gpus(load_cluster("cpu"), num_gpus, num_gpus)
    return PriceCache(
        MODEL, TRAINING, Machine(cluster, replace(analytic_profile("cpu"), in_step=in_step))
    )


def layout(
    mesh: Mesh, schedule: Schedule = Schedule.ONE_F_ONE_B, virtual_stages: int = 1
) -> ParallelLayout:
    return ParallelLayout(
        mesh=mesh,
        schedule=schedule,
        virtual_stages=virtual_stages,
        micro_batch_size=4,
        num_micro_batches=16 // (4 * mesh.dp),
        sequence_parallel=False,
    )


def costs(in_step: InStep, made: ParallelLayout, zero: int = 0):
    prices = price_cache(in_step, made.mesh.num_ranks)
    return step_costs(uniform(made, MODEL.num_layers, zero=zero), prices)


def grows(made: ParallelLayout, part: str, zero: int = 0, **added) -> float:
    """By how many seconds a part of the first rank's step grows with what is added."""
    before = costs(PLAIN, made, zero)
    after = costs(replace(PLAIN, **added), made, zero)
    if part in ("reduced_s", "optimizer_s"):
        return getattr(after, part)[0] - getattr(before, part)[0]
    return sum(getattr(stage, part) for stage in after.stages[0]) - sum(
        getattr(stage, part) for stage in before.stages[0]
    )


def test_an_operator_that_is_divided_takes_longer_by_its_dispatch_and_a_product_has_two_gradients():
    divided = Mesh(pp=1, dp=1, tp=2)
    operators = [
        op
        for run in price_cache(PLAIN).graph(4).layers
        for op in run.layer.operators
        for _ in range(run.count)
    ]
    products = sum(op.kind == "matmul" for op in operators)

    assert grows(layout(divided), "forward_s", divided_forward_s=1e-3) == pytest.approx(
        len(operators) * 1e-3
    )
    assert grows(layout(divided), "backward_s", divided_backward_s=1e-3) == pytest.approx(
        (len(operators) + products) * 1e-3
    )
    assert grows(layout(Mesh(pp=1, dp=2, tp=1)), "forward_s", divided_forward_s=1e-3) == 0.0


@pytest.mark.parametrize(("zero", "layers"), [(0, 0), (1, 6)])
def test_a_layer_that_zero_shards_is_gathered_and_reduced_through_buffers(zero, layers):
    made = layout(Mesh(pp=1, dp=2, tp=1))

    assert grows(made, "reduced_s", zero, gather=LayerCost(layer_s=1e-3)) == pytest.approx(
        layers * 1e-3
    )
    assert grows(made, "reduced_s", zero, reduce=LayerCost(layer_s=2e-3)) == pytest.approx(
        layers * 2e-3
    )
    assert grows(made, "optimizer_s", zero, update=LayerCost(layer_s=3e-3)) == pytest.approx(
        layers * 3e-3
    )


def test_what_grows_with_a_layers_bytes_counts_those_of_its_parameters():
    times_s = [
        price_cache(stack)
        .data_parallel(
            LayerKind.BLOCK, 4, Mesh(pp=1, dp=2, tp=1), layout(Mesh(pp=1, dp=2, tp=1)).sharding, 1
        )
        .step.value_s
        for stack in (PLAIN, replace(PLAIN, reduce=LayerCost(byte_s=1e-9)))
    ]

    assert times_s[1] - times_s[0] == pytest.approx(4 * BLOCK_PARAMETERS * 1e-9)


def test_every_action_of_a_pipeline_takes_its_runtime():
    assert grows(layout(Mesh(pp=2, dp=1, tp=1)), "forward_s", action_s=1e-3) == pytest.approx(1e-3)
    assert grows(layout(Mesh(pp=2, dp=1, tp=1)), "backward_s", action_s=1e-3) == pytest.approx(1e-3)
    assert grows(layout(Mesh(pp=1, dp=2, tp=1)), "forward_s", action_s=1e-3) == 0.0


def test_a_backward_pass_in_two_parts_takes_longer_by_its_launches():
    whole, split = layout(Mesh(pp=2, dp=1, tp=1)), layout(Mesh(pp=2, dp=1, tp=1), Schedule.ZBV, 2)
    ends = [
        op
        for kind in (LayerKind.EMBEDDING, LayerKind.HEAD)
        for op in price_cache(PLAIN).graph(4).layer_class(kind).operators
    ]
    blocks = 2 * list(price_cache(PLAIN).graph(4).block.operators)
    launches = sum(2 if op.kind == "matmul" else 1 for op in (*ends, *blocks))

    assert grows(split, "backward_s", split_s=1e-3) == pytest.approx(launches * 1e-3)
    assert grows(whole, "backward_s", split_s=1e-3) == 0.0


def test_norm_and_loss_are_summed_over_all_ranks_once_each():
    machine = price_cache(PLAIN).machine
    once_s = collective_time(Collective.ALL_REDUCE, 8, place_axis(2, 1, 2, 2), machine).value_s
    alone = costs(PLAIN, layout(Mesh(pp=1, dp=1, tp=1))).optimizer_s[0]
    pair = costs(PLAIN, layout(Mesh(pp=1, dp=2, tp=1))).optimizer_s[0]

    assert pair - alone == pytest.approx(2 * once_s)


def test_another_stack_or_a_host_that_launches_ahead_has_none_of_it():
    sharded, added = (
        layout(Mesh(pp=1, dp=2, tp=1)),
        {"gather": LayerCost(layer_s=1.0), "update": LayerCost(layer_s=1.0)},
    )
    for layout_costs in (replace(PLAIN, stack="nemo"), replace(PLAIN, host_adds=False)):
        assert costs(replace(layout_costs, **added), sharded, 1) == costs(layout_costs, sharded, 1)
