"""The summary of a plan, in the shape that `plan` and `plan show` print."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich.console import Console

from parplan.costmodels.communication.mesh import Mesh, MeshOrder
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.usage.goodput import Failures
from parplan.planner.calibration.profile_coverage import Coverage
from parplan.planner.export.launcher_prices import LauncherPrice
from parplan.planner.objective import Objective, Prefer
from parplan.planner.plan.plan import OVER_DATA, Plan
from parplan.planner.plan.prediction import ErrorBand, RunnerUp, Status
from parplan.planner.plan.ties import Tie, preferred
from parplan.planner.plan.traced_plan import AnyPlan, TracedPlan
from parplan.profiles.machines.unequal_cluster import UnequalCluster
from parplan.profiles.state_precision import StatePrecision
from parplan.profiles.units import counted, format_count, format_number, gib
from parplan.report.names import (
    OPTIMIZER_NAMES,
    attention_text,
    blocks_by_plan,
    graph_of,
    host_activations_text,
    pipeline_phrases,
    recompute_text,
    search_text,
    zero_text,
)
from parplan.report.plans.chunk_tables import chunks_fact
from parplan.report.plans.coverage_notes import coverage_notes, coverage_of_profile, coverage_text
from parplan.report.plans.goodput_fact import goodput_facts
from parplan.report.plans.launcher_lines import launcher_lines
from parplan.report.plans.memory_table import fullest, print_stages
from parplan.report.plans.network_fact import network_facts
from parplan.report.plans.notes import notes
from parplan.report.plans.stage_waits import wait_lines
from parplan.report.text import (
    LABEL_WIDTH,
    aligned,
    band_text,
    gib_text,
    joined,
    labelled,
    percent,
    say,
    seconds_text,
)

RUNNERS_UP = 3  # plans in the short form
NOTHING = 1e-9  # share of the step below which a time is rounding
STEP_CAUSES = (
    ("compute", "compute_s"),
    ("recompute", "recompute_s"),
    ("bubble", "pp_bubble_s"),
    ("data", "dp_comm_s"),
    ("tensor", "tp_comm_s"),
    ("p2p", "pp_comm_s"),
    ("host", "host_comm_s"),
    ("optimizer", "optimizer_s"),
)
REDUNDANT = ("parameters", "gradients", "optimizer", "activations", "temporaries")


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryContext:
    """Facts of the summary that the plan does not hold.

    assumed      defaults that were taken
    elapsed_s    seconds of the search, None when unknown
    interrupted  true when Ctrl-C ended the search
    whole        true to print every stage and every runner-up
    profile      file of --profile as the user named it, empty when unknown
    plan_file    file of the plan as the user named it, empty when unknown
    launchers    the plan at launchers, in whose nearest settings it is another one
    ruled        a rule of the user said the recompute of the stages
    failures     failures of the cluster, None where no goodput is asked for
    """

    assumed: tuple[str, ...] = ()
    elapsed_s: float | None = None
    interrupted: bool = False
    whole: bool = False
    profile: str = ""
    plan_file: str = ""
    launchers: tuple[LauncherPrice, ...] = ()
    ruled: bool = False
    failures: Failures | None = None


def print_summary(plan: AnyPlan, out: Console, context: SummaryContext) -> None:
    """Print the plan for a person."""
    print_header(plan, out, context)
    measured = None if isinstance(plan, TracedPlan) else coverage_of_profile(plan)
    facts = _facts(plan, context, measured)
    for line in aligned(
        ((f"{label:{LABEL_WIDTH - 4}}", *fact) for label, *fact in facts), out.width, left=(0, 1, 2)
    ):
        say(out, line)
    say(out)
    say(out, _time_line(plan, out.width))
    for line in wait_lines(plan, out.width, whole=context.whole):
        say(out, line)
    say(out, _redundancy_line(plan, out.width))
    say(out)
    print_stages(plan, out, whole=context.whole)
    say(out)
    _print_runners_up(plan, out, whole=context.whole)
    _print_ties(plan, out)
    for line in launcher_lines(context.launchers, out.width):
        say(out, line)
    printed = list(notes(plan, ruled=context.ruled))
    if measured and not isinstance(plan, TracedPlan):
        printed += coverage_notes(measured, plan, context.profile, context.plan_file)
    for index, note in enumerate(printed):
        say(
            out,
            joined(note.split(" "), " ", out.width, start=labelled("" if index else "note")),
            "dim",
        )


def print_header(plan: AnyPlan, out: Console, context: SummaryContext) -> None:
    """Print model, cluster and training, the defaults that were taken, and an empty line."""
    say(out, header(plan, out.width), "bold")
    if context.assumed:
        say(out, joined(context.assumed, ", ", out.width, start="assumed: "), "dim")
    say(out)


def header(plan: AnyPlan, width: int) -> str:
    """Returns model, cluster and training: the first line of every report of a plan."""
    if isinstance(plan, TracedPlan):
        return _traced_header(plan, width)
    model = plan.model
    cluster = plan.cluster
    training = plan.training
    products = f" with {training.products} products" if training.products else ""
    if training.narrow_weights:
        products += " and weights"
    kept = training.stack.states
    states = f" ({kept} states)" if kept not in (None, StatePrecision.FP32) else ""
    return joined(
        (
            f"{model.name}, {_parameters(plan)}, {_layers_text(plan)}",
            cluster.text
            if isinstance(cluster, UnequalCluster)
            else f"{cluster.num_gpus} x {cluster.device.name}, {cluster.gpus_per_node} a node",
            f"{training.global_batch_size:,} x {training.seq_length:,} tokens, "
            f"{training.precision}{products}, "
            f"{OPTIMIZER_NAMES[training.optimizer]}{states}",
            *_trained(plan),
        ),
        " | ",
        width,
        indent=2,
    )


def _traced_header(plan: TracedPlan, width: int) -> str:
    """Returns module, cluster and training as the first line."""
    traced = plan.traced
    cluster = plan.cluster
    training = plan.training
    of = (
        f"{training.global_batch_size} sequences of {training.seq_length}"
        if traced.unit == "tokens"
        else (f"{training.global_batch_size} {traced.unit}")
    )
    return joined(
        (
            f"{traced.name}, {format_count(traced.num_parameters)} parameters, "
            f"{counted(traced.num_operators, 'operator')} in "
            f"{counted(len(plan.shards), 'shard')}",
            f"{cluster.num_gpus} x {cluster.device.name} in {cluster.nodes} x "
            f"{cluster.gpus_per_node}",
            f"{of}, {training.precision}",
        ),
        "; ",
        width,
    )


def _parameters(plan: Plan) -> str:
    graph = graph_of(plan)
    active = (
        f" ({format_count(graph.num_active_parameters)} active)" if plan.model.num_experts else ""
    )
    return f"{format_count(graph.num_parameters)} parameters{active}"


def _trained(plan: Plan) -> Iterator[str]:
    """Yields the trained part of a model that is fine-tuned."""
    tuning, graph = plan.training.fine_tuning, graph_of(plan)
    if tuning is None:
        return
    yield (
        f"{tuning.text}; {format_count(graph.num_trained_parameters)} of "
        f"{format_count(graph.num_parameters)} parameters trained"
    )


def _facts(
    plan: AnyPlan, context: SummaryContext, measured: Coverage | None
) -> Iterator[tuple[str, str, str]]:
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


def _layers_text(plan: Plan) -> str:
    """Returns the number of blocks, and of those of each class where there are several."""
    tower = plan.model.tower
    counts = Counter(str(key) for key in graph_of(plan).blocks)
    classes = ", ".join(f"{count} {name}" for name, count in counts.items())
    beside = f", {tower.name} tower of {tower.num_layers}" if tower else ""
    listed = f" ({classes})" if len(counts) > 1 else ""
    return f"{plan.model.num_layers} layers{beside}{listed}"


def layers_phrases(plan: AnyPlan) -> tuple[str, str]:
    """Returns ZeRO stage, recompute and host activations, with numbers of blocks if they differ."""
    if isinstance(plan, TracedPlan):
        return _shard_phrases(plan)
    graph = graph_of(plan)
    zero = Counter[str]()
    recompute = Counter[str]()
    kept = Counter[str]()
    for name, count in blocks_by_plan(plan).items():
        layer_plan = plan.layer_plans[name]
        zero[f"ZeRO {zero_text(layer_plan, chunk_states=False)}"] += count
        recompute[recompute_text(layer_plan, graph)] += count
        kept[host_activations_text(layer_plan, graph) or "nothing"] += count
    sequence = (
        ", sequence parallel"
        if any(layer.sequence_parallel for layer in plan.layer_plans.values())
        else ""
    )
    host = f"; kept on the host: {', '.join(_shares(kept))}" if set(kept) != {"nothing"} else ""
    recomputed = f"recompute {', '.join(_shares(recompute))}{sequence}{host}{_over_data(plan)}"
    return ", ".join(_shares(zero)), recomputed


def _over_data(plan: Plan) -> str:
    """Returns the operators whose weights data-parallel ranks divide, in words."""
    divided = Counter[str]()
    for name, count in blocks_by_plan(plan).items():
        operators = plan.layer_plans[name].operators.items()
        names = [
            operator
            for operator, placed in operators
            if any(entry.endswith(OVER_DATA) for e in placed.parameters.values() for entry in e)
        ]
        if names:
            divided[f"weights of {' and '.join(names)} over dp too"] += count
    if not divided:
        return ""
    every = divided.total() == plan.model.num_blocks
    return "; " + ", ".join(
        text if every and len(divided) == 1 else f"{text} on {counted(count, 'block')}"
        for text, count in divided.items()
    )


def _shard_phrases(plan: TracedPlan) -> tuple[str, str]:
    """Returns ZeRO stages, and the numbers of shards that are recomputed, as a whole or in part."""
    zero = Counter(f"ZeRO {stage.zero}" for stage in plan.stages)
    whole, num_recomputed = len(plan.shards), sum(len(stage.recompute) for stage in plan.stages)
    in_part = Counter[str]()
    for each in (each for stage in plan.stages for each in stage.recompute_lists):
        in_part[counted(len(each.places), "operator")] += len(each.shards)
    shares = [f"{num_recomputed} of {whole} shards"] if num_recomputed else []
    shares += [f"{counted(count, 'shard')} with {text}" for text, count in sorted(in_part.items())]
    recompute = "full" if num_recomputed == whole else ", ".join(shares) or "none"
    phrases = (
        name if len(zero) == 1 else f"{name} on {counted(count, 'stage')}"
        for name, count in zero.items()
    )
    return ", ".join(phrases), f"recompute {recompute}"


def _stack_phrases(plan: AnyPlan) -> tuple[str, str]:
    """Returns the priced software stack, its attention kernel and its gradient reduction."""
    training = plan.training
    attention = attention_text(training, plan.cluster.device)
    reduction = "hidden" if training.overlap_grad_reduce else "not hidden"
    return training.stack.name, f"{attention} attention, gradient reduction {reduction}"


def _shares(counts: Counter[str]) -> Iterator[str]:
    for index, (name, count) in enumerate(counts.items()):
        unit = " blocks" if index == 0 else ""
        yield name if len(counts) == 1 else f"{name} on {count}{unit}"


def proof(plan: AnyPlan, context: SummaryContext) -> tuple[str, str, str]:
    """Returns the summary's line on what the search proved, with its numbers of candidates."""
    search = plan.search
    if search.status is Status.ESTIMATE:
        return "proven", "nothing", "priced by hand, not searched"
    took = "" if context.elapsed_s is None else f", {context.elapsed_s:.1f} s"
    counts = (
        f"{search.candidates.considered:,} candidates: {search.candidates.pruned:,} pruned, "
        f"{search.candidates.solved:,} solved{took}"
    )
    if layers := search.layers:
        found = (
            f"find a block {percent(layers.gap)} faster" if layers.gap else "find no faster block"
        )
        counts = f"{counts}; integer programs {found}"
    gap = f"gap {percent(search.gap)}"
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
    if search.status is Status.OPTIMAL:
        return "proven", gap, counts
    reason = "stopped early (Ctrl-C); " if context.interrupted else "stopped early; "
    return "proven", gap, reason + counts


