"""Training in fp16 follows fp32 to its rounding.

A gradient that overflows anywhere costs every rank that step, and nothing else.
"""

from __future__ import annotations

import dataclasses
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.schedules.schedule import Schedule
from parplan.executor.checking import parity
from parplan.executor.checkpoint.checkpoints import Checkpoints
from parplan.executor.checkpoint.resume import CheckpointOptions
from parplan.executor.pipeline.loss_scale import INITIAL, LossScale
from parplan.executor.sharding.zero_units import compute_dtype
from parplan.executor.tensors import forget_meshes, local
from parplan.executor.training.train import Trainer, build_trainer
from parplan.planner.plan.plan import Plan
from parplan.profiles.errors import PlannerError
from parplan.profiles.models.spec import Precision
from tests.helpers.executor_plans import GPT, LLAMA, make_plan
from tests.helpers.executor_world import OPTIONS, Worlds, run_reference, worst_gradient

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"),
]

FP16 = Precision.FP16
# fp16 keeps 11 bits, 8 times as exact as bf16: tests/helpers/executor_world.py
GRADIENT_TOLERANCE = 0.01
LOSS_TOLERANCE = 2e-4
NORM_TOLERANCE = 0.0025
HIGH = 2.0**60  # of the loss: its gradient is no number of 16 bits

PLANS = {
    "one-rank": make_plan(GPT, precision=FP16),
    "dp2": make_plan(LLAMA, dp=2, zero=(0, 3), precision=FP16),
    "pp2-tied": make_plan(GPT, pp=2, precision=FP16),
    "tp2-sp": make_plan(GPT, tp=2, sp=True, precision=FP16),
    "pp2-zbv": make_plan(LLAMA, pp=2, virtual_stages=2, schedule=Schedule.ZBV, precision=FP16),
}
SHORT = dataclasses.replace(GPT, num_layers=2)
SMALL = make_plan(dataclasses.replace(GPT, num_layers=1), precision=FP16)
SLOW = ("tp2-sp", "pp2-zbv", "dp2")


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    forget_meshes()  # a fork would forget them, and wait for the threads of their groups
    dist.destroy_process_group()


def trainer(plan: Plan = SMALL, **options: object) -> Trainer:
    return build_trainer(plan, dataclasses.replace(OPTIONS, **options), torch.device("cpu"))


def values(trained: Trainer) -> list[torch.Tensor]:
    return [local(parameter.detach()).clone() for parameter in trained.pipeline.parameters]


WORLDS = Worlds(PLANS, SLOW)


@pytest.mark.parametrize("name", WORLDS.params())
def test_a_plan_trains_like_fp32_and_holds_the_predicted_bytes(name):
    plan = PLANS[name]

    training_outcome = WORLDS.outcome(name)
    expected = run_reference(dataclasses.replace(plan, mesh=Mesh(pp=1, dp=1, tp=1)))

    error, parameter = worst_gradient(training_outcome, expected)
    assert 0 < error <= GRADIENT_TOLERANCE, parameter
    assert training_outcome.losses == pytest.approx(expected.losses, rel=LOSS_TOLERANCE)
    assert training_outcome.norms == pytest.approx(expected.norms, rel=NORM_TOLERANCE)
    assert all(predicted == measured for predicted, measured in training_outcome.states.values())


def test_every_product_is_in_fp16(alone):
    trained, seen = trainer(), set()
    for module in trained.pipeline.stages[0].modules():
        if not list(module.children()) and list(module.parameters(recurse=False)):
            module.register_forward_hook(lambda _, __, out: seen.add(out.dtype))

    trained.gradients(0)

    assert seen == {torch.float16} == {compute_dtype(FP16)}


@pytest.mark.parametrize("grows_after", [1, 3])
def test_the_scale_goes_where_torchs_own_goes(grows_after):
    theirs = torch.amp.GradScaler("cpu", growth_interval=grows_after)
    ours, parameter = LossScale(grows_after=grows_after), torch.nn.Parameter(torch.ones(1))
    optimizer, actual = torch.optim.SGD([parameter], lr=0.0), []
    for finite in (1, 1, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1):
        parameter.grad = theirs.scale(torch.ones(1)) if finite else torch.full((1,), torch.inf)
        theirs.step(optimizer)
        theirs.update()
        ours.settle(finite=bool(finite))
        actual.append((ours.value, theirs.get_scale()))

    assert len({scale for scale, _ in actual}) > 2
    assert [scale for scale, _ in actual] == [scale for _, scale in actual]
    assert torch.amp.GradScaler("cpu").state_dict()["scale"] == INITIAL


