"""The dry `plan check` of a traced plan as `--json` prints it: GiB, bytes and seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parplan.planner.plan.derived import host_gib
from parplan.planner.plan.traced_plan import TracedPlan
from parplan.report.json_result import JsonResult
from parplan.report.runs.chunk_check_table import ChunkStage, chunk_stages
from parplan.report.runs.traced_check_table import does_fit, fits_host, verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoStepTimes:
    """Seconds of a step in the plan file and as priced now."""

    file: float
    now: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStageCheck:
    """The memory of a pipeline stage in the plan file and as priced now."""

    stage: int
    file_gib: float
    now_gib: float
    capacity_gib: float
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCheckDocument(JsonResult):
    """The check of a traced plan, which is traced and priced again.

    host_gib    memory of the fullest node's host that the plan takes
    host_fits   true where the node has it
    chunks      by stage, null for a plan without chunks
    """

    verdict: str
    step_time_s: TwoStepTimes
    host_gib: float
    host_fits: bool
    stages: tuple[TracedStageCheck, ...]
    chunks: tuple[ChunkStage, ...] | None


def traced_check_document(
    plan: TracedPlan, today: TracedPlan, ranks: Sequence[int]
) -> TracedCheckDocument:
    """Returns the tables of the check for `--json`."""
    return TracedCheckDocument(
        verdict=verdict(today, ranks),
        step_time_s=TwoStepTimes(
            file=plan.predicted.step_time_s.value, now=today.predicted.step_time_s.value
        ),
        host_gib=host_gib(today),
        host_fits=fits_host(today),
        stages=tuple(
            TracedStageCheck(
                stage=rank,
                file_gib=plan.predicted.memory_gib[rank].total,
                now_gib=today.predicted.memory_gib[rank].total,
                capacity_gib=today.predicted.memory_gib[rank].capacity,
                fits=does_fit(today.predicted.memory_gib[rank]),
            )
            for rank in ranks
        ),
        chunks=None if plan.chunks is None else chunk_stages(plan, today, ranks),
    )
