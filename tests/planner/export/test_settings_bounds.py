"""Bounds of a launcher's settings are below their prices, whatever stages they have."""

from __future__ import annotations

import random

import pytest

from parplan.commands.options.target_options import TargetOptions
from parplan.commands.requests.launchers import with_launcher
from parplan.commands.requests.requests import request_of
from parplan.costmodels.memory.rank_memory import occupied_bytes
from parplan.costmodels.step import price_step
from parplan.planner.baselines.optimum import rank_bytes
from parplan.planner.export.best_settings import LauncherFactory
from parplan.planner.export.launcher_space import LauncherSpace
from parplan.planner.export.settings_bounds import SettingsBounds
from parplan.planner.export.targets import target_named
from tests.helpers.cases import mostly_slow

ROUNDING = 1 + 1e-9
PLENTY = 1e15  # bytes


@pytest.mark.parametrize(
    ("launcher", "model"),
    mostly_slow(
        [
            ("megatron", "gpt-1.5b"),
            ("megatron", "deepseek-v2-lite"),
            ("torchtitan", "llama3-8b"),
            ("galvatron", "gpt-1.5b"),
            ("fsdp2", "gpt-1.5b"),
            ("deepspeed", "gpt-1.5b"),
        ],
        {("deepspeed", "gpt-1.5b")},
    ),
)
def test_no_stages_are_faster_or_leaner_than_the_bounds(launcher, model):
    target, rng = target_named(launcher), random.Random(7)
    request = request_of(with_launcher(TargetOptions(model=model, gpus=16), launcher))
    layouts = LauncherFactory(request, target).prices(()).space.layouts
    space = LauncherSpace(target, request, PLENTY)
    bounds = SettingsBounds(space)
    compared = 0
    for layout in rng.sample(layouts, 25):
        rows = [row for row in bounds.fitting(layout) if space.says(row.settings, layout)]
        for row in rng.sample(rows, min(4, len(rows))):
            settings, prices = row.settings, space.prices(row.settings)
            possible = tuple(bounds.possible_stages(row, layout, float("inf")))
            for strategy in [*space.strategies(settings, layout, possible, float("inf"))][:3]:
                compared += 1
                least = occupied_bytes(bounds.least_bytes(row, layout), layout.mesh, prices)
                ranks = range(layout.mesh.pp)
                assert least <= max(rank_bytes(strategy, r, prices) for r in ranks) * ROUNDING
                assert row.bound_s <= price_step(strategy, prices).step_s * ROUNDING

    assert compared > 10
