"""The precision of the optimizer's states: what a stack keeps, what the options name, its bytes."""

from __future__ import annotations

import pytest

from parplan.commands.options.option_values import STATE_PRECISIONS
from parplan.commands.options.target_options import TargetOptions
from parplan.commands.requests.requests import request_of
from parplan.costmodels.layers.model_states import FP32_BYTES
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.machine_catalog import load_stack
from parplan.profiles.models.spec import Precision
from parplan.profiles.state_precision import STATES, StatePrecision


def training_of(**options):
    return request_of(TargetOptions(model="gpt-tiny", gpus=4, **options)).training


def test_the_options_have_every_precision():
    assert list(STATE_PRECISIONS) == list(StatePrecision) == list(STATES)


@pytest.mark.parametrize(
    ("stack", "precision", "kept", "gradients"),
    [
        ("megatron-core", "bf16-moments", (4, 2), Precision.FP32),
        ("nemo", "fp8-moments", (4, 1), Precision.FP32),
        ("torchtitan", "bf16", (0, 2), Precision.BF16),
        ("torchtitan", "fp32", (4, 4), Precision.FP32),
    ],
)
def test_a_stack_keeps_the_states_that_are_named(stack, precision, kept, gradients):
    training = training_of(stack=stack, state_precision=precision)

    assert (training.stack.master_bytes, training.stack.moment_bytes) == kept
    assert training.stack.states == StatePrecision(precision)
    assert training.gradient_precision is gradients


def test_gradients_that_are_stated_stay():
    training = training_of(stack="torchtitan", state_precision="bf16", gradient_precision="fp32")

    assert training.gradient_precision is Precision.FP32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state_precision": "bf16"}, "stack megatron-core keeps no states in bf16"),
        (
            {"stack": "torchtitan", "state_precision": "bf16", "precision": "fp32"},
            "--state-precision bf16 is of parameters in bf16, they are in fp32",
        ),
    ],
)
def test_states_that_do_not_run_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        training_of(**options)


def test_states_of_a_stack_of_its_own_have_no_name():
    stack = load_stack("megatron-core")

    assert stack.states is StatePrecision.FP32
    assert stack.keeping(StatePrecision.BF16).master_bytes == 0 != FP32_BYTES
