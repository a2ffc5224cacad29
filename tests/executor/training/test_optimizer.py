"""Steps of the optimizer.

The gradient norm, and clipping with it, is checked on every mesh by
tests/executor/checking/test_parity.py, which compares the norms of all its plans with those of one
process.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from parplan.executor.run_options import Options
from parplan.executor.training.optimizer import (
    build_optimizer,
    clip_gradients,
    learning_rate,
    set_learning_rate,
)
from parplan.executor.training.train import Trainer, build_trainer
from tests.helpers.executor_plans import GPT, make_plan
from tests.helpers.executor_world import OPTIONS, run_reference

PLAN = make_plan(GPT)


@pytest.fixture(scope="module")
def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trainer(**options: object) -> Trainer:
    return build_trainer(PLAN, dataclasses.replace(OPTIONS, **options), torch.device("cpu"))


def torch_rates(
    schedule: str, *, steps: int, warmup: int, full: float, least: float
) -> list[float]:
    """The same schedule from torch's schedulers, step by step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=full)
    rise = LinearLR(optimizer, start_factor=1 / warmup, total_iters=warmup - 1)
    if schedule == "cosine":
        after = CosineAnnealingLR(optimizer, T_max=steps - warmup, eta_min=least)
    else:
        after = LinearLR(
            optimizer,
            start_factor=1.0,
            end_factor=least / full if schedule == "linear" else 1.0,
            total_iters=steps - warmup,
        )
    scheduler = SequentialLR(optimizer, [rise, after], milestones=[warmup])
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
def test_the_learning_rate_of_a_step_is_what_torchs_schedulers_come_to(schedule):
    least = 0.0 if schedule == "constant" else 1e-4
    options = Options(
        steps=40, warmup_steps=8, learning_rate=1e-3, lr_schedule=schedule, min_learning_rate=least
    )

    rates = [learning_rate(options, step) for step in range(40)]

    assert rates == pytest.approx(
        torch_rates(schedule, steps=40, warmup=8, full=1e-3, least=least), rel=1e-9
    )
    assert rates[0] == pytest.approx(1e-3 / 8)
    assert max(rates) == rates[8] == 1e-3


def test_past_the_last_step_the_rate_stays_at_its_least():
    options = Options(steps=10, learning_rate=1e-3, lr_schedule="cosine", min_learning_rate=1e-4)

    assert learning_rate(options, 10) == learning_rate(options, 1000) == pytest.approx(1e-4)


def test_a_warm_up_longer_than_the_run_only_rises():
    options = Options(steps=5, warmup_steps=10, learning_rate=1.0, lr_schedule="cosine")

    assert [learning_rate(options, step) for step in range(5)] == pytest.approx(
        [0.1, 0.2, 0.3, 0.4, 0.5]
    )


def test_every_step_trains_at_its_rate(world):
    steps = list(trainer(steps=4, lr_schedule="linear", warmup_steps=2, learning_rate=1e-3).run())

    assert [step.learning_rate for step in steps] == pytest.approx([5e-4, 1e-3, 1e-3, 5e-4])


def test_matrices_decay_and_vectors_do_not():
    matrix, vector = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    optimizer = build_optimizer([matrix, vector], Options(learning_rate=0.1, weight_decay=0.5))
    for parameter in (matrix, vector):
        parameter.grad = torch.zeros_like(parameter)

    optimizer.step()

    assert matrix.tolist() == [[pytest.approx(1 - 0.1 * 0.5)] * 2] * 2
    assert vector.tolist() == [1.0, 1.0]


def test_the_state_is_kept_by_parameter(world):
    built = trainer()
    list(built.run())

    assert set(built.optimizer.state) == set(built.pipeline.parameters)
    assert all(
        set(state) == {"step", "exp_avg", "exp_avg_sq"} for state in built.optimizer.state.values()
    )


def test_betas_and_rates_reach_the_optimizer(world):
    built = trainer(betas=(0.8, 0.95), weight_decay=0.2)
    set_learning_rate(built.optimizer, built.options, 0)

    assert {group["betas"] for group in built.optimizer.param_groups} == {(0.8, 0.95)}
    assert {group["lr"] for group in built.optimizer.param_groups} == {OPTIONS.learning_rate}
    assert {group["weight_decay"] for group in built.optimizer.param_groups} == {0.0, 0.2}


@pytest.mark.parametrize(("largest", "expected"), [(1.0, 1.0), (10.0, 5.0), (0.0, 5.0)])
def test_gradients_above_the_limit_are_scaled_to_it(largest, expected):
    parameters = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1, 1))]
    parameters[0].grad, parameters[1].grad = torch.tensor([0.0, 3.0]), torch.tensor([[4.0]])
    optimizer = build_optimizer(parameters, Options())

    clip_gradients(optimizer, largest, torch.tensor(5.0))

    norm = torch.linalg.vector_norm(
        torch.cat([parameter.grad.flatten() for parameter in parameters])
    )
    assert norm.item() == pytest.approx(expected, rel=1e-6)
    assert parameters[0].grad[1] / parameters[1].grad[0, 0] == pytest.approx(0.75)


def test_a_limit_changes_how_the_model_trains(world):
    """The parity tests would see a limit that is left out: their first step is above it."""
    limited = [step.loss for step in trainer(clip_gradients=OPTIONS.clip_gradients).run()]
    free = [step.loss for step in trainer(clip_gradients=0.0).run()]
    expected = run_reference(PLAN)

    assert expected.norms[0] > OPTIONS.clip_gradients > 0
    assert limited == pytest.approx(expected.losses, rel=5e-7)
    assert free[2] != pytest.approx(expected.losses[2], rel=1e-4)
