"""Compiled runs (--compile).

Blocks are traced as for inductor, by the backend that runs the trace, because making machine code
takes half a minute. With inductor itself: `pytest -m slow
tests/executor/training/test_compiled.py`.
"""

from __future__ import annotations

import dataclasses
from functools import partialmethod

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.exc import Unsupported

from parplan.executor.training.compiled import validate_compiled
from parplan.executor.training.train import build_trainer
from parplan.planner.plan.plan import Plan
from parplan.profiles.errors import ConfigError
from tests.helpers.executor_plans import GPT, LLAMA, make_plan
from tests.helpers.executor_world import LOSS_TOLERANCE, OPTIONS, run_reference

pytestmark = [  # torch's tracer and compiler warn about what they do themselves
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
    ),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

CPU = torch.device("cpu")
COMPILED = dataclasses.replace(OPTIONS, compile=True)


@pytest.fixture(autouse=True)
def _world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch._dynamo.reset()


@pytest.fixture
def traced(monkeypatch):
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))


def train(plan: Plan) -> list[float]:
    return [step.loss for step in build_trainer(plan, COMPILED, CPU).run()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(make_plan(GPT), id="gpt"),
        pytest.param(make_plan(LLAMA, recompute="full"), id="llama-full-recompute"),
    ],
)
def test_compiled_blocks_train_alike_and_are_one_graph(traced, plan):
    torch._dynamo.utils.counters.clear()

    losses = train(plan)

    assert losses == pytest.approx(run_reference(plan).losses, rel=LOSS_TOLERANCE)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1  # four blocks of one shape
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.slow
def test_blocks_of_machine_code_train_alike():
    plan = make_plan(GPT)

    assert train(plan) == pytest.approx(run_reference(plan).losses, rel=LOSS_TOLERANCE)


def test_a_block_with_a_list_of_recomputed_operators_is_refused_and_does_not_trace(traced):
    plan = make_plan(GPT, recompute=("norm1", "attention"))

    with pytest.raises(
        ConfigError, match=r"layer_plans\.block-0 recomputes norm1, attention by recipes"
    ):
        validate_compiled(plan, CPU)
    with pytest.raises(Unsupported, match="saved_tensors_hooks"):
        train(plan)


def test_tensor_parallel_blocks_are_refused():
    with pytest.raises(ConfigError, match="with tp 2 the gathered inputs are kept by recipes"):
        validate_compiled(make_plan(LLAMA, tp=2), CPU)


def test_a_machine_without_a_compiler_is_an_error(monkeypatch):
    from torch._inductor import config

    monkeypatch.setattr(config.cpp, "cxx", ("/no/compiler",))

    with pytest.raises(ConfigError, match=r"torch finds no C\+\+ compiler"):
        validate_compiled(make_plan(GPT), CPU)


def test_plans_without_recompute_or_with_all_of_it_are_compiled():
    for recompute in ((), "full"):
        validate_compiled(
            make_plan(GPT, dp=2, zero=(3,), recompute=recompute), torch.device("cuda")
        )
