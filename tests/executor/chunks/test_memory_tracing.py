"""The first steps of a run measure the memory outside of chunks, and correct their schedule."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial

import pytest
import torch

from parplan.commands import user_modules
from parplan.costmodels.chunks import chunk_schedule, measured_bytes
from parplan.costmodels.chunks.chunk_budget import NonChunkBytes, non_chunk_bytes
from parplan.costmodels.chunks.measured_bytes import ChunkScheduler, by_moment, no_bytes
from parplan.costmodels.schedules.schedule import Schedule
from parplan.executor.checking.parity import run_ranks
from parplan.executor.run_options import Options
from parplan.executor.traced.traced_trainer import build_traced_trainer
from parplan.executor.training.train import Trainer, build_trainer
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.plan_chunks import chunk_schedulers_of
from parplan.planner.runs.run_file import MemoryTrace, PlannedAndCorrected
from parplan.planner.search.estimate import ChunkRequest
from parplan.planner.traced.traced_chunks import chunk_schedulers
from parplan.profiles.errors import ConfigError, InfeasibleError
from parplan.profiles.models.spec import Precision
from tests.executor.traced.test_traced_chunks import made
from tests.helpers.chunked_runs import chunked_plan, smallest
from tests.helpers.executor_plans import GPT

STEPS = 5
TRACED = 2
OPTIONS = Options(steps=STEPS, seed=7, trace_memory=TRACED)
HOST = ChunkRequest(host_blocks=6, optimizer_blocks=0)
MIXED = ChunkRequest(host_blocks=2, optimizer_blocks=1)
DEEP = replace(GPT, num_layers=6)
CLOSE = 0.12  # of the fullest moment: the prices count some temporaries at their most
TYPES = (MemoryTrace, PlannedAndCorrected, NonChunkBytes)

Schedulers = tuple[ChunkScheduler, ...]
Row = tuple[list[float], list[float], MemoryTrace, list[int], list[bool]]


def losses_and_trace(build: Callable[[Options], Trainer], schedulers: Schedulers) -> Row:
    """Returns losses without a trace and with it, the trace, bytes fetched, and as predicted.

    One trainer lives at a time, and what the fork began with is not looked at: a CPU's tensors are
    all counted.
    """
    gc.collect()
    gc.freeze()
    expected = [result.loss for result in build(replace(OPTIONS, trace_memory=0)).run()]
    trainer = build(OPTIONS).traced(schedulers)
    losses, fetched, exact = [], [], []
    for result in trainer.run():
        losses.append(result.loss)
        moved = trainer.moved()
        assert moved is not None
        fetched.append(int(moved.in_bytes.measured or 0))
        exact.append(moved.as_predicted or result.step == TRACED - 1)  # it has the next schedule
    moved = trainer.moved()
    assert moved is not None
    assert moved.traced is not None
    return expected, losses, moved.traced, fetched, exact


def train(plan: Plan, factor: float = 1.0) -> Row:
    """Trains a plan whose schedule counts `factor` times the predicted bytes outside of chunks."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (chunk_schedule, measured_bytes):
            patch.setattr(module, "non_chunk_bytes", partial(scaled, factor))
        build = partial(build_trainer, plan, device=torch.device("cpu"))
        return losses_and_trace(build, chunk_schedulers_of(plan))


def scaled(factor: float, *arguments: object) -> NonChunkBytes:
    predicted = non_chunk_bytes(*arguments)  # type: ignore[arg-type]
    values = {field.name: getattr(predicted, field.name) for field in fields(predicted)}
    end = int(factor * values.pop("end"))
    return NonChunkBytes(
        **{name: tuple(int(factor * each) for each in row) for name, row in values.items()},
        end=end,
    )


def roomy(share: float, request: ChunkRequest = HOST, **choices) -> Plan:
    """A plan with a budget of `share` of the least."""
    budget = int(share * smallest(request, **choices))
    return chunked_plan(replace(request, device_bytes=budget), **choices)


