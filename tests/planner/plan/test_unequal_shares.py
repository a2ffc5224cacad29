"""Data-parallel ranks with unequal shares of the batch, in a plan, its file and its price."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.schedules.schedule import Schedule
from parplan.planner.export.exported import export_plan
from parplan.planner.export.targets import target_named
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.plan_file import plan_from_document, plan_to_document
from parplan.planner.plan.reprice import reprice
from parplan.profiles.errors import ConfigError
from tests.helpers.synthetic_runs import estimated


def shared(*shares: int, batch: int | None = None, **changes: object) -> Plan:
    """A plan whose equal shares are replaced, with a batch that they fill."""
    like = estimated(pp=2, dp=2, zero=1, num_micro_batches=6)
    sequences = like.pipeline.micro_batch_size * sum(shares) if batch is None else batch
    return replace(
        like,
        training=replace(like.training, global_batch_size=sequences),
        pipeline=replace(like.pipeline, micro_batches_of_replicas=shares, **changes),
    )


def test_the_file_says_them_only_where_they_differ():
    plan = shared(6, 2)
    body = plan_to_document(plan)
    assert list(body["pipeline"]["micro_batches_of_replicas"]) == [6, 2]
    assert plan_from_document(body, "file") == plan
    assert "micro_batches_of_replicas" not in plan_to_document(estimated(dp=2))["pipeline"]


def test_on_equal_devices_the_rank_with_the_most_sets_time_and_memory():
    plan = shared(6, 2)
    today, like = reprice(plan), reprice(estimated(pp=2, dp=2, zero=1, num_micro_batches=6))
    assert today.price.step_s == like.price.step_s
    assert today.price.memory == like.price.memory
    assert today.plan.pipeline == plan.pipeline
    speed = today.plan.predicted.tokens_per_s_per_gpu.value
    assert speed == pytest.approx(like.plan.predicted.tokens_per_s_per_gpu.value * 8 / 12, 1e-5)


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({}, (2, 3, 5)),
        ({"schedule": Schedule.GPIPE}, (2, 3, 5)),
        ({"virtual_stages": 3}, (2, 4, 8)),
    ],
)
def test_a_step_of_more_micro_batches_is_longer(changes, counts):
    plans = [estimated(pp=2, dp=2, zero=2, num_micro_batches=m, **changes) for m in counts]
    steps_s = [reprice(plan).price.step_s for plan in plans]

    assert steps_s[0] < steps_s[1] < steps_s[2]


@pytest.mark.parametrize(
    ("shares", "changes", "message"),
    [
        ((6, 2), {"num_micro_batches": 5}, "has 2 to 6, the least must be 1 or more and the most"),
        ((6, 0), {}, "has 0 to 6, the least must be 1"),
        ((6, 6), {}, "has 6 for all of them"),
        ((6, 2), {"schedule": Schedule.CUSTOM, "actions": ("0F0", "1F0")}, "schedule custom"),
    ],
)
def test_shares_that_no_pipeline_has_are_refused(shares, changes, message):
    with pytest.raises(ConfigError, match=message):
        shared(*shares, **changes)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (lambda: shared(6, 2, 3), "micro_batches_of_replicas has 3, with dp 2"),
        (lambda: shared(6, 2, batch=24), r"6 \+ 2 micro-batches of 2 on dp 2 are 16 sequences"),
        (
            lambda: shared(6, 3, schedule=Schedule.INTERLEAVED, virtual_stages=2),
            "multiples of the 2 pipeline ranks, found 3",
        ),
    ],
)
def test_a_file_whose_shares_do_not_fit_is_refused(plan, message):
    with pytest.raises(ConfigError, match=message):
        plan_from_document(plan_to_document(plan()), "file")


def test_no_launcher_says_them_and_the_hint_names_the_nearest_plan():
    message = "have 2 to 6 micro-batches, megatron gives all of them the same"
    with pytest.raises(ConfigError, match=message) as refused:
        export_plan(shared(6, 2), target_named("megatron"), "plan.yaml")
    assert "set micro_batch_size to 2 and num_micro_batches to 4 and leave" in refused.value.hint
