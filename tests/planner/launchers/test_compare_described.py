"""The best Megatron-LM of a comparison is the plan of `--for megatron`, with all its switches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.commands.options.target_options import TargetOptions
from parplan.commands.requests.launchers import with_launcher
from parplan.commands.requests.requests import request_of
from parplan.planner.baselines.systems import price_baseline
from parplan.planner.export.best_settings import best_settings
from parplan.planner.export.targets import target_named
from parplan.planner.infeasible.shortfall import limit_bytes, price_cache_of
from parplan.planner.launchers.compare_described import BEST, best_megatron, compare
from parplan.planner.objective import Prefer
from parplan.planner.request import Request, SearchOptions
from parplan.planner.search.what_if import request_of_plan
from parplan.report.searches.comparison_tables import flags_of
from tests.helpers.laid_out_plans import laid_out

EXACT = 1e-9


def asked(model: str, gpus: int, gpu: str = "h100-80gb", batch: int | None = None) -> Request:
    target = TargetOptions(model=model, gpus=gpus, gpu=gpu, global_batch_size=batch)
    return request_of(with_launcher(target, "megatron"))


def enumerated_s(request: Request) -> float:
    """Returns the step of the strategies of equal stages, which have no switch."""
    limit = limit_bytes(request.cluster, request.training.stack, request.options)
    optimum = price_baseline(BEST, price_cache_of(request), limit).optimum
    return optimum.price.step_s if optimum else float("inf")


@pytest.mark.parametrize(
    ("model", "gpus", "switches"),
    [
        pytest.param("gpt-2.5b", 8, (), id="data-parallelism-has-no-switch"),
        pytest.param(
            "deepseek-v2-lite",
            16,
            ("--moe-token-dispatcher-type flex", "--overlap-moe-expert-parallel-comm"),
            id="experts",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_row_is_the_plan_of_the_launcher(model: str, gpus: int, switches: tuple[str, ...]):
    request = asked(model, gpus, batch=64)
    plan = best_settings(request, target_named("megatron"))

    comparison = compare(plan, (BEST,))

    (row,) = comparison.rows
    assert row.side is not None
    assert row.side.step_s == pytest.approx(plan.predicted.step_time_s.value, abs=1e-6)
    assert row.side.step_s == pytest.approx(comparison.ours.step_s, rel=EXACT)
    assert row.side.fullest.total == pytest.approx(comparison.ours.fullest.total, rel=EXACT)
    assert all(switch in flags_of(row) for switch in switches)
    assert row.side.step_s <= enumerated_s(request) * (1 + EXACT)


@pytest.mark.slow
def test_tensor_parallelism_hides_its_communication_at_the_prices_of_any_stack():
    """Few sequences on one node of small GPUs need tensor parallelism, or stages."""
    plan = laid_out("llama2-7b", tp=4, gpu="a100-40gb", stack="parplan", num_micro_batches=2)
    request = request_of_plan(plan)

    (row,) = compare(plan, (BEST,)).rows

    assert row.side is not None
    theirs = row.side.plan.training
    assert theirs.stack.name == "parplan"
    assert theirs.stack.overlap_tensor_parallel
    assert "--tp-comm-overlap" in flags_of(row)
    assert theirs.stack.flash_kernels == plan.training.stack.flash_kernels
    assert row.side.step_s < enumerated_s(request)


@pytest.mark.slow
def test_a_preference_of_ours_does_not_leave_the_best_megatron_out():
    request = asked("gpt-1.5b", 4, "a100-80gb", batch=16)
    lean = replace(request, options=SearchOptions(prefer=Prefer.LEANEST))

    row, free = best_megatron(lean), best_megatron(request)

    assert row is not None
    assert free is not None
    assert row.side == free.side


@pytest.mark.slow
def test_a_tower_has_the_row_of_strategies_that_no_argument_says():
    plan = laid_out("gemma-3-4b", dp=8, num_micro_batches=1)
    request = request_of_plan(plan)

    assert best_megatron(request) is None
    (row,) = compare(plan, (BEST,)).rows
    assert row.side is not None
    assert row.side.step_s == pytest.approx(enumerated_s(request), rel=EXACT)


@pytest.mark.slow
def test_what_fits_in_no_setting_says_what_its_leanest_strategy_lacks():
    tight = SearchOptions(memory_limit_bytes=2 * 2**30)

    (row,) = compare(laid_out("gpt-1.5b", dp=4), (BEST,), tight).rows

    assert row.side is None
    assert row.baseline is not None
    assert row.baseline.leanest is not None