def test_a_scale_that_would_go_below_one_ends_the_run(alone):
    trained = trainer()
    trained.scale.states["value"].fill_(1.0)
    trained.gradients(0)
    trained.pipeline.parameters[0].grad[0, 0] = torch.nan

    with pytest.raises(PlannerError, match="not finite at a loss scale of 1"):
        trained.update(0)


def _overflows(plan: Plan) -> list[object]:
    """Runs three steps, of which the last is good.

    The first has far too high a scale; in the second only rank 1 meets an infinite gradient.
    """
    trained = trainer(plan)
    before = []
    actual = []
    trained.scale.states["value"].fill_(HIGH)
    for step in range(3):
        before.append(values(trained))
        trained.gradients(step)
        if step == 1 and dist.get_rank() == 1:
            local(trained.pipeline.parameters[0].grad).view(-1)[0] = torch.inf
        norm = trained.update(step).item()
        trained.scale.states["value"].fill_(INITIAL)
        same = all(
            torch.equal(old, new) for old, new in zip(before[-1], values(trained), strict=True)
        )
        actual.append((norm < torch.inf, same))
    return actual


def test_a_gradient_that_is_not_finite_on_one_rank_is_left_out_by_all():
    plans = [
        make_plan(SHORT, dp=2, zero=(0, 3), precision=FP16),
        make_plan(SHORT, pp=2, precision=FP16),
    ]
    for ranks in parity.run_ranks(plans, _overflows):
        assert ranks == [[(False, True), (False, True), (True, False)]] * 2


def test_a_step_that_was_left_out_halves_the_scale_and_training_goes_on(alone):
    trained, plain = trainer(steps=4), trainer(steps=4)
    trained.scale.states["value"].fill_(HIGH)
    steps = trained.run()
    first = next(steps)
    trained.scale.states["value"].fill_(INITIAL)
    rest = list(steps)

    assert (first.skipped, first.loss_scale) == (True, HIGH / 2)
    assert [(step.skipped, step.loss_scale) for step in rest] == [(False, INITIAL)] * 3
    assert trained.recorder.skipped == [0]
    # nothing was updated: step 1 has the loss that the first values give, and Adam begins there
    assert rest[0].loss == plain.gradients(1).item()
    assert [state["step"].item() for state in trained.optimizer.state.values()] == [3.0] * len(
        trained.optimizer.state
    )


def _train(steps: int, plan: Plan = SMALL, **options: object) -> tuple[list[object], LossScale]:
    trained = trainer(plan, steps=steps)
    if trained.scale:
        trained.scale.grows_after = 2
    saves = Checkpoints(
        trained, CheckpointOptions(**options), timeout=timedelta(seconds=60), note=lambda _: None
    )
    actual = [(result.loss, result.loss_scale) for result in trained.run(saves.resume())]
    saves.finish(steps)
    return actual, trained.scale


def test_scale_and_count_are_in_a_checkpoint_and_a_run_goes_on_bit_by_bit(alone, tmp_path):
    whole, at_end = _train(5)
    first, in_between = _train(3, directory=tmp_path)
    second, repeated = _train(5, directory=tmp_path)

    assert in_between.states["good_steps"].item() == 1
    assert first + second == whole
    assert repeated.states == at_end.states
    assert whole[-1][1] == 4 * INITIAL


def test_a_checkpoint_of_another_precision_is_gone_on_from_with_a_scale_of_its_own(alone, tmp_path):
    bf16 = make_plan(SMALL.model, precision=Precision.BF16)
    _train(1, plan=bf16, directory=tmp_path)

    actual, scale = _train(3, directory=tmp_path)
    after, _ = _train(4, plan=bf16, directory=tmp_path)

    assert len(actual) == 2
    assert scale.value == 2 * INITIAL
    assert [scale for _, scale in after] == [None]
