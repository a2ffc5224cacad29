"""run.json: what a run of a plan measured, beside what was predicted (docs/reference/run-file.md).
The executor writes it.

Self-contained: it holds the plan, so that `plan calibrate` needs nothing else. Times of spans are
seconds since the start of the step on one clock for all ranks, known to within `clock_error_s`.
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
from parplan.profiles.documents.files import write_text
from parplan.profiles.documents.reader import Hints, read_json
from parplan.profiles.documents.schema import document, parse
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.user_profile import digest

RUN_VERSION = 1
NO_PLACE = -1  # stage and micro-batch of what is of the whole rank: data, reduce, optimizer
_FORBID = {"extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkSpan:
    """One piece of work of a rank: F, R, B, I, W of a micro-batch (forward, recompute ahead of the
    backward, backward, its input's and its weights' part), or data, reduce, tied, optimizer of the
    step (stage and micro-batch -1). A forward that ends in the loss may have two spans.
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
            self.work if self.stage == NO_PLACE else f"{self.work}{self.stage}.{self.micro_batch}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """A figure as it was predicted and as it was measured; None for what cannot be known."""

    __pydantic_config__ = _FORBID

    predicted: int | float | None  # bytes stay whole numbers
    measured: int | float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnvironment:
    """What the run ran on, without names of hosts or paths."""

    __pydantic_config__ = _FORBID

    torch: str
    device: str
    world_size: int
    cpu_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Seconds and mean loss of every step. `warm_up` first steps are not in the median, the least
    and the most.

    skipped: the steps of an fp16 run, counted from 0, that updated nothing, since a gradient was
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
    """Of the step. idle_share: of the ranks' time, what is in no work: bubbles, and transfers that
    are waited for.
    """

    __pydantic_config__ = _FORBID

    step_time_s: Beside
    tokens_per_s: Beside
    tokens_per_s_per_gpu: Beside
    mfu: Beside
    idle_share: Beside


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPart:
    """Seconds of one kind of work: F, B (with R), receive_F or receive_B of a stage and one
    micro-batch (the mean over a step's, of which the median over replicas and recorded steps);
    data, reduce or optimizer of a pipeline rank, `stage`, and one step; tied: the reduction of a
    tied embedding's two gradients, the least over the ranks, since the others wait in it.
    """

    __pydantic_config__ = _FORBID

    work: str
    stage: int
    predicted_s: float | None
    measured_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkMoved:
    """Bytes of the chunks of one rank in a step: to the device, from it, gathered, reduced.

    device_bytes: the budget of all tensors, as predicted, beside the most that chunks held of it
    """

    __pydantic_config__ = _FORBID

    in_bytes: Beside
    out_bytes: Beside
    gathered_bytes: Beside
    reduced_bytes: Beside
    device_bytes: Beside

    @property
    def as_predicted(self) -> bool:
        """Whether what was moved is what the plan says, to the byte."""
        moved = (self.in_bytes, self.out_bytes, self.gathered_bytes, self.reduced_bytes)
        return all(each.predicted == each.measured for each in moved)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """One rank: bytes of its states, peaks of its memory, the spans of the last step, and what its
    chunks moved in it.

    peak_allocated_bytes   of torch's allocator: of all recorded steps on GPUs, of the last step of
                           the warm-up on CPUs, None in runs too short for that
                           (executor/watch/allocated.py)
    peak_reserved_bytes    of the CUDA allocator, predicted with its reserve; measured on GPUs only
    host_rss_bytes         peak resident set of the process, with libraries: not comparable with a
                           prediction
    """

    __pydantic_config__ = _FORBID

    rank: int
    pp: int
    dp: int
    tp: int
    parameters_bytes: Beside
    gradients_bytes: Beside
    optimizer_bytes: Beside
    peak_allocated_bytes: Beside
    peak_reserved_bytes: Beside
    host_rss_bytes: int
    spans: tuple[WorkSpan, ...]
    chunks: ChunkMoved | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """One run. `plan` is the plan's document, `plan_fingerprint` of its file's text; `date` as
    YYYY-MM-DD.
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
        """The plan that was run. Raises ConfigError, also for that of a traced module."""
        plan = self.any_plan(where)
        if isinstance(plan, TracedPlan):
            raise ConfigError(
                f"{where}: it is a run of the traced module {plan.traced.name}, whose prices are not of layers",
                hint="calibrate with the run of a named model",
            )
        return plan

    def any_plan(self, where: str = "run.json") -> Plan | TracedPlan:
        """The plan that was run, of either kind. Raises ConfigError."""
        body = dict(self.plan)
        return any_plan_from_document(body, f"{where}: plan")


def run_to_json(run: RunFile) -> str:
    """The file's text."""
    return json.dumps(document(run), indent=1) + "\n"


def write_run(run: RunFile, path: Path) -> None:
    """Write the run atomically. Raises ConfigError."""
    write_text(run_to_json(run), path, hint="choose another file with --run-json")


def read_run(path: Path) -> RunFile:
    """The run in a file. Raises ConfigError: not readable, not JSON, another version, keys unknown
    or missing, no steps.
    """
    body = _json(path)
    version = body.get("run_version") if isinstance(body, dict) else None
    if version != RUN_VERSION:
        raise ConfigError(
            f"{path}: run_version is {'missing' if version is None else repr(version)}, this parplan reads {RUN_VERSION}",
            hint="give the run.json that python -m parplan.executor wrote",
        )
    run = parse(RunFile, body, str(path))
    if not run.recorded_steps or not run.steps.seconds or not run.ranks:
        raise ConfigError(
            f"{path}: no step was recorded", hint="run the plan with --steps 5 or more"
        )
    return run


def is_run(path: Path) -> bool:
    """Whether a file is a run's, of whatever version, and not a plan's."""
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
    """Of what was measured and of what plan."""
    return digest(run_to_json(run))


def plan_parts(plan: Plan | TracedPlan) -> tuple[dict[str, Any], str]:
    """The plan's document for a run, and its fingerprint."""
    body = plan_to_document(plan)
    return body, digest(json.dumps(body, sort_keys=True))
