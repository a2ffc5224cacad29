"""Switches of Megatron-Core never cost a step or memory in the prices, and `--for` has them on."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from parplan.commands.options.target_options import TargetOptions
from parplan.commands.requests.launchers import with_launcher
from parplan.commands.requests.requests import request_of
from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.export.best_settings import LauncherFactory, as_said, best_settings
from parplan.planner.export.exported import export_plan
from parplan.planner.export.fields.configured import price_settings
from parplan.planner.export.fields.settings import settings_of
from parplan.planner.export.launcher_notes import unpriced_memory
from parplan.planner.export.launcher_space import LauncherSpace
from parplan.planner.export.megatron.megatron_switches import SWITCHES, TENSOR_OVERLAP
from parplan.planner.export.shared_search import SharedSearch
from parplan.planner.export.targets import target_named
from parplan.planner.request import Constraints
from parplan.profiles.errors import ConfigError
from tests.helpers.cases import mostly_slow

ROUNDING = 1 + 1e-9


def asked(launcher: str, model: str, gpus: int, gpu: str = "h100-80gb", **pins):
    options = TargetOptions(model=model, gpus=gpus, gpu=gpu)
    request = request_of(with_launcher(options, launcher))
    return replace(request, constraints=Constraints(**pins))


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", mostly_slow(["gpt-2.5b", "mixtral-8x7b", "deepseek-v2-lite"], {"gpt-2.5b"})
)
def test_no_settings_are_slower_or_hold_more_with_a_switch(model):
    target, rng = target_named("megatron"), random.Random(3)
    request = asked("megatron", model, 16)
    space = LauncherSpace(target, request, 1e15)
    layouts = LauncherFactory(request, target).prices(()).space.layouts
    changed = 0
    for layout in rng.sample([each for each in layouts if space.listed(each)], 25):
        kinds = [kind for kind, _ in space.kinds(layout)]
        settings = replace(rng.choice(kinds), blocks=space.listed(layout)[0])
        on = price_settings(settings, request.model, request.cluster, request.training)
        for switch in SWITCHES:
            without = replace(settings, **{switch.fact: False})
            off = price_settings(without, request.model, request.cluster, request.training)
            assert on.price.step_s <= off.price.step_s * ROUNDING
            assert on.peak_bytes <= off.peak_bytes * ROUNDING
            changed += on.price.step_s < off.price.step_s
            if switch.idle(settings):
                assert on.price.step_s == pytest.approx(off.price.step_s, rel=1e-12)
    assert changed


@pytest.mark.parametrize("launcher", ["megatron", "megatron-bridge"])
def test_the_overlap_of_tensor_parallelism_is_in_the_plan_its_files_and_its_notes(launcher):
    request = asked(launcher, "gpt-2.5b", 8, tp=(4,), sequence_parallel=(True,))
    target = target_named(launcher)
    plan = best_settings(request, target)

    assert plan.training.stack.overlap_tensor_parallel
    exported = export_plan(plan, target, "plan.yaml")
    text = next(iter(exported.files.values()))
    assert ("--tp-comm-overlap" in text) or ("model.tp_comm_overlap=true" in text)
    assert exported.losses == ()
    assert any(note.startswith(TENSOR_OVERLAP.name) for note in unpriced_memory(plan))
    without = replace(settings_of(plan), tp_overlap=False)
    slower = price_settings(without, request.model, request.cluster, request.training)
    assert slower.price.step_s > plan.predicted.step_time_s.value


@pytest.mark.slow
def test_exchanges_of_experts_are_hidden_where_blocks_do_not_recompute_in_full():
    request = asked("megatron", "deepseek-v2-lite", 16, ep=(8,), micro_batch_size=(1,), pp=(1,))
    target = target_named("megatron")
    plan = best_settings(request, target)
    settings = settings_of(plan)

    assert settings.tokens_once
    assert settings.overlap_exchanges
    assert settings.recompute is not Recompute.FULL
    script = export_plan(plan, target, "plan.yaml")
    assert script.losses == ()
    assert "--overlap-moe-expert-parallel-comm" in script.files["megatron.sh"]
    assert "--moe-token-dispatcher-type flex" in script.files["megatron.sh"]
    full = best_settings(
        replace(request, constraints=replace(request.constraints, recompute=(Recompute.FULL,))),
        target,
    )
    assert not full.training.stack.overlap_exchanges


@pytest.mark.slow
def test_a_gpu_without_transformer_engine_or_deep_ep_has_no_such_switch():
    request = asked("megatron", "gpt-2.5b", 8, "v100-32gb", tp=(2,), sequence_parallel=(True,))

    plan = best_settings(request, target_named("megatron"))

    assert not plan.training.stack.overlap_tensor_parallel
    assert not [*unpriced_memory(plan)]


@pytest.mark.slow
def test_searches_that_share_prices_find_the_same_plans():
    shared = SharedSearch()
    for launcher in ("megatron", "megatron-bridge", "fsdp2", "huggingface", "accelerate"):
        request, target = asked(launcher, "gpt-2.5b", 8), target_named(launcher)
        alone = best_settings(request, target)
        assert best_settings(request, target, shared=shared) == alone


def test_a_model_or_a_precision_without_words_is_refused_before_the_search():
    with pytest.raises(ConfigError, match=r"torchtitan has no configuration of gpt-2\.5b"):
        as_said(asked("torchtitan", "gpt-2.5b", 8), target_named("torchtitan"))
    with pytest.raises(ConfigError, match="fsdp2 does not say precision fp16"):
        as_said(asked("fsdp2", "gpt-2.5b", 8, "v100-32gb"), target_named("fsdp2"))
