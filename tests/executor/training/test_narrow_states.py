"""States in 16 bits: divided models train as one process does, in the bytes that are predicted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from parplan.executor.checking.parity import run_ranks
from parplan.executor.run_options import Options
from parplan.executor.training.optimizer import build_optimizer
from parplan.planner.plan.plan import Plan
from parplan.profiles.models.spec import Optimizer, Precision
from parplan.profiles.state_precision import StatePrecision
from tests.executor.training.test_optimizers import plan_of
from tests.helpers.executor_plans import GPT, LLAMA, make_plan
from tests.helpers.executor_world import (
    BF16_NORM_TOLERANCE,
    OPTIONS,
    Worlds,
    reference_optimizer,
    require_as_one_process,
    run_reference,
)

BF16 = Precision.BF16


def keeping(plan: Plan, precision: StatePrecision) -> Plan:
    """The plan with states in a precision, and gradients in the type that goes with it."""
    training = replace(plan.training, stack=plan.training.stack.keeping(precision))
    gradients = Precision.FP32 if training.has_masters else training.precision
    return replace(plan, training=replace(training, gradient_precision=gradients))


PURE = (
    {f"zero{zero}": make_plan(LLAMA, dp=2, zero=(zero,), precision=BF16) for zero in range(4)}
    | {
        "tp2-pp2": make_plan(GPT, tp=2, pp=2, precision=BF16),
        "mixed-zero": make_plan(LLAMA, dp=2, zero=(1, 3), precision=BF16),
    }
    | {
        str(optimizer): plan_of(optimizer, dp=2, zero=(2,), precision=BF16)
        for optimizer in Optimizer
        if optimizer is not Optimizer.ADAM
    }
)
MOMENTS = {
    "moments-fp32": make_plan(GPT, dp=2, zero=(1,)),
    "moments-bf16": make_plan(LLAMA, dp=2, zero=(3,), precision=BF16),
    "moments-8-bit": plan_of(Optimizer.ADAM_8BIT, tp=2, precision=BF16),
}
PLANS = {name: keeping(plan, StatePrecision.BF16) for name, plan in PURE.items()} | {
    name: keeping(plan, StatePrecision.BF16_MOMENTS) for name, plan in MOMENTS.items()
}
WORLDS = Worlds(PLANS, slow={*PLANS} - {"zero2", "moments-fp32"})


@pytest.mark.multiproc
@pytest.mark.parametrize("name", WORLDS.params())
def test_states_in_16_bits_train_as_one_process_with_such_states(name: str) -> None:
    require_as_one_process(WORLDS, name)

    first_norm = run_reference(PLANS[name]).norms[0]
    assert WORLDS.outcome(name).norms[0] == pytest.approx(first_norm, rel=BF16_NORM_TOLERANCE)


def _moved(parameters: list[nn.Parameter], steps: torch.optim.Optimizer) -> list[Tensor]:
    """Returns whole parameters after three steps with gradients that depend on nothing."""
    generator = torch.Generator().manual_seed(4)
    for _ in range(3):
        for parameter in parameters:
            gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            if isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                gradient = DTensor.from_local(
                    gradient.chunk(mesh.size())[mesh.get_local_rank()], mesh, parameter.placements
                )
            parameter.grad = gradient
        steps.step()
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in parameters]


def _layer(dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(24, 40).to(dtype)


def _updated(dtype: torch.dtype, *, divided: bool) -> list[Tensor]:
    """The parameters of a layer after three steps with moments in bf16, ours or torch's."""
    layer = _layer(dtype)
    if divided:
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
        parameters = list(layer.parameters())
        return _moved(parameters, build_optimizer(parameters, OPTIONS, moments=torch.bfloat16))
    if dtype is torch.float32:
        theirs = reference_optimizer(layer, OPTIONS, moments=torch.bfloat16)
    else:  # torch's moments are in the parameters' type
        groups = [
            {"params": [layer.weight], "weight_decay": OPTIONS.weight_decay},
            {"params": [layer.bias], "weight_decay": 0.0},
        ]
        theirs = torch.optim.AdamW(groups, OPTIONS.learning_rate, OPTIONS.betas, fused=True)
    return _moved(list(layer.parameters()), theirs)


def _both(_: Plan) -> dict[str, list[Tensor]]:
    return {str(dtype): _updated(dtype, divided=True) for dtype in (torch.float32, torch.bfloat16)}


@pytest.mark.multiproc
def test_the_update_of_shards_is_that_of_torchs_optimizer_with_rounded_moments() -> None:
    ranks = run_ranks([make_plan(GPT, dp=2)], _both)[0]

    for dtype in (torch.float32, torch.bfloat16):
        expected = _updated(dtype, divided=False)
        for rank in ranks:
            assert all(map(torch.equal, rank[str(dtype)], expected))


def test_moments_in_bf16_are_those_that_torch_would_round() -> None:
    (ours, theirs) = (list(_layer(torch.float32).parameters()) for _ in range(2))
    options = Options(steps=3, weight_decay=0.1)

    narrow = build_optimizer(ours, options, moments=torch.bfloat16)
    wide = build_optimizer(theirs, options)

    assert not all(map(torch.equal, _moved(ours, narrow), _moved(theirs, wide)))
    assert {v.dtype for s in narrow.state.values() for v in s.values() if v.ndim} == {
        torch.bfloat16
    }
