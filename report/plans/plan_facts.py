"""The facts of a summary: a label and two phrases each."""

from __future__ import annotations

from collections.abc import Iterator

from parplan.costmodels.host.offload import Offload
from parplan.planner.calibration.profile_coverage import Coverage
from parplan.planner.objective import Objective, Prefer
from parplan.planner.plan.certificate_record import CertifyingProgram
from parplan.planner.plan.prediction import SearchRecord, Status
from parplan.planner.plan.traced_plan import AnyPlan, TracedPlan
from parplan.profiles.units import format_number, gib
from parplan.report.names import attention_text, pipeline_phrases, search_text
from parplan.report.plans.block_phrases import layers_phrases
from parplan.report.plans.chunk_tables import chunks_fact
from parplan.report.plans.coverage_notes import coverage_of_profile, coverage_text
from parplan.report.plans.goodput_fact import goodput_facts
from parplan.report.plans.memory_table import fullest
from parplan.report.plans.network_fact import network_facts
from parplan.report.plans.summary_context import SummaryContext
from parplan.report.text import band_text, gib_text, percent, seconds_text

Fact = tuple[str, str, str]
_LEFT_OUT = ("network", "stack", "front")  # of the short form
_LEAST_SHOWN = 0.001  # the smallest share that is not shown as zero


def deciding_facts(plan: AnyPlan, context: SummaryContext) -> Iterator[Fact]:
    """Yields the facts of the short form, without the parts that decide nothing."""
    measured = None
    if context.profile and not isinstance(plan, TracedPlan):
        measured = coverage_of_profile(plan)
    return (fact for fact in facts(plan, context, measured) if fact[0] not in _LEFT_OUT)


def facts(plan: AnyPlan, context: SummaryContext, measured: Coverage | None) -> Iterator[Fact]:
    """Yields all facts; `measured` is how much of the plan its profile has measured."""
    traced = isinstance(plan, TracedPlan)
    predicted = plan.predicted
    yield "mesh", str(plan.mesh), ", ".join(pipeline_phrases(plan.pipeline, plan.mesh))
    yield from network_facts(plan)
    yield ("stages" if traced else "layers", *layers_phrases(plan))
    if plan.chunks:
        yield chunks_fact(plan, plan.chunks)
    yield ("stack", *_stack_phrases(plan))
    if measured:
        device = plan.cluster.device.name
        yield (
            "profile",
            f"{context.profile} of {device}" if context.profile else device,
            coverage_text(measured),
        )
    if plan.module:
        yield (
            "module",
            plan.module.text,
            "unmodified: traced, and cut between its shards"
            if traced
            else "unmodified: divided as Megatron does, blocks recomputed whole or not",
        )
    step = predicted.step_time_s
    band = predicted.error_band
    of_step = f" {band_text(band.time.share)}" if band else ""
    yield (
        "step",
        f"{seconds_text(step.value)}{of_step} ({step.kind})",
        f"{_speed_text(plan)}, {percent(predicted.mfu.value)} MFU",
    )
    yield from goodput_facts(plan, context.failures)
    yield _memory_fact(plan)
    if host := max(memory.host for memory in predicted.memory_gib):
        yield _host_fact(plan, host)
    yield proof(plan, context)
    choice = plan.search.preference
    if choice and choice.prefer is not Prefer.FASTEST:
        slower = f"{percent(choice.slowdown)} slower" if choice.slowdown else "the fastest too"
        yield "prefer", f"{choice.prefer}, {slower}", choice.reason
    front = plan.search.front
    if front:
        place = f"point {front.number} of {front.points}, fastest first"
        incomplete = "" if front.complete else "; the front is incomplete"
        yield "front", search_text(plan.search), place + incomplete


def _speed_text(plan: AnyPlan) -> str:
    speed = plan.predicted.tokens_per_s_per_gpu.value
    if isinstance(plan, TracedPlan):
        return f"{format_number(speed, 4)} {plan.traced.unit}/s/GPU"
    return f"{speed:,.0f} tokens/s/GPU"


def _memory_fact(plan: AnyPlan) -> tuple[str, str, str]:
    """Returns the peak of the fullest device, and what it has free."""
    worst, band = fullest(plan), plan.predicted.error_band
    of_memory = f" ({band_text(band.memory.share)})" if band else ""
    free = worst.capacity - worst.total
    place = f"stage {worst.stage}, the fullest; " if plan.mesh.pp > 1 else ""
    room = (
        f"{gib_text(free)} GiB free"
        if free >= 0
        else f"does not fit: {gib_text(-free)} GiB more than the device has"
    )
    return (
        "memory",
        f"{gib_text(worst.total)} GiB{of_memory} of {worst.capacity:.1f}",
        place + room,
    )


