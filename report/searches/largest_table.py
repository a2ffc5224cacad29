"""The largest models that fit, as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console

from parplan.costmodels.host.offload import Offload
from parplan.planner.plan.derived import host_gib, tokens_per_s
from parplan.planner.plan.plan import Plan
from parplan.planner.request import Request
from parplan.planner.search.largest_model import LEVELS, LargestModel
from parplan.profiles.units import format_count, gib, tflops
from parplan.report.names import OPTIMIZER_NAMES, graph_of, plan_phrase
from parplan.report.text import (
    FIXED_WIDTH,
    gib_text,
    joined,
    labelled,
    print_table,
    say,
    seconds_text,
)

_TEXTS = ("on the host", "model", "plan")
_HEADING = (
    "on the host",
    "model",
    "layers",
    "parameters",
    "step",
    "TFLOP/s",
    "each",
    "tokens/s",
    "GPU",
    "host",
    "plan",
)


def flops_per_s(plan: Plan) -> float:
    """FLOP/s of the model on all devices, without recompute, with full attention (EQUATIONS K4)."""
    return (
        plan.predicted.mfu.value
        * plan.cluster.device.peak(plan.training.precision)
        * plan.cluster.num_gpus
    )


def peak_gib(plan: Plan) -> float:
    """GiB of the fullest device."""
    return max(stage.total for stage in plan.predicted.memory_gib)


def host_text(offload: Sequence[Offload]) -> str:
    """Names what may be offloaded to the host, for a cell of the table."""
    if tuple(offload) == LEVELS[-1]:
        return "all"
    return ", ".join(offload) or "nothing"


def print_largest(
    rows: Sequence[LargestModel],
    request: Request,
    out: Console,
    *,
    assumed: Sequence[str],
    elapsed_s: float,
) -> None:
    """Print the largest model of each offload level, its cost, and why no larger model fits."""
    cluster, training = request.cluster, request.training
    say(
        out,
        joined(
            (
                cluster.text,
                f"{gib(cluster.host_memory_bytes):,.0f} GiB of host memory a node",
                f"{training.global_batch_size:,} x {training.seq_length:,} tokens, "
                f"{training.precision}, {OPTIMIZER_NAMES[training.optimizer]}",
            ),
            " | ",
            out.width,
            indent=2,
        ),
        "bold",
    )
    say(out, joined(assumed, ", ", out.width, start="assumed: "), "dim")
    say(out)
    wide = out.width > FIXED_WIDTH
    heading = _HEADING if wide else _HEADING[:-1]
    print_table(out, heading, [_cells(row)[: len(heading)] for row in rows], left=_TEXTS)
    say(out)
    for label, text in _facts(rows, elapsed_s, wide=wide):
        say(out, joined(text.split(" "), " ", out.width, start=labelled(label)))


def _cells(row: LargestModel) -> tuple[str, ...]:
    plan = row.plan
    if plan is None:
        return (host_text(row.offload), "none", *("" for _ in _HEADING[2:]))
    total = tflops(flops_per_s(plan))
    return (
        host_text(row.offload),
        plan.model.name,
        str(plan.model.num_layers),
        format_count(graph_of(plan).num_parameters),
        seconds_text(plan.predicted.step_time_s.value),
        f"{total:,.0f}",
        f"{total / plan.cluster.num_gpus:,.1f}",
        f"{tokens_per_s(plan):,.0f}",
        gib_text(peak_gib(plan)),
        gib_text(host_gib(plan)),
        plan_phrase(plan),
    )


def _facts(
    rows: Sequence[LargestModel], elapsed_s: float, *, wide: bool
) -> Iterator[tuple[str, str]]:
    """Yields the lines under the table: plans if it is narrow, why nothing larger fits, notes."""
    label = "plan"
    for row in rows if not wide else ():
        if row.plan:
            yield label, f"{host_text(row.offload)}: {plan_phrase(row.plan)}"
            label = ""
    label = "next"
    for row in rows:
        if row.next_error:
            yield label, f"{host_text(row.offload)}: {row.next_error.message}"
            label = ""
    searches = sum(row.num_searches for row in rows)
    stopped = next((row.stopped for row in rows if row.stopped), None)
    if stopped:
        yield "stopped", f"early ({stopped}): a larger model may fit, and rows may be missing"
    yield "searched", f"{searches} searches in {elapsed_s:.1f} s; of each model the fastest plan"
    kinds = {str(row.plan.predicted.step_time_s.kind) for row in rows if row.plan}
    yield (
        "note",
        (
            f"all values are predicted ({', '.join(sorted(kinds)) or 'computed'}). TFLOP/s: of "
            f"the model on all GPUs, recompute left out; "
            "GPU, host: GiB of the fullest GPU and of a node's host"
        ),
    )
