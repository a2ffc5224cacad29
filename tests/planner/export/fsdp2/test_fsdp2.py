"""The exported program of PyTorch's own parts trains as the executor does."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn
from torch.distributed.tensor import distribute_tensor

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.executor.checking.parity import OPTIONS, reference_layers, run_ranks
from parplan.planner.export.fields.arguments import Given
from parplan.planner.export.fields.launcher import Sheet
from parplan.planner.export.fields.settings import settings_of
from parplan.planner.export.fsdp2.fsdp2 import FSDP2
from parplan.planner.plan.plan import Plan
from parplan.profiles.errors import ConfigError
from parplan.profiles.stack import ContextForm
from tests.helpers.executor_plans import GPT, LLAMA, make_plan
from tests.helpers.executor_world import run_plans
from tests.helpers.laid_out_plans import laid_out

TOLERANCE = 1e-5
SELECTIVE = ("norm1", "norm2", "activation")
PLANS = {"pipeline": make_plan(GPT, pp=2, dp=2, zero=(2,), blocks=(1, 3))}
MORE = {
    "tensor-and-recompute": make_plan(
        LLAMA, dp=2, tp=2, sp=True, zero=(3,), recompute="full", recompute_ends=False
    ),
    "zero-3": make_plan(LLAMA, dp=4, zero=(3,)),
    "zero-2": make_plan(GPT, dp=4, zero=(2,)),
    "each-block": make_plan(GPT, dp=4, zero=(2, 3)),
    "copies": make_plan(GPT, dp=4, zero=(0,)),
    "tensor-without-sequence": make_plan(GPT, dp=2, tp=2, zero=(2,), recompute=SELECTIVE),
    "context": make_plan(LLAMA, dp=2, cp=2, form=ContextForm.ALL_TO_ALL, zero=(3,)),
    "interleaved": make_plan(
        LLAMA,
        pp=2,
        dp=2,
        zero=(2,),
        virtual_stages=2,
        schedule=Schedule.INTERLEAVED,
        recompute=SELECTIVE,
    ),
    "tensor-in-a-pipeline": make_plan(GPT, pp=2, tp=2, sp=True, zero=(0,)),
}


def exported_files(plan: Plan) -> dict[str, str]:
    """The files of a plan that is written by hand, without a price."""
    full = next(each for each in plan.layer_plans.values() if each.layer == "block").recompute
    level = {0: Recompute.NONE, len(SELECTIVE): Recompute.SELECTIVE}.get(len(full), Recompute.FULL)
    chosen = replace(settings_of(plan), recompute=level)
    if plan is MORE["each-block"]:  # recompute changes no value
        levels = (Recompute.FULL, Recompute.NONE, Recompute.NONE, Recompute.SELECTIVE)
        chosen = replace(chosen, zero=2, zero_of_blocks=(2, 3, 2, 3), recompute_of_blocks=levels)
    return dict(FSDP2.files(Sheet(settings=chosen, plan=plan, head=())))


def program(folder: str) -> ModuleType:
    sys.path.insert(0, folder)
    return importlib.import_module("train_fsdp2")


def load_reference(stage: nn.Module, plan: Plan) -> None:
    """Gives a stage of the program the values that the executor starts from."""
    ends = ("embedding", "head")
    layers = reference_layers(plan.model, plan.training, OPTIONS.seed)
    blocks = (name for name in layers if name not in ends)
    names = {name: f"blocks.{number}" for number, name in enumerate(blocks)}
    values = {
        f"{names.get(layer, layer)}.{name}": parameter.detach()
        for layer, module in layers.items()
        for name, parameter in module.named_parameters()
    }
    for name, parameter in stage.named_parameters():
        whole = distribute_tensor(values[name], parameter.device_mesh, parameter.placements)
        parameter.data.to_local().copy_(whole.to_local())


def train(plan: Plan) -> list[tuple[float, float]]:
    """The losses and gradient norms of the program on this rank."""
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    with tempfile.TemporaryDirectory() as folder:
        for name, text in exported_files(plan).items():
            Path(folder, name).write_text(text)
        started = program(folder)
        settings = started.read_settings(Path(folder, "fsdp2.yaml"))
    build = started.build_stage

    def build_as_the_executor(*arguments: Any) -> Any:
        stage = build(*arguments)
        load_reference(stage, plan)
        return stage

    started.build_stage = build_as_the_executor
    options = argparse.Namespace(
        steps=OPTIONS.steps,
        seed=OPTIONS.seed,
        data=None,
        data_type="uint16",
        learning_rate=OPTIONS.learning_rate,
        weight_decay=OPTIONS.weight_decay,
        clip_gradients=OPTIONS.clip_gradients,
    )
    try:
        return list(started.train(settings, options))
    finally:
        started.build_stage = build


def require_same_losses(plans: dict[str, Plan]) -> None:
    theirs = run_plans(list(plans.values()))
    for name, expected, by_rank in zip(
        plans, theirs, run_ranks(list(plans.values()), train), strict=True
    ):
        for steps in by_rank:
            losses, norms = zip(*steps, strict=True)
            assert losses == pytest.approx(expected.losses, rel=TOLERANCE), name
            assert norms == pytest.approx(expected.norms, rel=TOLERANCE), name


@pytest.mark.slow
@pytest.mark.multiproc
def test_the_program_trains_as_the_executor_on_four_ranks():
    require_same_losses(PLANS)


@pytest.mark.slow
@pytest.mark.multiproc
def test_the_program_trains_as_the_executor_on_more_meshes():
    require_same_losses(MORE)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("sharding.depth: 2", "sharding.depth is no key of the program", id="unknown"),
        pytest.param("mesh.tensor: 3", "tensor 3 does not divide the 2", id="heads"),
        pytest.param("mesh.context: 3", "context 3 does not divide the 4 heads", id="context"),
        pytest.param("pipeline.schedule: Interleaved1F1B", "does not run 1 stages", id="schedule"),
    ],
)
def test_settings_that_the_program_refuses_are_errors(text, message):
    name, _, word = text.partition(": ")
    given = FSDP2.arguments(exported_files(MORE["zero-3"])["fsdp2.yaml"], "fsdp2.yaml")

    with pytest.raises(ConfigError, match=message):
        FSDP2.settings((*given, Given(name, (word,), "fsdp2.yaml:3")), LLAMA, 4)


@pytest.mark.parametrize("words", [("maybe",), ("2 true", "1 false"), ("4",), ("x true",)])
def test_values_that_are_not_of_all_blocks_are_errors(words):
    given = FSDP2.arguments(exported_files(MORE["zero-3"])["fsdp2.yaml"], "fsdp2.yaml")
    changed = Given("sharding.reshard_after_forward", words, "fsdp2.yaml:30")

    with pytest.raises(ConfigError, match=r"fsdp2.yaml:30: .* true or false is needed"):
        FSDP2.settings((*given, changed), LLAMA, 4)


def test_the_file_says_the_model():
    given = FSDP2.arguments(exported_files(MORE["zero-3"])["fsdp2.yaml"], "fsdp2.yaml")
    model = FSDP2.model(given, LLAMA.name, "fsdp2.yaml")

    assert replace(model, functions=LLAMA.functions) == LLAMA


@pytest.mark.parametrize("model", ["mixtral-8x7b", "gemma-2-9b"])
def test_a_model_that_the_program_does_not_build_is_refused(model):
    plan = laid_out(model, dp=2)

    with pytest.raises(ConfigError, match="which the program does not build"):
        FSDP2.files(Sheet(settings=settings_of(plan), plan=plan, head=()))