def _time_line(plan: AnyPlan, width: int) -> str:
    """Returns the step time by cause; causes that cost nothing are left out."""
    step_s = plan.predicted.step_time_s.value
    scale, unit = (1.0, "s") if step_s >= 1 else (1e3, "ms")
    digits = 1 if step_s * scale >= 100 else 2
    breakdown = plan.predicted.breakdown
    times = ((name, getattr(breakdown, field).value) for name, field in STEP_CAUSES)
    inside = (("tensor", plan.mesh.tp), ("context", plan.mesh.cp), ("experts", plan.mesh.ep))
    sent = [name for name, degree in inside if degree > 1]
    names = {"tensor": " + ".join(sent)} if sent else {}
    phrases = [
        f"{names.get(name, name)} {seconds * scale:.{digits}f}"
        for name, seconds in times
        if seconds > NOTHING * step_s
    ]
    return joined((f"{phrases[0]} {unit}", *phrases[1:]), " | ", width, start=labelled("time"))


def _redundancy_line(plan: AnyPlan, width: int) -> str:
    """Returns GiB of the cluster beyond one copy of everything, by class."""
    redundancy = plan.predicted.redundancy_gib
    classes = {name: getattr(redundancy, name) for name in REDUNDANT if getattr(redundancy, name)}
    parts = [f"{name} {gib_text(value)}" for name, value in classes.items()]
    if min(classes.values(), default=0.0) < 0:
        parts.append("below zero is of one copy what the host holds")
    return joined(
        (f"{gib_text(redundancy.total)} GiB over all GPUs", *parts),
        " | ",
        width,
        start=labelled("redundant"),
    )


