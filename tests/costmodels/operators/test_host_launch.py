"""Step figures come from a machine's profile for this stack if it has one, else from the stack."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.layers.layer_price import price_operators
from parplan.costmodels.operators.compute import operator_time
from parplan.costmodels.operators.host_launch import LaunchCost, launch_cost_of, launch_s
from parplan.costmodels.operators.sharding import Sharding
from parplan.planner.layer_options.layer_problem import layer_problem
from parplan.profiles.machines.calibration_factors import Calibration, Factor
from parplan.profiles.machines.machine_catalog import load_cluster
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.machines.speeds import InStep
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import PRODUCTS
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.provenance import Kind
from parplan.profiles.stack import Stack

STACK = Stack(name="mine", kernel_slowdown=1.25, host_operator_s=3e-3)
BARE = Stack(name="bare", host_operator_s=0.0)
BOUND = InStep(
    stack="mine",
    kernel_slowdown=0.9,
    forward_s=1e-3,
    backward_s=2e-3,
    host_adds=False,
    source="made up",
)
ADDS = replace(BOUND, host_adds=True)
A100 = machine_for(load_cluster("a100-80gb"))
MODELS = {"gpt": load_model("gpt-tiny").spec, "experts": load_model("mixtral-tiny").spec}


def training(stack=STACK):
    return TrainingSpec(global_batch_size=8, seq_length=128, stack=stack)


def block(name="gpt", stack=STACK):
    return build_graph(MODELS[name], training(stack), 2).block


def with_step(in_step, machine=A100):
    return replace(machine, profile=replace(machine.profile, in_step=in_step))


def layer_time(machine, stack=STACK):
    return price_operators(block(stack=stack), Sharding(), machine, training(stack)).time()


def test_a_stack_has_its_own_figures_where_the_machine_has_none_of_it():
    expected = LaunchCost(1.25, 3e-3, 3e-3)

    assert launch_cost_of(A100, STACK) == expected
    assert launch_cost_of(with_step(replace(ADDS, stack="another")), STACK) == expected
    assert launch_cost_of(with_step(ADDS), STACK) == LaunchCost(0.9, 1e-3, 2e-3, adds=True)


@pytest.mark.parametrize("in_step", [BOUND, ADDS])
def test_kernels_take_the_machines_factor_which_may_be_below_one(in_step):
    for operator in block().operators:
        alone = operator_time(operator, Sharding(), A100, training(BARE))
        timed = operator_time(operator, Sharding(), with_step(in_step), training())
        added_s = in_step.forward_s if in_step.host_adds else 0.0

        assert timed.forward.value_s == pytest.approx(
            0.9 * alone.forward.value_s + added_s, rel=1e-12
        )


@pytest.mark.parametrize("model", MODELS)
def test_a_host_that_adds_adds_to_every_operator_and_twice_to_the_gradients_of_a_product(model):
    for operator in block(model).operators:
        alone = operator_time(operator, Sharding(), with_step(BOUND), training())
        timed = operator_time(operator, Sharding(), with_step(ADDS), training())
        gradients = 2 if operator.kind in PRODUCTS else 1

        assert timed.forward.value_s - alone.forward.value_s == pytest.approx(1e-3, rel=1e-9)
        assert timed.backward.value_s - alone.backward.value_s == pytest.approx(
            gradients * 2e-3, rel=1e-9
        )
        assert timed.weight.value_s - alone.weight.value_s == pytest.approx(
            2e-3 if alone.weight.value_s else 0.0, rel=1e-9
        )
        assert timed.forward.kind is Kind.INTERPOLATED


def test_a_host_that_adds_is_no_bound_of_the_layer():
    operators = len(block().operators)
    products = sum(operator.kind in PRODUCTS for operator in block().operators)
    bound, adds = layer_time(with_step(BOUND)), layer_time(with_step(ADDS))
    alone = layer_time(with_step(replace(BOUND, forward_s=0.0, backward_s=0.0)))

    assert bound.forward_s == pytest.approx(operators * 1e-3)
    assert bound.backward_s == pytest.approx((operators + products) * 2e-3)
    assert adds.forward_s == pytest.approx(alone.forward_s + operators * 1e-3)
    assert adds.backward_s == pytest.approx(alone.backward_s + (operators + products) * 2e-3)
    assert adds.forward_s > bound.forward_s


@pytest.mark.parametrize(
    ("in_step", "expected"), [(None, (3e-3, 3e-3)), (BOUND, (1e-3, 2e-3)), (ADDS, (0.0, 0.0))]
)
def test_the_program_of_a_layer_has_the_same_bounds_as_its_price(in_step, expected):
    machine = with_step(in_step)
    problem = layer_problem(block(), Sharding(), machine, training())

    assert launch_s(machine, STACK) == (problem.host_forward_s, problem.host_backward_s) == expected
    priced = price_operators(block(), Sharding(), machine, training())
    assert (priced.host_forward_s, priced.host_backward_s) == expected


def test_a_calibration_corrects_what_the_host_adds_and_what_it_bounds():
    calibration = Calibration(
        stack="mine", precision="bf16", forward=Factor(value=2.0, measured=True)
    )
    cluster = replace(A100.cluster, calibration=calibration)
    machine = replace(with_step(ADDS), cluster=cluster)
    operator = block().operators[0]

    plain = operator_time(operator, Sharding(), with_step(ADDS), training())
    assert operator_time(
        operator, Sharding(), machine, training()
    ).forward.value_s == pytest.approx(2 * plain.forward.value_s)
    assert launch_s(with_step(BOUND, machine), STACK) == (2e-3, 2e-3)


def test_a_host_on_the_board_of_the_device_launches_as_much_slower_as_it_is_said_to():
    grace = machine_for(load_cluster("gb200-186gb"))

    assert grace.cluster.device.host_slowdown > A100.cluster.device.host_slowdown == 1.0
    assert launch_s(grace, STACK) == tuple(
        grace.cluster.device.host_slowdown * seconds for seconds in launch_s(A100, STACK)
    )
