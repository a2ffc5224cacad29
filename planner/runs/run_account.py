"""Makes the run file from the measurements of every rank, beside the plan's predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from parplan.costmodels.layers.model_states import StateBytes
from parplan.costmodels.step import model_flops_utilization, price_step
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.plan_strategy import prices_of_plan, strategy_of
from parplan.planner.plan.prediction import StageWait, mean_idle_share
from parplan.planner.plan.traced_plan import TracedPlan
from parplan.planner.runs.run_file import (
    RUN_VERSION,
    ChunkMoved,
    Figures,
    MeasuredPart,
    PredictedAndMeasured,
    RankRecord,
    RunEnvironment,
    RunFile,
    Steps,
    WorkSpan,
    plan_parts,
)
from parplan.planner.runs.timelines import Timeline, measured_parts_s, predicted_timeline
from parplan.profiles.errors import ConfigError
from parplan.profiles.units import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """The spans of one step on a rank's own clock, and the start of the step on it."""

    started_s: float
    seconds: float
    spans: tuple[WorkSpan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMeasured:
    """The measurements of one rank: bytes of states, peaks, and its recorded steps.

    predicted, held                   bytes of states by the plan, and those that the rank holds
    allocated_bytes, reserved_bytes   peaks, None where they were not counted
    ahead_s                           seconds by which its clock is ahead of rank 0's
    in_flight                         the most micro-batches that it held at once, None without a
                                      pipeline
    """

    pp: int
    dp: int
    tp: int
    predicted: StateBytes
    held: StateBytes
    allocated_bytes: int | None
    reserved_bytes: int | None
    host_rss_bytes: int
    steps: tuple[RecordedStep, ...]
    ahead_s: float = 0.0
    chunks: ChunkMoved | None = None
    in_flight: int | None = None

    @property
    def idle_share(self) -> float:
        """The share of the recorded steps that is in no span."""
        return fmean(
            1 - sum(span.seconds for span in step.spans) / step.seconds for step in self.steps
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedSteps:
    """Seconds and losses of every step of a run, in their order.

    warm_up   steps at the start that the figures leave out
    skipped   numbers of the steps that updated nothing
    """

    seconds: Sequence[float]
    losses: Sequence[float]
    warm_up: int
    skipped: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """The predictions of today for a plan, None or empty where the prices do not cover it.

    mfu      function from the seconds of a step to its MFU
    memory   by pipeline rank, the allocated and the reserved bytes
    waits    by pipeline rank
    """

    mfu: Callable[[float], float]
    step_s: float | None
    timeline: Timeline | None
    memory: tuple[tuple[int | float, int | float], ...]
    waits: tuple[StageWait, ...] = ()


def predict(plan: Plan | TracedPlan) -> Predicted:
    """Prices the plan again, with its calibration; a traced module has the prices of its file."""
    if isinstance(plan, TracedPlan):
        return _as_written(plan)
    price_cache = prices_of_plan(plan)

    def mfu(seconds: float) -> float:
        return model_flops_utilization(seconds, plan.mesh.num_ranks, price_cache)

    try:
        strategy = strategy_of(plan, price_cache)
        timeline = predicted_timeline(strategy, price_cache)
        memory = price_step(strategy, price_cache).memory
    except ConfigError:
        return Predicted(mfu=mfu, step_s=None, timeline=None, memory=())
    return Predicted(
        mfu=mfu,
        step_s=timeline.step_s,
        timeline=timeline,
        memory=tuple((rank.allocated, rank.reserved) for rank in memory),
        waits=timeline.waits,
    )


def _as_written(plan: TracedPlan) -> Predicted:
    flops = plan.traced.flops_per_sequence * plan.training.global_batch_size
    peak = plan.cluster.device.peak(plan.training.precision) * plan.mesh.num_ranks
    memory = tuple(
        (round((rank.total - rank.reserve) * GIB), round(rank.total * GIB))
        for rank in plan.predicted.memory_gib
    )
    return Predicted(
        mfu=lambda seconds: flops / (peak * seconds),
        step_s=plan.predicted.step_time_s.value,
        timeline=None,
        memory=memory,
        waits=plan.predicted.waits,
    )


def make_run(
    plan: Plan | TracedPlan,
    environment: RunEnvironment,
    ranks: Sequence[RankMeasured],
    steps: TimedSteps,
    *,
    clock_error_s: float,
    date: str,
) -> RunFile:
    """Returns the run of `plan` with the measurements of all ranks in their order."""
    predicted = predict(plan)
    recorded = [_records(ranks, index, predicted) for index in range(len(ranks[0].steps))]
    counted = steps.seconds[steps.warm_up :] or steps.seconds
    plan_body, fingerprint = plan_parts(plan)
    return RunFile(
        run_version=RUN_VERSION,
        date=date,
        plan_fingerprint=fingerprint,
        environment=environment,
        recorded_steps=len(recorded),
        clock_error_s=clock_error_s,
        plan=plan_body,
        steps=Steps(
            seconds=tuple(steps.seconds),
            loss=tuple(steps.losses),
            warm_up=steps.warm_up,
            median_s=median(counted),
            least_s=min(counted),
            most_s=max(counted),
            skipped=tuple(steps.skipped),
        ),
        figures=_figures(
            plan, predicted, median(counted), fmean(rank.idle_share for rank in ranks)
        ),
        parts=_parts(predicted.timeline, measured_parts_s(recorded)),
        ranks=tuple(recorded[-1]),
    )


def _records(ranks: Sequence[RankMeasured], index: int, predicted: Predicted) -> list[RankRecord]:
    """Returns all ranks of one recorded step, from the moment in which the first started it."""
    origin_s = min(rank.steps[index].started_s - rank.ahead_s for rank in ranks)
    return [
        _record(number, rank, rank.steps[index], origin_s + rank.ahead_s, predicted)
        for number, rank in enumerate(ranks)
    ]


def _record(
    number: int, rank: RankMeasured, step: RecordedStep, origin_s: float, predicted: Predicted
) -> RankRecord:
    allocated, reserved = predicted.memory[rank.pp] if predicted.memory else (None, None)
    waits = predicted.waits[rank.pp] if predicted.waits else None
    return RankRecord(
        rank=number,
        pp=rank.pp,
        dp=rank.dp,
        tp=rank.tp,
        parameters_bytes=PredictedAndMeasured(
            predicted=rank.predicted.parameters, measured=rank.held.parameters
        ),
        gradients_bytes=PredictedAndMeasured(
            predicted=rank.predicted.gradients, measured=rank.held.gradients
        ),
        optimizer_bytes=PredictedAndMeasured(
            predicted=rank.predicted.optimizer, measured=rank.held.optimizer
        ),
        peak_allocated_bytes=PredictedAndMeasured(
            predicted=allocated, measured=rank.allocated_bytes
        ),
        peak_reserved_bytes=PredictedAndMeasured(predicted=reserved, measured=rank.reserved_bytes),
        host_rss_bytes=rank.host_rss_bytes,
        chunks=rank.chunks,
        idle_share=PredictedAndMeasured(
            predicted=waits.idle_share if waits else None, measured=rank.idle_share
        ),
        in_flight=PredictedAndMeasured(
            predicted=waits.in_flight if waits else None, measured=rank.in_flight
        ),
        spans=tuple(
            replace(span, start_s=span.start_s - origin_s, end_s=span.end_s - origin_s)
            for span in step.spans
        ),
    )


def _figures(
    plan: Plan | TracedPlan, predicted: Predicted, step_s: float, idle_share: float
) -> Figures:
    tokens, num_ranks = plan.training.tokens_per_step, plan.mesh.num_ranks

    def both(of: Callable[[float], float]) -> PredictedAndMeasured:
        return PredictedAndMeasured(
            predicted=None if predicted.step_s is None else of(predicted.step_s),
            measured=of(step_s),
        )

    return Figures(
        step_time_s=both(lambda seconds: seconds),
        tokens_per_s=both(lambda seconds: tokens / seconds),
        tokens_per_s_per_gpu=both(lambda seconds: tokens / seconds / num_ranks),
        mfu=both(predicted.mfu),
        idle_share=PredictedAndMeasured(
            predicted=mean_idle_share(predicted.waits),
            measured=idle_share,
        ),
    )


def _parts(
    timeline: Timeline | None, measured: Mapping[tuple[str, int], float]
) -> tuple[MeasuredPart, ...]:
    prices = timeline.parts_s if timeline else {}
    return tuple(
        MeasuredPart(
            work=work,
            stage=stage,
            predicted_s=prices.get((work, stage)),
            measured_s=measured.get((work, stage)),
        )
        for work, stage in sorted({*prices, *measured})
        if prices.get((work, stage)) or (work, stage) in measured
    )


def trace_ranks(run: RunFile) -> dict[str, dict[str, Sequence[WorkSpan]]]:
    """Returns the predicted and the measured spans of the last step of a run, by rank."""
    timeline = predict(run.any_plan()).timeline
    return {
        f"rank {rank.rank}: pp {rank.pp} dp {rank.dp} tp {rank.tp}": {
            **({"predicted": timeline.spans[rank.pp]} if timeline else {}),
            "measured": rank.spans,
        }
        for rank in run.ranks
    }


def plan_trace_ranks(plan: Plan) -> dict[str, dict[str, Sequence[WorkSpan]]]:
    """Returns the predicted spans of a plan, by pipeline rank. Raises ConfigError."""
    price_cache = prices_of_plan(plan)
    spans = predicted_timeline(strategy_of(plan, price_cache), price_cache).spans
    return {
        f"pipeline rank {rank}": {"predicted": predicted} for rank, predicted in enumerate(spans)
    }