def _print_runners_up(plan: AnyPlan, out: Console, *, whole: bool) -> None:
    """Print the candidates that were nearly as good as the plan."""
    runners_up = plan.search.runners_up
    if not whole:
        runners_up = _best_of_each_mesh(runners_up)[:RUNNERS_UP]
    if not runners_up:
        return
    labels = ("also", *[""] * (len(runners_up) - 1))
    rows = (
        (f"{label:{LABEL_WIDTH - 4}}", *_runner_up(runner_up, plan))
        for label, runner_up in zip(labels, runners_up, strict=True)
    )
    for line in aligned(rows, out.width, left=(0, 4)):
        say(out, line)


def _best_of_each_mesh(runners_up: Sequence[RunnerUp]) -> tuple[RunnerUp, ...]:
    """Returns the first of the runners-up with the same degrees, in any order of the axes."""
    best: dict[Mesh, RunnerUp] = {}
    for runner_up in runners_up:
        best.setdefault(replace(runner_up.mesh, order=MeshOrder.PP_DP_TP), runner_up)
    return tuple(best.values())


def _runner_up(runner_up: RunnerUp, plan: AnyPlan) -> tuple[str, str, str, str]:
    step_s = runner_up.step_time_s.value
    slower = step_s / plan.predicted.step_time_s.value - 1
    memory = f"{gib_text(runner_up.peak_memory_gib)} GiB"
    if plan.search.objective is Objective.MEMORY:
        memory += f", {gib_text(runner_up.redundancy_gib)} redundant"
    return (
        seconds_text(step_s),
        f"({100 * slower:+.1f} %{', tie' if is_tie(runner_up, plan) else ''})",
        memory,
        runner_up_name(runner_up),
    )


