"""The notes under the summary of a plan: how far to trust its prices, and what was searched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from parplan.planner.objective import Objective
from parplan.planner.plan.error_band import without_steps
from parplan.planner.plan.oom_risk import margin_at
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.prediction import Status
from parplan.planner.plan.traced_plan import AnyPlan, TracedPlan
from parplan.planner.plan.traits import family_of
from parplan.profiles.models.transformer import build_graph, has_unlike_blocks
from parplan.profiles.provenance import Kind
from parplan.profiles.stack import AttentionKernel
from parplan.report.names import graph_of
from parplan.report.plans.format_notes import format_notes
from parplan.report.plans.memory_table import fullest
from parplan.report.text import percent

EXECUTORS_STACK = "parplan"
_ANALYTIC_NOTE = "the step is a model's price, not a measurement (plan validate)"


def notes(plan: AnyPlan, *, ruled: bool = False) -> Iterator[str]:
    """Yields all notes; `ruled` as for `remarks`."""
    yield from warnings(plan)
    yield from remarks(plan, ruled=ruled)


def warnings(plan: AnyPlan) -> Iterator[str]:
    """Yields the notes that stand in every summary: each may change what a reader does."""
    if plan.search.solver_failure:
        yield plan.search.solver_failure
    if isinstance(plan, Plan):
        for part in plan.model.left_out:
            yield f"{part} is left out: the plan is that of the text model alone"
        if plan.batch_share is not None:
            yield (
                f"the plan of one pool, which trains {plan.training.global_batch_size:,} of the "
                f"{plan.batch_share.of:,} sequences of a step: the price leaves out the sum with "
                "other pools"
            )
    if isinstance(plan, TracedPlan) and plan.mesh.dp > 1 and (counted := plan.traced.counted):
        more = f" and {len(counted) - 1:,} more" if len(counted) > 1 else ""
        yield (
            f"each data-parallel rank writes buffer {counted[0]}{more} from its own samples; "
            "DDP would hand out those of rank 0"
        )
    yield from _out_of_memory(plan)
    step_kind, band = plan.predicted.step_time_s.kind, plan.predicted.error_band
    if step_kind is Kind.ANALYTIC:
        yield _ANALYTIC_NOTE
    if band is None:
        yield f"band unknown: {_no_band(plan)}"


def _out_of_memory(plan: AnyPlan) -> Iterator[str]:
    """Yields a sentence where the plan leaves less free than one measured run in 20 asked for."""
    worst = fullest(plan)
    asked = margin_at(1 / 20, family_of(plan.training.stack)).share * worst.capacity
    if worst.capacity - asked < worst.total <= worst.capacity:
        yield (
            "over 1 in 20 measured runs needed more memory than this leaves free: "
            "--oom-risk 5% leaves room"
        )


def remarks(plan: AnyPlan, *, ruled: bool = False) -> Iterator[str]:
    """Yields the other notes: the space of the gap, kinds of prices, rows of the error band.

    ruled    a rule of the user said the recompute of the stages
    """
    if isinstance(plan, Plan):
        yield from _packed(plan)
        if plan.search.launcher is not None:
            from parplan.planner.export.launcher_notes import unpriced_memory

            yield from unpriced_memory(plan)
        yield from format_notes(plan.training, plan.cluster.device.compute_capability)
        if space := _space_text(plan, ruled=ruled):
            yield space
    if isinstance(plan, TracedPlan):
        yield "traced operators without a curve are priced by their FLOPs and bytes"
    if plan.predicted.step_time_s.kind is Kind.INTERPOLATED:
        yield "the step time is a price between measured tables, not a measurement of this step"
    yield from _band_notes(plan)
    if plan.cluster.calibration:
        yield "prices follow runs of your own (cluster.calibration has the factors)" + (
            "; the band is of prices without" if plan.predicted.error_band else ""
        )
    if plan.training.stack.name != EXECUTORS_STACK:
        yield f"plans of parplan's own executor: --for {EXECUTORS_STACK}"


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
    if isinstance(plan, Plan) and plan.model.num_experts:
        yield (
            "blocks of experts are divided over tp as Megatron divides them, and recompute "
            "nothing, a selection or everything"
        )


def _no_band(plan: AnyPlan) -> str:
    if isinstance(plan, TracedPlan):
        return "no measured steps of traced modules"
    if plan.pools:
        return "no measured steps on unequal pools"
    missing = without_steps(plan.model, plan.training)
    return f"no measured steps {f'of {missing}' if missing else 'with anything on the host'}"


def _space_text(plan: Plan, *, ruled: bool) -> str | None:
    """Names the space that the gap of a search covers."""
    search = plan.search
    if search.status is Status.ESTIMATE:
        return None
    if search.method is not None:
        return (
            f"the search method {search.method} says nothing about faster plans; without --search "
            "the plan has a proof, and more choices"
        )
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
