"""A stage holds the messages that are in flight and no others, and trains all the same."""

from __future__ import annotations

import dataclasses

import pytest
from torch.distributed.pipelining import PipelineStage

from parplan.costmodels.schedules.schedule import Schedule
from parplan.executor.checking.dry_run_workers import dry_runs
from parplan.executor.pipeline import pipeline
from parplan.executor.pipeline.runtime import PipelineStep
from parplan.planner.plan.plan import Plan
from tests.helpers.executor_plans import GPT, LLAMA, SEQ_LENGTH, make_plan
from tests.helpers.executor_world import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    run_plans,
    run_reference,
    worst_gradient,
)

pytestmark = pytest.mark.multiproc

_OVERRIDDEN = (
    "_setup_forward_recv_info",
    "_setup_backward_recv_info",
    "_get_recv_ops",
    "backward_one_chunk",
)
BORDER_BYTES = SEQ_LENGTH * LLAMA.hidden_size * 4  # of a micro-batch of one sequence in fp32


def interleaved(num_micro_batches: int) -> Plan:
    return make_plan(
        LLAMA,
        pp=2,
        schedule=Schedule.INTERLEAVED,
        virtual_stages=2,
        num_micro_batches=num_micro_batches,
        global_batch_size=num_micro_batches,
    )


def growth(monkeypatch) -> int:
    """Bytes that eight more micro-batches add to what rank 0 holds."""
    monkeypatch.setattr(
        "parplan.executor.checking.dry_run.counted_micro_batches",
        lambda plan, _: (plan.pipeline.num_micro_batches,),
    )
    return (
        dry_runs(interleaved(14), (0,))[0].use.activations
        - dry_runs(interleaved(6), (0,))[0].use.activations
    )


@pytest.mark.slow
def test_more_micro_batches_hold_no_more_messages(monkeypatch):
    ids = 2 * 8 * SEQ_LENGTH * 8  # of eight sequences and their targets, in int64

    assert growth(monkeypatch) == ids


@pytest.mark.slow
def test_torchs_own_stage_holds_a_buffer_for_every_message_of_the_step(monkeypatch):
    buffers = {name: getattr(PipelineStage, name) for name in _OVERRIDDEN}
    stage = type("Stage", (PipelineStep,), buffers)
    monkeypatch.setattr(pipeline, "PipelineStep", stage)

    # rank 0 receives an activation and two gradients of every micro-batch
    assert growth(monkeypatch) >= 8 * 3 * BORDER_BYTES


def test_stages_that_make_their_buffers_late_train_like_one_process():
    plans = [
        make_plan(dataclasses.replace(GPT, num_layers=2), pp=2, num_micro_batches=4),
        interleaved(4),
    ]

    for plan, run_plan in zip(plans, run_plans(plans), strict=True):
        expected = run_reference(plan)
        assert worst_gradient(run_plan, expected)[0] <= GRADIENT_TOLERANCE
        assert run_plan.losses == pytest.approx(expected.losses, rel=LOSS_TOLERANCE)
