"""The plan of `--for` is the best of the settings that a launcher can say."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace
from operator import itemgetter

import pytest

from parplan.commands.options.target_options import TargetOptions
from parplan.commands.requests.launchers import with_launcher
from parplan.commands.requests.requests import request_of
from parplan.costmodels.schedules.schedule import Schedule
from parplan.planner.export.best_settings import as_said, best_settings
from parplan.planner.export.exported import export_plan
from parplan.planner.export.fields.configured import price_settings
from parplan.planner.export.fields.launcher import read_back
from parplan.planner.export.fields.settings import Settings, settings_of
from parplan.planner.export.targets import TARGETS, target_named
from parplan.planner.forbid import parse_bans
from parplan.planner.infeasible.shortfall import limit_bytes
from parplan.planner.plan.plan import Plan
from parplan.planner.request import Constraints, Request, SearchOptions
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import Precision
from tests.helpers.cases import mostly_slow
from tests.helpers.launcher_settings import changed

EXACT = 1e-9  # share of a step


def asked(launcher: str, model: str, gpus: int, gpu: str = "a100-80gb", **pins) -> Request:
    options = TargetOptions(model=model, gpus=gpus, gpu=gpu)
    request = request_of(with_launcher(options, launcher))
    return replace(request, constraints=Constraints(**pins))


def require_whole(plan, launcher: str) -> None:
    """The export of a plan loses nothing, to the last digits of its price."""
    exported = export_plan(plan, target_named(launcher), "plan.yaml")
    assert exported.losses == ()
    assert exported.configured.price.step_s == pytest.approx(exported.plan.price.step_s, rel=EXACT)
    assert exported.configured.peak_bytes == pytest.approx(exported.plan.peak_bytes, rel=EXACT)


def prices_of_changes(
    plan: Plan, request: Request, launcher: str, num_settings: int, seed: int
) -> list[tuple[float, Settings]]:
    """Returns the steps of random settings that fit, each the plan's after one change or many."""
    rng, target = random.Random(seed), target_named(launcher)
    limit = limit_bytes(request.cluster, request.training.stack, SearchOptions())
    found: dict[Settings, float] = {}
    for _ in range(100 * num_settings):
        if len(found) == num_settings:
            break
        settings = changed(settings_of(plan), rng.choice((1, 2, 3, 12)), rng, request, target)
        if settings in found or (settings.schedule is Schedule.ZBV and settings.zero == 3):
            continue
        with suppress(ConfigError):
            back = read_back(target, settings, request.model, request.cluster)
            if back.tp <= request.cluster.gpus_per_node:
                one = price_settings(back, request.model, request.cluster, request.training)
                if one.peak_bytes <= limit:
                    found[settings] = one.price.step_s
    return sorted(((step_s, settings) for settings, step_s in found.items()), key=itemgetter(0))


def require_best(
    launcher: str, model: str, gpus: int, gpu: str, num_settings: int, seed: int
) -> None:
    request = asked(launcher, model, gpus, gpu)
    plan = best_settings(request, target_named(launcher))
    require_whole(plan, launcher)
    prices = prices_of_changes(plan, request, launcher, num_settings, seed)
    least_s, settings = prices[0]
    least_allowed_s = plan.predicted.step_time_s.value * (1 - plan.search.gap) * (1 - 1e-5)
    print(
        f"{launcher} {model} {gpus}: gap {plan.search.gap:.4%}, best of {len(prices)} settings "
        f"{least_s / plan.search.value - 1:+.4%}"
    )
    assert len(prices) >= num_settings / 2
    assert least_s >= least_allowed_s, settings


@pytest.mark.parametrize("launcher", mostly_slow(["megatron", "torchtitan"], {"megatron"}))
def test_random_settings_of_a_launcher_are_no_faster_than_its_plan(launcher):
    model = {"megatron": "gpt-1.5b", "torchtitan": "llama3-8b"}[launcher]
    require_best(launcher, model, 8, "a100-80gb", num_settings=15, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "model", "gpus", "gpu", "num_settings"),
    [
        ("megatron", "gpt-20b", 64, "a100-80gb", 60),
        ("megatron", "llama3-70b", 128, "h100-80gb", 40),
        ("megatron", "mixtral-8x22b", 64, "h100-80gb", 40),
        ("megatron", "gpt-22b", 8, "a100-80gb", 40),
        ("megatron", "gpt-7.5b", 16, "v100-32gb", 40),
        ("torchtitan", "llama3-70b", 128, "h100-80gb", 40),
        ("torchtitan", "qwen3-30b-a3b", 32, "h100-80gb", 40),
        ("deepspeed", "gpt-20b", 64, "a100-80gb", 40),
    ],
)
def test_no_random_setting_of_many_is_faster(launcher, model, gpus, gpu, num_settings):
    require_best(launcher, model, gpus, gpu, num_settings, seed=1)


def test_what_settings_cannot_say_is_refused():
    with pytest.raises(ConfigError, match=r"gemma-2-9b has .*attention_soft_cap"):
        best_settings(asked("megatron", "gemma-2-9b", 8), target_named("megatron"))
    request = asked("megatron", "gpt-1.5b", 8, zero_by_operator=True)
    with pytest.raises(ConfigError, match="--zero-by-operator exclude each other"):
        best_settings(request, target_named("megatron"))


def test_pins_and_bans_hold_for_the_settings():
    pins = {"tp": (2,), "zero": (1, 3), "forbid": parse_bans(["zero=3", "recompute=none"])}
    plan = best_settings(asked("megatron", "gpt-2.5b", 8, **pins), target_named("megatron"))

    blocks = [each for each in plan.layer_plans.values() if each.layer is LayerKind.BLOCK]
    assert plan.mesh.tp == 2
    assert {block.zero for block in blocks} == {1}
    assert any(block.recompute for block in blocks)
    assert plan.search.launcher == "megatron"
    require_whole(plan, "megatron")


def test_a_launcher_has_its_own_precision_of_gradients():
    megatron = target_named("megatron")

    def in_bf16(*arguments):
        return replace(megatron.settings(*arguments), gradient_precision=Precision.BF16)

    request, target = asked("megatron", "gpt-1.5b", 8), replace(megatron, settings=in_bf16)
    said = as_said(request, target)

    assert said.training.gradient_precision is Precision.BF16
    assert "--gradient-precision bf16 (megatron's)" in said.assumed
    assert as_said(request, megatron) == request
    with pytest.raises(ConfigError, match="--gradient-precision fp32: megatron has bf16"):
        as_said(replace(request, assumed=()), target)


def test_an_overlap_of_tensor_parallelism_is_no_matter_without_it():
    plan = best_settings(asked("megatron-bridge", "gpt-1.5b", 8), target_named("megatron-bridge"))

    assert plan.mesh.tp == 1
    require_whole(plan, "megatron-bridge")


@pytest.mark.parametrize("launcher", list(TARGETS))
def test_what_a_launcher_says_of_a_training_depends_on_no_batch(launcher):
    request, target = asked(launcher, "llama3-8b", 16), target_named(launcher)
    fewer = replace(request, training=replace(request.training, global_batch_size=2))

    said, of_fewer = as_said(request, target), as_said(fewer, target)

    assert of_fewer.training == replace(said.training, global_batch_size=2)
