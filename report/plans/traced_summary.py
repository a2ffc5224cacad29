"""The summary of a traced module's plan, in the shape of report/plans/summary.py."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from parplan.planner.plan.traced_plan import ShardStage, TracedPlan
from parplan.profiles.provenance import Kind
from parplan.profiles.units import counted, format_number
from parplan.report.names import pipeline_phrases
from parplan.report.plans.memory_table import CLASSES, MOST_ROWS, SHORT, fullest
from parplan.report.plans.summary import (
    EXECUTORS_STACK,
    SummaryContext,
    host_facts,
    layers_phrases,
    print_header,
    print_runners_up,
    proof,
    redundancy_line,
    stack_phrases,
    time_line,
)
from parplan.report.text import (
    LABEL_WIDTH,
    aligned,
    gib_text,
    joined,
    labelled,
    percent,
    say,
    seconds_text,
)

_PRICE_NOTES = {
    Kind.ANALYTIC: "the step time is a price from a cost model, not a measurement; traced "
    "operators that have no curve of their own are "
    "priced by their FLOPs and bytes",
    Kind.INTERPOLATED: "the step time is a price between measured tables, not a measurement of "
    "this step",
}


def print_traced_summary(plan: TracedPlan, out: Console, context: SummaryContext) -> None:
    """Print the plan for a person."""
    print_header(plan, out, context)
    for line in aligned(
        ((f"{label:{LABEL_WIDTH - 4}}", *fact) for label, *fact in _facts(plan, context)),
        out.width,
        left=(0, 1, 2),
    ):
        say(out, line)
    say(out)
    say(out, time_line(plan, out.width))
    say(out, redundancy_line(plan, out.width))
    say(out)
    _print_stages(plan, out, whole=context.whole)
    say(out)
    print_runners_up(plan, out, whole=context.whole)
    for index, note in enumerate(_notes(plan)):
        say(
            out,
            joined(note.split(" "), " ", out.width, start=labelled("" if index else "note")),
            "dim",
        )


def _facts(plan: TracedPlan, context: SummaryContext) -> Iterator[tuple[str, str, str]]:
    predicted = plan.predicted
    worst = fullest(plan)
    yield "mesh", str(plan.mesh), ", ".join(pipeline_phrases(plan.pipeline, plan.mesh))
    yield "stages", *layers_phrases(plan)
    yield ("stack", *stack_phrases(plan))
    yield "module", plan.module.text, "unmodified: traced, and cut between its shards"
    step = predicted.step_time_s
    speed = (
        f"{format_number(predicted.tokens_per_s_per_gpu.value, 4)} {plan.traced.unit}/s/GPU, "
        f"{percent(predicted.mfu.value)} MFU"
    )
    yield "step", f"{seconds_text(step.value)} ({step.kind})", speed
    free = worst.capacity - worst.total
    place = f"stage {worst.stage}, the fullest; " if plan.mesh.pp > 1 else ""
    yield (
        "memory",
        f"{gib_text(worst.total)} GiB of {worst.capacity:.1f}",
        f"{place}{gib_text(free)} GiB free",
    )
    yield from host_facts(plan, "all states are there")
    yield proof(plan, context)


def _print_stages(plan: TracedPlan, out: Console, *, whole: bool) -> None:
    """Print GiB and shards of each pipeline rank; a long pipeline shows its fullest ranks."""
    ranks = list(plan.predicted.memory_gib)
    if not whole and len(ranks) > MOST_ROWS:
        inner = sorted(ranks[1:-1], key=lambda memory: -memory.total)[: MOST_ROWS - 2]
        ranks = [memory for memory in ranks if memory in (ranks[0], ranks[-1]) or memory in inner]
    rows = [
        (
            str(memory.stage),
            *(f"{getattr(memory, name):.{1 if memory.total >= 10 else 3}f}" for name in CLASSES),
            "; ".join(
                _shards_text(plan, stage) for stage in plan.stages if stage.rank == memory.stage
            ),
        )
        for memory in ranks
    ]
    heading, *lines = aligned(
        (("stage", *SHORT, "shards"), *rows), out.width, left=(0, len(SHORT) + 1)
    )
    say(out, f"  GiB per GPU; the device has {gib_text(ranks[0].capacity)}", "dim")
    say(out, heading, "dim")
    for line in lines:
        say(out, line)
    if len(ranks) < plan.mesh.pp:
        say(
            out,
            f"  ({counted(plan.mesh.pp - len(ranks), 'less full stage')} left out: plan show "
            f"lists them all)",
            "dim",
        )


def _shards_text(plan: TracedPlan, stage: ShardStage) -> str:
    """`12: h.0 (ln_1, attn) to h.5 (ln_2, mlp)`."""
    first, last = plan.shards[stage.first].name, plan.shards[stage.end - 1].name
    return f"{stage.end - stage.first}: {first}" + (f" to {last}" if last != first else "")


def _notes(plan: TracedPlan) -> Iterator[str]:
    """Yields failures of the solver, the kind of the step time, and the lack of an error band."""
    if plan.search.solver_failure:
        yield plan.search.solver_failure
    note = _PRICE_NOTES.get(plan.predicted.step_time_s.kind)
    if note:
        yield note
    yield "band unknown: no measured steps of traced modules"
    if plan.training.stack.name != EXECUTORS_STACK:
        yield (
            f"priced as {plan.training.stack.name} runs it; parplan's own executor is --stack "
            f"{EXECUTORS_STACK}"
        )
