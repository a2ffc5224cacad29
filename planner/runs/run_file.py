"""run.json: the measurements of a run beside its predictions (docs/reference/run-file.md).

The executor writes it. It is self-contained: it holds the plan, so that `plan calibrate` needs
nothing else. Times of spans are seconds since the start of the step, on one clock for all ranks
that is known to within `clock_error_s`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parplan.planner.plan.plan import Plan
from parplan.planner.plan.plan_file import any_plan_from_document, plan_to_document
from parplan.planner.plan.traced_plan import TracedPlan
from parplan.profiles.documents.bounded import Hints
from parplan.profiles.documents.files import write_result
from parplan.profiles.documents.reader import read_json
from parplan.profiles.documents.schema import document, parse
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.user_profile import digest

RUN_VERSION = 1
WHOLE_RANK = -1  # stage and micro-batch of work of the whole rank: data, reduce, optimizer
_FORBID = {"extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkSpan:
    """One piece of work of a rank.

    work                 of a micro-batch F, R, B, I or W (forward, recompute ahead of the backward,
                         backward, its part of the input and of the weights); of the step data,
                         reduce, tied, pools or optimizer
    stage, micro_batch   -1 for work of the step

    A forward pass that ends in the loss may have two spans.
    """

    __pydantic_config__ = _FORBID

    work: str
    stage: int
    micro_batch: int
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    @property
    def name(self) -> str:
        return (
            self.work if self.stage == WHOLE_RANK else f"{self.work}{self.stage}.{self.micro_batch}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedAndMeasured:
    """A figure as predicted and as measured; None where it is not known."""

    __pydantic_config__ = _FORBID

    predicted: int | float | None  # bytes stay whole numbers
    measured: int | float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnvironment:
    """The software and hardware of the run, without names of hosts or paths."""

    __pydantic_config__ = _FORBID

    torch: str
    device: str
    world_size: int
    cpu_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Seconds and mean loss of every step.

    warm_up   first steps that are not in the median, the least and the most
    skipped   the steps of an fp16 run, counted from 0, that updated nothing because a gradient was
              not finite
    """

    __pydantic_config__ = _FORBID

    seconds: tuple[float, ...]
    loss: tuple[float, ...]
    warm_up: int
    median_s: float
    least_s: float
    most_s: float
    skipped: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of the step.

    idle_share   share of the ranks' time that is in no work: bubbles, and transfers that ranks wait
                 for
    """

    __pydantic_config__ = _FORBID

    step_time_s: PredictedAndMeasured
    tokens_per_s: PredictedAndMeasured
    tokens_per_s_per_gpu: PredictedAndMeasured
    mfu: PredictedAndMeasured
    idle_share: PredictedAndMeasured


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPart:
    """Seconds of one kind of work.

    work    of a stage and one micro-batch F, B (with R), receive_F or receive_B: the mean over the
            micro-batches of a step, and the median of these over replicas and recorded steps; of a
            pipeline rank and one step data, reduce or optimizer; tied, the reduction of the two
            gradients of a tied embedding, the least over the ranks, since the others wait in it
    stage   the stage, or the pipeline rank
    """

    __pydantic_config__ = _FORBID

    work: str
    stage: int
    predicted_s: float | None
    measured_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedAndCorrected:
    """A figure of the plan's schedule of chunks, and of the one that measured bytes gave."""

    __pydantic_config__ = _FORBID

    planned: int
    corrected: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTrace:
    """The bytes outside of chunks that the first steps of a run measured (--trace-memory).

    steps                 steps that were measured
    warm_up_bytes         bytes that chunks might fill in these steps
    most_bytes            at the moment that has most of them, as predicted and as measured
    worst_moment          the moment with the largest difference
    worst_bytes           at that moment, as predicted and as measured
    device_bytes          of the whole device at its fullest moment: of the plan's schedule by its
                          own prediction, and of the corrected schedule by what was measured
    in_bytes, out_bytes   of a step, to the device and from it
    """

    __pydantic_config__ = _FORBID

    steps: int
    warm_up_bytes: int
    most_bytes: PredictedAndMeasured
    worst_moment: str
    worst_bytes: PredictedAndMeasured
    device_bytes: PlannedAndCorrected
    in_bytes: PlannedAndCorrected
    out_bytes: PlannedAndCorrected


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkMoved:
    """Bytes of the chunks of one rank that move in a step.

    in_bytes, out_bytes   to the device, and from it
    device_bytes          the budget of all tensors as predicted, and the most that chunks held of
                          it
    traced                the correction of the schedule by measured bytes, None without one
    """

    __pydantic_config__ = _FORBID

    in_bytes: PredictedAndMeasured
    out_bytes: PredictedAndMeasured
    gathered_bytes: PredictedAndMeasured
    reduced_bytes: PredictedAndMeasured
    device_bytes: PredictedAndMeasured
    traced: MemoryTrace | None = None

    @property
    def as_predicted(self) -> bool:
        """Returns whether the moved bytes are those of the plan, to the byte."""
        moved = (self.in_bytes, self.out_bytes, self.gathered_bytes, self.reduced_bytes)
        return all(each.predicted == each.measured for each in moved)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """One rank: bytes of its states, peaks of its memory, and the spans of the last step.

    dp                     its number among the data-parallel ranks and the context-parallel ones
                           inside of them
    chunks                 bytes of its chunks that moved in the last step
    peak_allocated_bytes   of torch's allocator: of all recorded steps on GPUs, of the last step of
                           the warm-up on CPUs, None in runs too short for that
                           (executor/watch/allocated.py)
    peak_reserved_bytes    of the CUDA allocator, predicted with its reserve; measured on GPUs only
    host_rss_bytes         peak resident set of the process, with libraries: not comparable with a
                           prediction
    idle_share             share of the recorded steps in which it does no work: it waits for its
                           turn in the schedule or for a transfer
    in_flight              the most micro-batches between their forward pass and the end of their
                           backward pass at once, counted in each of its virtual stages; measured
                           in pipelines only
    """

    __pydantic_config__ = _FORBID

    rank: int
    pp: int
    dp: int
    tp: int
    parameters_bytes: PredictedAndMeasured
    gradients_bytes: PredictedAndMeasured
    optimizer_bytes: PredictedAndMeasured
    peak_allocated_bytes: PredictedAndMeasured
    peak_reserved_bytes: PredictedAndMeasured
    host_rss_bytes: int
    spans: tuple[WorkSpan, ...]
    chunks: ChunkMoved | None = None
    idle_share: PredictedAndMeasured | None = None
    in_flight: PredictedAndMeasured | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """One run.

    date               as YYYY-MM-DD
    plan_fingerprint   fingerprint of the text of the plan's document
    plan               the plan's document
    """

    __pydantic_config__ = _FORBID

    run_version: int
    date: str
    plan_fingerprint: str
    environment: RunEnvironment
    recorded_steps: int
    clock_error_s: float
    steps: Steps
    figures: Figures
    parts: tuple[MeasuredPart, ...]
    ranks: tuple[RankRecord, ...]
    plan: Mapping[str, Any]

    def the_plan(self, where: str = "run.json") -> Plan:
        """Returns the plan of the run. Raises ConfigError, also for that of a traced module."""
        plan = self.any_plan(where)
        if isinstance(plan, TracedPlan):
            raise ConfigError(
                f"{where}: it is a run of the traced module {plan.traced.name}, "
                "whose prices are not of layers",
                hint="calibrate with the run of a named model",
            )
        return plan

    def any_plan(self, where: str = "run.json") -> Plan | TracedPlan:
        """Returns the plan of the run, of either kind. Raises ConfigError."""
        body = dict(self.plan)
        return any_plan_from_document(body, f"{where}: plan")


