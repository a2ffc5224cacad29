"""A loss or gradient that is not finite on any rank ends the run on all of them.

The mesh and the model make no difference.
"""

from __future__ import annotations

import dataclasses
import math
import sys

import pytest
import torch
import torch.distributed as dist

from parplan.executor.__main__ import run as run_executor
from parplan.executor.checking.parity import OPTIONS, run_ranks
from parplan.executor.tensors import forget_meshes, local
from parplan.executor.traced.traced_trainer import build_traced_trainer
from parplan.executor.training.finite import _ranks
from parplan.executor.training.train import Trainer, build_trainer
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.plan_file import write_plan
from parplan.planner.plan.traced_plan import TracedPlan
from parplan.profiles.errors import RunError
from parplan.profiles.models.spec import Precision
from tests.helpers.executor_plans import GPT, LLAMA, make_plan
from tests.helpers.external_modules import factory_plan
from tests.helpers.traced_plans import hand_plan

pytestmark = pytest.mark.filterwarnings(
    "ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"
)

SHORT = dataclasses.replace(GPT, num_layers=2)
STRICT = dataclasses.replace(OPTIONS, allow_non_finite=False)


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    forget_meshes()
    dist.destroy_process_group()


def trainer(plan: Plan | TracedPlan, **options: object) -> Trainer:
    build = build_traced_trainer if isinstance(plan, TracedPlan) else build_trainer
    return build(plan, dataclasses.replace(STRICT, **options), torch.device("cpu"))


@torch.no_grad()
def spoil(trained: Trainer) -> None:
    """A parameter of this rank."""
    local(trained.pipeline.parameters[0]).fill_(math.nan)


def _spoilt_on_rank_1(plan: Plan | TracedPlan) -> tuple[int, str]:
    """The number of steps made, and the error that ended them."""
    trained, done = trainer(plan), 0
    try:
        for _ in trained.run():
            done += 1
            if dist.get_rank() == 1:
                spoil(trained)
    except RunError as error:
        return done, error.message
    return done, "went on"


@pytest.mark.slow
@pytest.mark.multiproc
def test_all_ranks_end_with_the_same_error_on_every_mesh_and_kind_of_model():
    # the first parameter of rank 1; a shard is gathered by both ranks, and the loss of a pipeline
    # is its last stage's
    plans = {
        "pp2": (make_plan(SHORT, pp=2), "rank 1"),
        "dp2": (make_plan(SHORT, dp=2), "rank 1"),
        "dp2-zero3": (make_plan(SHORT, dp=2, zero=(3,)), "ranks 0-1"),
        "tp2": (make_plan(LLAMA, tp=2), "rank 0"),
        "foreign-pp2": (factory_plan("small", pp=2), "rank 1"),
        "traced-pp2": (hand_plan("tests.helpers.traced_modules:shares", pp=2), "rank 1"),
    }
    actual = run_ranks([plan for plan, _ in plans.values()], _spoilt_on_rank_1)

    for (name, (_, ranks)), (first, second) in zip(plans.items(), actual, strict=True):
        assert first == second, name
        done, message = first
        assert done == 1, name
        assert message.startswith(
            f"step 2: the loss is nan, from {ranks}; the gradient norm is nan, from rank"
        ), (name, message)


def test_a_gradient_alone_ends_the_run_too(alone):
    trained = trainer(make_plan(SHORT))
    trained.pipeline.parameters[0].register_hook(lambda gradient: gradient * math.inf)

    with pytest.raises(
        RunError, match=r"^step 1: the gradient norm is (nan|inf), from rank 0; it must be finite"
    ) as error:
        next(trained.run())

    assert "--allow-non-finite" in error.value.hint


def test_what_is_not_finite_is_gone_on_with_where_that_is_asked_for(alone):
    trained = trainer(make_plan(SHORT), allow_non_finite=True)
    spoil(trained)

    assert [math.isfinite(result.loss) for result in trained.run()] == [False] * STRICT.steps


def test_a_scaled_gradient_costs_its_step_and_a_loss_the_run(alone):
    trained = trainer(make_plan(SHORT, precision=Precision.FP16))
    trained.scale.states["value"].fill_(2.0**60)
    steps = trained.run()

    skipped = next(steps)
    spoil(trained)

    assert skipped.skipped
    with pytest.raises(RunError, match="step 2: the loss is nan, from rank 0; it must be finite"):
        next(steps)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ((0, 0), "the sum over all ranks"),
        ((0, 1), "rank 1"),
        ((1, 1, 0, 1), "ranks 0-1, 3"),
        ((1, 0, 1, 1, 1), "ranks 0, 2-4"),
    ],
)
def test_ranks_are_named_in_runs(flags, text):
    assert _ranks(flags) == text


def test_the_command_ends_with_its_own_exit_code_and_keeps_the_checkpoint_before(
    tmp_path, monkeypatch, capsys
):
    path, saves = tmp_path / "plan.yaml", tmp_path / "saves"
    write_plan(make_plan(SHORT), path)
    arguments = ["executor", str(path), "--steps", "4", "--learning-rate", "1e38", "--no-record"]
    monkeypatch.setattr(
        sys, "argv", [*arguments, "--checkpoint-dir", str(saves), "--checkpoint-every", "1"]
    )

    code = run_executor()
    out, err = capsys.readouterr()
    monkeypatch.setattr(sys, "argv", [*arguments, "--allow-non-finite"])
    regardless = run_executor()

    assert code == 5, err
    assert out.count("loss") == 1
    assert err.startswith("error: step 2: the loss is ")
    assert [saved.name for saved in saves.iterdir()] == ["step-000001"]
    assert regardless == 0
    assert capsys.readouterr().out.count("loss") == 4
