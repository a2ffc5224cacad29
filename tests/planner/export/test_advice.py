"""The single changes that gain most are named by the launcher's own arguments."""

from __future__ import annotations

import pytest

from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.export.advice import best_changes
from parplan.planner.export.exported import export_plan
from parplan.planner.export.targets import TARGETS
from parplan.planner.plan.reprice import reprice
from tests.helpers.laid_out_plans import laid_out


def advised(plan, name="megatron"):
    target = TARGETS[name]
    file, text = next(iter(export_plan(plan, target, "plan.yaml").files.items()))
    given = target.arguments(text, file)
    settings = target.settings(given, plan.model, plan.cluster.num_gpus)
    return best_changes(reprice(plan).plan, settings, target)


def test_needless_recompute_is_the_first_thing_to_change():
    plan = laid_out("llama3-8b", pp=2, dp=2, tp=2, recompute=Recompute.FULL)
    first, *others = advised(plan)

    assert first.arguments[0] == ("--recompute-granularity", ("full",), None)
    steps = [each.configured.price.step_s for each in (first, *others)]
    assert steps == sorted(steps)
    assert steps[-1] < plan.predicted.step_time_s.value


def test_a_change_has_the_price_of_the_plan_with_it():
    plan = laid_out("llama3-8b", pp=2, dp=2, tp=2, recompute=Recompute.FULL)
    first, *_ = advised(plan)
    without = laid_out("llama3-8b", pp=2, dp=2, tp=2)

    assert first.configured.price.step_s == pytest.approx(
        without.predicted.step_time_s.value, rel=1e-5
    )


def test_what_does_not_fit_is_advised_to_fit_even_if_slower():
    plan = laid_out(
        "llama3-8b", dp=4, tp=2, micro_batch_size=8, num_micro_batches=2, seq_length=4096
    )
    changes = advised(plan)

    assert any(stage.total > stage.capacity for stage in plan.predicted.memory_gib)
    assert changes
    capacity = plan.predicted.memory_gib[0].capacity * 2**30
    assert all(each.configured.peak_bytes <= capacity for each in changes)
