"""A plan has a price at every launcher, that of its export."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.planner.export.exported import export_plan
from parplan.planner.export.launcher_prices import LauncherPrice, launcher_prices
from parplan.planner.export.targets import TARGETS, target_of
from parplan.profiles.units import GIB
from parplan.report.plans.launcher_lines import launcher_lines
from tests.helpers.laid_out_plans import laid_out


@pytest.mark.slow
def test_a_plan_at_a_launcher_has_the_price_of_its_export():
    plan = laid_out("gpt-2.5b", dp=4, tp=2)

    prices = {each.name: each for each in launcher_prices(plan, TARGETS.values())}

    one = export_plan(plan, TARGETS["deepspeed"], "plan.yaml")
    assert set(prices) == set(TARGETS)
    assert prices["megatron"].slower == pytest.approx(0.0, abs=1e-9)
    assert prices["deepspeed"].peak_bytes == one.configured.peak_bytes
    assert prices["deepspeed"].slower == pytest.approx(
        one.configured.price.step_s / one.plan.price.step_s - 1
    )
    assert prices["torchtitan"].refused.startswith("torchtitan has no configuration of gpt-2.5b")


def test_ranks_that_share_states_say_nothing_where_no_states_are_shared():
    plan = laid_out(dp=2, zero=0)
    of_ranks = {key: replace(each, zero_ranks=5) for key, each in plan.layer_plans.items()}
    targets = (TARGETS["accelerate"],)

    prices = launcher_prices(replace(plan, layer_plans=of_ranks), targets)

    assert prices == launcher_prices(plan, targets)


def test_the_lines_say_runs_first_and_refusals_below():
    plan = laid_out("gpt-2.5b", dp=4, tp=2)
    targets = (TARGETS["torchtitan"], TARGETS["megatron"])

    first, second = launcher_lines(launcher_prices(plan, targets), 100)

    assert first.startswith("  launchers these settings at megatron +0.0 %, ")
    assert " ".join(second.split()) == (
        "torchtitan: torchtitan has no configuration of gpt-2.5b that is known"
    )


def test_a_launcher_whose_settings_are_faster_is_worth_a_search():
    prices = (LauncherPrice(name="megatron", slower=-0.019, peak_bytes=73.6 * GIB),)

    (line,) = launcher_lines(prices, 120)

    assert line.endswith("megatron -1.9 %, 73.6 GiB (faster: --for megatron searches its settings)")


def test_a_launcher_whose_settings_do_not_fit_is_said_to_search_others():
    (price,) = launcher_prices(laid_out("gpt-20b", dp=8), [TARGETS["megatron"]])

    (line,) = launcher_lines([price], 120)

    assert price.missing_bytes > 0
    assert line.endswith("GiB (does not fit: --for megatron searches settings that do)")


def test_a_stack_names_its_launcher():
    assert target_of("megatron-core") is TARGETS["megatron"]
    assert target_of("torchtitan") is TARGETS["torchtitan"]
    assert target_of("parplan") is None