@pytest.mark.multiproc
@pytest.mark.parametrize(
    "choices",
    [
        pytest.param({"model": DEEP, "num_micro_batches": 2}, id="one-rank"),
        pytest.param(
            {"model": DEEP, "dp": 2, "num_micro_batches": 2},
            id="gathered-groups",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"model": DEEP, "pp": 2, "num_micro_batches": 2, "precision": Precision.BF16},
            id="a-pipeline-in-16-bits",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"model": DEEP, "pp": 2, "num_micro_batches": 4, "schedule": Schedule.GPIPE},
            id="gpipe",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_measured_moments_are_near_the_predicted_ones_and_losses_stay_the_same(choices):
    (ranks,) = run_ranks([roomy(1.6, MIXED, **choices)], train, *TYPES)

    for expected, losses, trace, _, exact in ranks:
        assert losses == expected
        assert all(exact)
        assert trace.steps == TRACED
        assert trace.most_bytes.measured == pytest.approx(trace.most_bytes.predicted, rel=CLOSE)
        assert trace.device_bytes.corrected == pytest.approx(trace.device_bytes.planned, rel=CLOSE)
        assert trace.worst_moment.startswith(("before the ", "forward", "backward", "the update"))


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_prediction_that_is_too_large_leaves_room_that_the_corrected_schedule_fills():
    plan = roomy(1.5, model=DEEP, num_micro_batches=4)

    ((expected, losses, trace, fetched, exact),) = run_ranks(
        [plan], partial(train, factor=1.4), *TYPES
    )[0]

    assert losses == expected
    assert all(exact)
    assert trace.most_bytes.measured < 0.8 * trace.most_bytes.predicted
    assert trace.in_bytes.corrected < trace.in_bytes.planned
    assert fetched[-1] == trace.in_bytes.corrected < fetched[0]


@pytest.mark.multiproc
def test_a_prediction_that_is_too_small_is_corrected_and_the_device_stays_within_its_budget():
    plan = roomy(1.1, model=DEEP, num_micro_batches=4)
    budget = plan.chunks.ranks[0].device_bytes

    ((expected, losses, trace, fetched, exact),) = run_ranks(
        [plan], partial(train, factor=0.3), *TYPES
    )[0]

    assert losses == expected
    assert all(exact)
    assert trace.most_bytes.measured > 2 * trace.most_bytes.predicted
    assert trace.in_bytes.corrected > trace.in_bytes.planned
    assert fetched[-1] == trace.in_bytes.corrected
    assert trace.device_bytes.corrected <= budget


@pytest.mark.multiproc
def test_a_budget_that_the_measured_memory_does_not_leave_is_an_error_of_every_rank():
    plan = roomy(1.0, MIXED, dp=2, num_micro_batches=2)
    (rank,) = plan.chunks.ranks
    small = replace(rank, device_bytes=int(0.7 * rank.device_bytes))

    with pytest.raises(InfeasibleError, match=r"by the traced memory chunks of pipeline rank 0"):
        run_ranks(
            [replace(plan, chunks=replace(plan.chunks, ranks=(small,)))],
            partial(train, factor=0.1),
            *TYPES,
        )


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_traced_module_is_traced_like_a_described_model():
    priced = made(dp=2, host=2, optimizer=1)
    schedulers = chunk_schedulers(priced)

    def train_module(plan) -> Row:
        schedules = tuple(each.planned() for each in schedulers)
        device = torch.device("cpu")

        def build(options: Options) -> Trainer:
            return build_traced_trainer(plan, options, device, schedules=schedules)

        return losses_and_trace(build, schedulers)

    (ranks,) = run_ranks([priced.plan], train_module, *TYPES)

    for expected, losses, trace, _, exact in ranks:
        assert losses == expected
        assert all(exact)
        assert trace.steps == TRACED


@pytest.mark.parametrize("share", [0.1, 1.0])
def test_in_the_warm_up_chunks_fill_their_share_or_the_least_that_they_can(share):
    plan = roomy(1.6, model=DEEP, num_micro_batches=2)
    (scheduler,) = chunk_schedulers_of(plan)

    warm_up = scheduler.warm_up(share)

    budget = plan.chunks.ranks[0].device_bytes
    least = scheduler.warm_up(1e-9)
    assert warm_up.device_bytes == max(least.smallest_bytes, int(share * budget))
    assert warm_up.most_bytes <= warm_up.device_bytes
    assert least.in_bytes >= warm_up.in_bytes
    assert warm_up.groups == scheduler.planned().groups


def test_the_predicted_bytes_give_the_planned_schedule_again():
    (scheduler,) = chunk_schedulers_of(roomy(1.3, MIXED, num_micro_batches=2))

    assert scheduler.corrected(scheduler.predicted()) == scheduler.planned()


def test_moments_are_named_in_their_order():
    (scheduler,) = chunk_schedulers_of(roomy(1.3, MIXED))
    planned = scheduler.planned()

    names = [name for name, _ in by_moment(no_bytes(len(planned.moments)), planned)]

    assert names[:2] == [
        "before the forward pass of block 0, micro-batch 0",
        "forward pass of block 0, micro-batch 0",
    ]
    assert names[-1] == "the update"
    assert len(names) == len(set(names)) == 2 * len(planned.moments) + 1


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"trace_memory": 5}, "no step is left"),
        ({"trace_memory": 1, "trace_share": 0.0}, "--trace-share is 0"),
    ],
)
def test_a_trace_that_cannot_be_is_an_error(options, problem):
    with pytest.raises(ConfigError, match=problem):
        Options(steps=5, **options)


def test_a_plan_without_chunks_has_no_schedule_to_correct():
    with pytest.raises(ConfigError, match="--trace-memory: the plan has no chunks"):
        user_modules.chunk_schedulers_of(chunked_plan(None), traces=True)