def run_to_json(run: RunFile) -> str:
    """Returns the text of the file."""
    return json.dumps(document(run), indent=1) + "\n"


def write_run(run: RunFile, path: Path) -> Path | None:
    """Writes the run atomically, and keeps an older one as `write_result` does.

    Raises ConfigError.
    """
    return write_result(run_to_json(run), path, hint="choose another file with --run-json")


def read_run(path: Path) -> RunFile:
    """Reads the run in a file.

    Raises ConfigError where the file is not readable, is not JSON, has another version or no steps,
    or has keys that are unknown or missing.
    """
    body = _json(path)
    version = body.get("run_version") if isinstance(body, dict) else None
    if version != RUN_VERSION:
        raise ConfigError(
            f"{path}: run_version is {'missing' if version is None else repr(version)}, "
            f"this parplan reads {RUN_VERSION}",
            hint="give the run.json that python -m parplan.executor wrote",
        )
    run = parse(RunFile, body, str(path))
    if not run.recorded_steps or not run.steps.seconds or not run.ranks:
        raise ConfigError(
            f"{path}: no step was recorded", hint="run the plan with --steps 5 or more"
        )
    return run


def is_run(path: Path) -> bool:
    """Returns whether a file is a run of any version, and not a plan."""
    try:
        body = _json(path)
    except ConfigError:
        return False
    return isinstance(body, dict) and "run_version" in body


def _json(path: Path) -> Any:
    return read_json(
        path,
        hints=Hints(
            "make one with: torchrun ... -m parplan.executor plan.yaml",
            "give the run.json of a run",
        ),
    )


def run_fingerprint(run: RunFile) -> str:
    """Returns a fingerprint of the measurements and the plan of a run."""
    return digest(run_to_json(run))


def plan_parts(plan: Plan | TracedPlan) -> tuple[dict[str, Any], str]:
    """Returns the plan's document for a run, and its fingerprint."""
    body = plan_to_document(plan)
    return body, digest(json.dumps(body, sort_keys=True))