def runner_up_name(runner_up: RunnerUp) -> str:
    sequence = ("sequence parallel",) if runner_up.sequence_parallel else ()
    weights = ("weights over dp too",) if runner_up.weights_over_data else ()
    phrases = pipeline_phrases(runner_up.pipeline, runner_up.mesh)
    return ", ".join((str(runner_up.mesh), *phrases, *sequence, *weights))


def is_tie(runner_up: RunnerUp, plan: AnyPlan) -> bool:
    """Tells if the prices cannot say which is faster, with throughput as the objective."""
    return runner_up.inside_error_band and plan.search.objective is Objective.THROUGHPUT


def _print_ties(plan: AnyPlan, out: Console) -> None:
    """Print the number of ties, the leanest and the most robust of them and the plan."""
    ties = [runner_up for runner_up in plan.search.runners_up if is_tie(runner_up, plan)]
    band = plan.predicted.error_band
    if not ties or band is None:
        return
    count = "1 other plan is" if len(ties) == 1 else f"{len(ties)} other plans are"
    text = "; ".join(
        (f"{count} inside the error band of the ratio to it", *_extremes(plan, ties, band))
    )
    say(out, joined(text.split(" "), " ", out.width, start=labelled("ties")))


def _extremes(plan: AnyPlan, ties: Sequence[RunnerUp], band: ErrorBand) -> Iterator[str]:
    """Yields phrases that name the leanest and the most robust plan.

    Older files have no losses; then no plan is called the most robust.
    """
    step_s = plan.predicted.step_time_s.value
    choice = plan.search.preference
    loss = choice.worst_loss if choice else None
    rows = [(step_s, Tie(fullest(plan).total, loss or 0.0), "this plan")]
    for tie in ties:
        slower = 100 * (tie.step_time_s.value / step_s - 1)
        name = f"{runner_up_name(tie)} ({gib_text(tie.peak_memory_gib)} GiB, {slower:+.1f} %)"
        figures = Tie(tie.peak_memory_gib, tie.worst_loss or 0.0)
        rows.append((tie.step_time_s.value, figures, name))
    rows.sort(key=lambda row: row[0])
    titles = {Prefer.LEANEST: "the leanest"}
    if loss is not None:
        titles[Prefer.ROBUST] = "the most robust"
    named: dict[str, list[str]] = {}
    for prefer, title in titles.items():
        index = preferred(prefer, [figures for _, figures, _ in rows], band.memory.share)
        named.setdefault(rows[index][2], []).append(title)
    for name, titles_of in named.items():
        yield f"{' and '.join(titles_of)} is {name}"