def _host_fact(plan: AnyPlan, host_gib: float) -> tuple[str, str, str]:
    """Returns the memory of the hosts that the plan uses, and its use."""
    node = (
        f"{gib_text(host_gib * plan.cluster.gpus_per_node)} GiB a node of "
        f"{gib(plan.cluster.host_memory_bytes):,.0f}"
    )
    if isinstance(plan, TracedPlan):
        use = "; all states are there" if plan.states_on_host else ""
    elif any(Offload.LOOKUP in layer_plan.offload for layer_plan in plan.layer_plans.values()):
        tied = plan.model.tied_embeddings
        use = "; the token table is there" if tied else "; tokens are looked up there"
    else:
        use = ""
    return "host", f"{gib_text(host_gib)} GiB for a GPU", node + use


def _stack_phrases(plan: AnyPlan) -> tuple[str, str]:
    """Returns the priced software stack, its attention kernel and its gradient reduction."""
    training = plan.training
    attention = attention_text(training, plan.cluster.device)
    reduction = "hidden" if training.overlap_grad_reduce else "not hidden"
    return training.stack.name, f"{attention} attention, gradient reduction {reduction}"


def _programs_phrase(search: SearchRecord) -> str:
    """Returns how many integer programs ran, nothing where none did or an older plan says none."""
    if search.certificate is None or not search.certificate.programs:
        return ""
    return f", by {_counted(search.certificate.programs, 'integer program')}"


def _layouts_phrase(search: SearchRecord) -> str:
    """Returns the size of the programs, and the layouts that bounds closed without a choice.

    Older plans have the numbers of their candidates alone.
    """
    certificate, candidates = search.certificate, search.candidates
    if certificate is None:
        return (
            f"{candidates.considered:,} candidates: {candidates.pruned:,} pruned, "
            f"{candidates.solved:,} solved"
        )
    layouts = f"{_counted(certificate.layouts, 'layout')}, {certificate.closed:,} closed by bounds"
    if not certificate.programs:
        return layouts
    differs = _difference_text(certificate.plan) if certificate.plan else ""
    variables = _counted(certificate.variables, "variable")
    return f"{certificate.solver.name}, {variables}{differs}; {layouts}"


def _difference_text(program: CertifyingProgram) -> str:
    """Returns how far the certifying program is from the search, nothing where both agree."""
    if not program.gap:
        return ""
    side = "below" if program.gap > 0 else "above"
    share = f"{100 * abs(program.gap):.2g} %"
    return f"; the certifying one is {share} {side} the search's own choice"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def proof(plan: AnyPlan, context: SummaryContext) -> tuple[str, str, str]:
    """Returns the summary's line on what the search proved, with its numbers of candidates."""
    search = plan.search
    if search.status is Status.ESTIMATE:
        return "proven", "nothing", "priced by hand, not searched"
    if search.method is not None:
        priced = f"{search.candidates.considered:,} points priced by the method {search.method}"
        return "proven", "nothing", priced
    took = "" if context.elapsed_s is None else f", {context.elapsed_s:.1f} s"
    counts = f"{_layouts_phrase(search)}{took}"
    if (layers := search.layers) and context.whole:
        found = (
            f"find a block {percent(layers.gap)} faster" if layers.gap else "find no faster block"
        )
        counts = f"{counts}; integer programs {found}"
    gap = f"gap {percent(search.gap)}"
    if search.status is not Status.OPTIMAL and gap == f"gap {percent(0.0)}":
        gap = f"gap under {percent(_LEAST_SHOWN)}"
    if search.preference and search.preference.slowdown:
        gap = f"{gap} of the fastest"
    if search.objective is not Objective.THROUGHPUT:
        slower = plan.predicted.step_time_s.value / search.fastest_step_time_s - 1
        if search.objective is Objective.PEAK:
            measure = "the fullest GPU's peak"
        elif max(memory.host for memory in plan.predicted.memory_gib):
            measure = "one copy and redundancy"
        else:
            measure = "the redundancy"
        gap = f"{gap} of {measure}"
        if first := search.memory_first:
            step_gap = 1 - first.step_bound_s / first.step_s
            gap = f"{gap} ({gib_text(search.value)} GiB)"
            counts = (
                f"within {100 * first.slack:g} % of it the fastest, gap {percent(step_gap)}; "
                f"{counts}"
            )
        counts = f"{percent(slower)} slower than the fastest; {counts}"
    gap = f"{gap}{_programs_phrase(search)}"
    if search.status is Status.OPTIMAL:
        return "proven", gap, counts
    reason = "stopped early (Ctrl-C); " if context.interrupted else "stopped early; "
    return "proven", gap, reason + counts
