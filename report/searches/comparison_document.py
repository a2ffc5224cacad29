"""A plan beside the baselines as `--json` prints it: seconds, GiB and shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.step_breakdown import NAMES
from parplan.planner.plan.pipeline_plan import PipelinePlan
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.prediction import ErrorBand
from parplan.planner.plan.traced_plan import model_name
from parplan.planner.search.comparison import (
    MEMORY_NAMES,
    ComparedPlan,
    Comparison,
    ComparisonRow,
)
from parplan.profiles.units import gib
from parplan.report.json_result import JsonResult, fields_of
from parplan.report.plans.block_phrases import layers_phrases
from parplan.report.searches.comparison_tables import flags_of, short_gib


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedSide:
    """A plan with the parts of its step and the memory of its fullest device.

    mfu              share of the peak FLOP/s of all GPUs
    peak_memory_gib  of the fullest GPU
    redundancy_gib   redundant memory over all GPUs
    zero, recompute  of the layers, in words
    parts_s          seconds of the mean GPU by cause, which add up to the step
    memory_gib       of the fullest GPU by class, which add up to the peak
    """

    step_time_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    peak_memory_gib: float
    redundancy_gib: float
    mesh: Mesh
    pipeline: PipelinePlan
    zero: str
    recompute: str
    sequence_parallel: bool
    parts_s: Mapping[str, float]
    memory_gib: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartDifferences:
    """The value of a baseline less ours, by part of the step and by class of memory."""

    parts_s: Mapping[str, float]
    memory_gib: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class FittingRow(ComparedSide):
    """A baseline, or another plan, that fits.

    what         the baseline in words, null for a plan of a file
    candidates   number of its strategies, null for a plan of a file
    flags        arguments with which a described model runs as the baseline, empty if unknown
    slower       share by which its step is longer than ours
    tie          true where the prices cannot say which of the two is shorter
    """

    name: str
    fits: Literal[True] = True
    what: str | None
    candidates: int | None
    flags: str
    slower: float
    tie: bool
    difference: PartDifferences


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfitRow:
    """A baseline of which no plan fits.

    short_gib   GiB that its leanest plan is short of, null where it has no legal layout
    """

    name: str
    fits: Literal[False] = False
    what: str
    candidates: int
    short_gib: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonDocument(JsonResult):
    """Our plan and others, with equal prices and an equal limit of memory.

    filed_step_time_s   the step in the plan file, where today's prices differ
    unpriced            baselines for which there was no time
    """

    model: str
    gpu: str
    gpus: int
    global_batch_size: int
    seq_length: int
    stack: str
    memory_limit_gib: float
    error_band: ErrorBand | None
    filed_step_time_s: float | None
    ours: ComparedSide
    baselines: tuple[FittingRow | UnfitRow, ...]
    unpriced: tuple[str, ...]


def comparison_document(comparison: Comparison) -> ComparisonDocument:
    """Returns the output of `plan compare --json` and `plan diff --json`."""
    plan = comparison.ours.plan
    return ComparisonDocument(
        model=model_name(plan),
        gpu=plan.cluster.device.name,
        gpus=plan.cluster.num_gpus,
        global_batch_size=plan.training.global_batch_size,
        seq_length=plan.training.seq_length,
        stack=plan.training.stack.name,
        memory_limit_gib=round(gib(comparison.limit_bytes), 4),
        error_band=plan.predicted.error_band,
        filed_step_time_s=comparison.filed_step_s,
        ours=_side(comparison.ours),
        baselines=tuple(_row(comparison, row) for row in comparison.rows),
        unpriced=comparison.unpriced,
    )


def _side(side: ComparedPlan) -> ComparedSide:
    plan = side.plan
    predicted = plan.predicted
    zero, recompute = layers_phrases(plan)
    return ComparedSide(
        step_time_s=side.step_s,
        tokens_per_s_per_gpu=predicted.tokens_per_s_per_gpu.value,
        mfu=predicted.mfu.value,
        peak_memory_gib=gib(side.fullest.total),
        redundancy_gib=predicted.redundancy_gib.total,
        mesh=plan.mesh,
        pipeline=plan.pipeline,
        zero=zero,
        recompute=recompute,
        sequence_parallel=isinstance(plan, Plan)
        and any(layer.sequence_parallel for layer in plan.layer_plans.values()),
        parts_s=dict(zip(NAMES, side.parts.values, strict=True)),
        memory_gib=dict(zip(MEMORY_NAMES, map(gib, side.memory_bytes), strict=True)),
    )


def _row(comparison: Comparison, row: ComparisonRow) -> FittingRow | UnfitRow:
    baseline = row.baseline
    if row.side is None:
        assert baseline is not None, "a row without a baseline has a plan"
        lean = baseline.leanest
        return UnfitRow(
            name=row.name,
            what=baseline.what,
            candidates=baseline.candidates,
            short_gib=None if lean is None else short_gib(comparison, lean),
        )
    ours, theirs = _side(comparison.ours), _side(row.side)
    return FittingRow(
        **fields_of(theirs),
        name=row.name,
        what=baseline.what if baseline else None,
        candidates=baseline.candidates if baseline else None,
        flags=flags_of(row),
        slower=comparison.slower(row.side),
        tie=comparison.is_tie(row.side),
        difference=PartDifferences(
            parts_s=_differences(theirs.parts_s, ours.parts_s),
            memory_gib=_differences(theirs.memory_gib, ours.memory_gib),
        ),
    )


def _differences(theirs: Mapping[str, float], ours: Mapping[str, float]) -> dict[str, float]:
    return {name: value - ours[name] for name, value in theirs.items()}
