"""The notes under the summary of a plan: how far to trust its prices, and what was searched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from parplan.planner.objective import Objective
from parplan.planner.plan.error_band import without_steps
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.prediction import Status
from parplan.planner.plan.traced_plan import AnyPlan, TracedPlan
from parplan.profiles.models.transformer import build_graph, has_unlike_blocks
from parplan.profiles.provenance import Kind
from parplan.profiles.stack import AttentionKernel
from parplan.report.names import graph_of
from parplan.report.plans.format_notes import format_notes
from parplan.report.text import percent

EXECUTORS_STACK = "parplan"
_TABLES = "the step time is a price between measured tables, not a measurement of this step"
_PRICE_NOTES = {
    Kind.ANALYTIC: "the step time is a price from a cost model, not a measurement; see 'How far "
    "to trust it' in the README",
    Kind.INTERPOLATED: _TABLES,
}
_TRACED_NOTES = {
    Kind.ANALYTIC: "the step time is a price from a cost model, not a measurement; traced "
    "operators that have no curve of their own are priced by their FLOPs and bytes",
    Kind.INTERPOLATED: _TABLES,
}


def notes(plan: AnyPlan, *, ruled: bool = False) -> Iterator[str]:
    """Yields failures of the solver, the kind of the step time, and the rows of the error band.

    ruled    a rule of the user said the recompute of the stages
    """
    traced = isinstance(plan, TracedPlan)
    if plan.search.solver_failure:
        yield plan.search.solver_failure
    if isinstance(plan, Plan):
        for part in plan.model.left_out:
            yield f"{part} is left out: the plan is that of the text model alone"
        yield from _packed(plan)
        yield from format_notes(plan.training, plan.cluster.device.compute_capability)
    space = None if isinstance(plan, TracedPlan) else _space_text(plan, ruled=ruled)
    if space:
        yield space
    note = (_TRACED_NOTES if traced else _PRICE_NOTES).get(plan.predicted.step_time_s.kind)
    if note:
        yield note
    yield from _band_notes(plan)
    if plan.cluster.calibration:
        yield "prices follow runs of your own (cluster.calibration has the factors)" + (
            "; the band is of prices without" if plan.predicted.error_band else ""
        )
    if plan.training.stack.name != EXECUTORS_STACK:
        yield f"parplan's own executor is --stack {EXECUTORS_STACK}"


def _packed(plan: Plan) -> Iterator[str]:
    """Yields the length of documents, and the FLOPs that attention within them saves."""
    training = plan.training
    if training.documents is None:
        return
    whole = build_graph(plan.model, replace(training, documents=None), 1).model_flops
    fewer = 1 - graph_of(plan).model_flops / whole
    yield (
        f"sequences are packed from {training.documents}, within which attention reads: "
        f"{percent(fewer)} fewer model FLOPs than in whole sequences, and MFU counts the rest"
    )
    if training.attention is AttentionKernel.UNFUSED:
        yield "un-fused attention gains nothing of it: it computes the scores between documents"


def _band_notes(plan: AnyPlan) -> Iterator[str]:
    band = plan.predicted.error_band
    if band:
        like = ", ".join(f"{trait} {rows:,}" for trait, rows in band.time.like.items())
        yield (
            f"+-: eight in ten of {band.time.rows:,} held-out measured steps were within theirs; "
            f"of this plan's kind: {like}"
        )
    else:
        yield f"band unknown: {_no_band(plan)}"
    if isinstance(plan, Plan) and plan.model.num_experts:
        yield (
            "blocks of experts are divided over tp as Megatron divides them, and recompute "
            "nothing, a selection or everything"
        )


def _no_band(plan: AnyPlan) -> str:
    if isinstance(plan, TracedPlan):
        return "no measured steps of traced modules"
    missing = without_steps(plan.model, plan.training)
    return f"no measured steps {f'of {missing}' if missing else 'with anything on the host'}"


def _space_text(plan: Plan, *, ruled: bool) -> str | None:
    """Names the space that the gap of a search covers."""
    search = plan.search
    if search.status is Status.ESTIMATE:
        return None
    measured = (
        "; how far simulated steps are below the closed form is measured, not proven"
        if plan.mesh.pp > 1
        else ""
    )
    if search.launcher is not None:
        return (
            f"the gap is over the settings that {search.launcher} can say, with one ZeRO stage and "
            f"one recompute for all blocks{measured}; --explain says what is not searched"
        )
    if has_unlike_blocks(plan.model, plan.training):
        return (
            "the gap is over all candidates, with a ZeRO stage for each pipeline rank and a "
            "recompute list for each block by itself; --explain says what is not searched"
        )
    if search.objective is Objective.MEMORY:
        return (
            "the gap is over all candidates whose stages run mixes of at most two options that are "
            "near in seconds and bytes; "
            "--explain says what is not searched"
        )
    by_operator = any(layer_plan.own_zero for layer_plan in plan.layer_plans.values())
    stages = "one or two ZeRO stages" if by_operator else "a ZeRO stage"
    choices = (
        f"{stages}, a recompute list and a division of its operators"
        if plan.mesh.tp > 1
        else f"{stages} and a recompute list"
    )
    if ruled:
        return (
            "the gap is over all candidates whose blocks that recompute alike have, in one stage, "
            f"one ZeRO stage and one division of their operators{measured}; --explain says what is "
            "not searched"
        )
    return (
        f"the gap is over all candidates, with {choices} for each block by itself{measured}; "
        f"--explain says what is not searched"
    )
