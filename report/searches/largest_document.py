"""The largest models that fit as `--json` prints them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parplan.costmodels.communication.mesh import Mesh
from parplan.planner.plan.derived import host_gib, tokens_per_s
from parplan.planner.plan.plan import Plan
from parplan.planner.request import Request
from parplan.planner.search.largest_model import LargestModel
from parplan.profiles.units import gib, tflops
from parplan.report.json_result import JsonResult, KindedNumber, fields_of
from parplan.report.names import graph_of
from parplan.report.searches.largest_table import flops_per_s, peak_gib


@dataclass(frozen=True, slots=True, kw_only=True)
class TooLargeModel:
    """The smallest larger model that was tried, and why it does not fit."""

    model: str | None
    error: str
    hint: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadRow:
    """The parts that the host may hold, and how the search for the largest model went.

    proven     false where the searches ended early
    searches   number of searches
    next       null where no larger model was tried
    """

    offload: tuple[str, ...]
    proven: bool
    searches: int
    next: TooLargeModel | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NoneFitsRow(OffloadRow):
    """No model fits with what the host may hold."""

    model: None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestRow(OffloadRow):
    """The largest model that fits with what the host may hold, and its fastest plan.

    tflops            TFLOP/s of the model on all GPUs, recompute left out
    tflops_per_gpu    the same of one GPU
    peak_memory_gib   of the fullest GPU
    host_memory_gib   of the fullest node's host
    """

    model: str
    num_layers: int
    hidden_size: int
    num_parameters: int
    step_time_s: KindedNumber
    tflops: float
    tflops_per_gpu: float
    tokens_per_s: float
    peak_memory_gib: float
    host_memory_gib: float
    mesh: Mesh
    schedule: str
    micro_batch_size: int
    num_micro_batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestDocument(JsonResult):
    """The largest models that fit on a cluster, by what the host may hold.

    host_memory_gib   of a node
    elapsed_s         seconds of all searches
    """

    gpus: int
    device: str
    host_memory_gib: float
    elapsed_s: float
    largest: tuple[LargestRow | NoneFitsRow, ...]


def largest_document(
    rows: Sequence[LargestModel], request: Request, elapsed_s: float
) -> LargestDocument:
    """Returns the rows for `--json`."""
    return LargestDocument(
        gpus=request.cluster.num_gpus,
        device=request.cluster.device.name,
        host_memory_gib=round(gib(request.cluster.host_memory_bytes), 3),
        elapsed_s=round(elapsed_s, 3),
        largest=tuple(map(_row, rows)),
    )


def _row(row: LargestModel) -> LargestRow | NoneFitsRow:
    found = OffloadRow(
        offload=tuple(str(what) for what in row.offload),
        proven=row.proven,
        searches=row.num_searches,
        next=_too_large(row),
    )
    if row.plan is None:
        return NoneFitsRow(**fields_of(found))
    return _with_plan(found, row.plan)


def _too_large(row: LargestModel) -> TooLargeModel | None:
    error = row.next_error
    if error is None:
        return None
    return TooLargeModel(model=row.next_name, error=error.message, hint=error.hint)


def _with_plan(found: OffloadRow, plan: Plan) -> LargestRow:
    step, total = plan.predicted.step_time_s, tflops(flops_per_s(plan))
    return LargestRow(
        **fields_of(found),
        model=plan.model.name,
        num_layers=plan.model.num_layers,
        hidden_size=plan.model.hidden_size,
        num_parameters=graph_of(plan).num_parameters,
        step_time_s=KindedNumber(value=step.value, kind=str(step.kind)),
        tflops=round(total, 3),
        tflops_per_gpu=round(total / plan.cluster.num_gpus, 3),
        tokens_per_s=round(tokens_per_s(plan), 3),
        peak_memory_gib=round(peak_gib(plan), 4),
        host_memory_gib=round(host_gib(plan), 4),
        mesh=plan.mesh,
        schedule=str(plan.pipeline.schedule),
        micro_batch_size=plan.pipeline.micro_batch_size,
        num_micro_batches=plan.pipeline.num_micro_batches,
    )
