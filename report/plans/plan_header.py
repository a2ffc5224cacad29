"""The first lines of every report of a plan: model, machine, work, and defaults taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Console

from parplan.planner.plan.plan import Plan
from parplan.planner.plan.traced_plan import AnyPlan, TracedPlan
from parplan.profiles.state_precision import StatePrecision
from parplan.profiles.units import counted, format_count
from parplan.report.names import OPTIMIZER_NAMES, graph_of
from parplan.report.plans.summary_context import SummaryContext
from parplan.report.text import joined, say

# defaults that the header says, or that few users change
_SELDOM_CHANGED = (
    "--precision",
    "--gradient-precision",
    "--optimizer",
    "--attention",
    "--memory-margin",
)
# choices of the search that need their reason: without it the user would ask for the opposite
_WITH_REASON = ("--offload", "--chunk-access")


def print_header(plan: AnyPlan, out: Console, context: SummaryContext) -> None:
    """Print model, cluster and training, the defaults that were taken, and an empty line."""
    say(out, header(plan, out.width), "bold")
    if context.not_understood:
        say(out, unknown_names(context.not_understood, out.width), "yellow")
    if context.assumed:
        say(out, joined(context.assumed, ", ", out.width, start="assumed: "), "dim")
    say(out)


def unknown_names(names: Sequence[str], width: int) -> str:
    """Returns the names of a launcher's file that its reader does not know, in a sentence."""
    start = "not understood, taken as without effect on time and memory: "
    return joined(names, ", ", width, start=start, indent=2)


def short_assumed(assumed: Sequence[str], width: int, *, listed: bool) -> str:
    """Returns the defaults that a user would change first, and the number of the others.

    listed   false to return the GPU and the number of the others
    """
    first = [
        text if text.startswith(_WITH_REASON) else text.split(" (")[0]
        for text in assumed
        if text.split(" ")[0] not in _SELDOM_CHANGED
    ]
    if not listed:
        first = [text for text in first if text.startswith("--gpu ")]
    others = len(assumed) - len(first)
    of = "more" if first else "defaults"
    more = (f"{others} {of} (--verbose)",) if others else ()
    return joined((*first, *more), ", ", width, start="assumed: ")


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
            cluster.text,
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


def _layers_text(plan: Plan) -> str:
    """Returns the number of blocks, and of those of each class where there are several."""
    tower = plan.model.tower
    counts = Counter(str(key) for key in graph_of(plan).blocks)
    classes = ", ".join(f"{count} {name}" for name, count in counts.items())
    beside = f", {tower.name} tower of {tower.num_layers}" if tower else ""
    listed = f" ({classes})" if len(counts) > 1 else ""
    return f"{plan.model.num_layers} layers{beside}{listed}"
