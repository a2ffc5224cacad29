"""The layer plans of a plan, and the placement of every operator under tensor parallelism."""

from __future__ import annotations

from rich.console import Console

from parplan.planner.plan.derived import blocks_of
from parplan.planner.plan.plan import LayerPlan, OperatorPlacement, Plan
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.units import spans_text
from parplan.report.names import (
    graph_of,
    host_activations_text,
    recompute_text,
    zero_text,
)
from parplan.report.text import print_table, say


def print_layers(plan: Plan, out: Console) -> None:
    """Print the layer plans, and the layers that run on each."""
    graph = graph_of(plan)
    offloads = any(layer_plan.keep_on_host for layer_plan in plan.layer_plans.values())
    rows = []
    for name, layer_plan in plan.layer_plans.items():
        recompute = (
            recompute_text(layer_plan, graph) if layer_plan.layer is LayerKind.BLOCK else "none"
        )
        on_host = (host_activations_text(layer_plan, graph) or "-",) if offloads else ()
        rows.append((name, zero_text(layer_plan), recompute, *on_host, _where(plan, name)))
    say(out)
    on_host_heading = ("kept on the host",) if offloads else ()
    heading = ("layer plan", "ZeRO", "recompute", *on_host_heading, "runs")
    zero_is_text = ("ZeRO",) if plan.chunks else ()
    words = ("layer plan", *zero_is_text, "recompute", "kept on the host", "runs")
    print_table(out, heading, rows, left=words)
    if plan.mesh.tp > 1:
        _print_placements(plan, out)


def _where(plan: Plan, name: str) -> str:
    """`blocks 0-17, 22-39` with adjacent runs joined, or the layer itself: `embedding`, `head`."""
    runs = (run for stage in plan.stages for run in stage.layers if run.plan == name)
    blocks = [block for run in runs for block in blocks_of(plan, run)]
    layer_plan = plan.layer_plans[name]
    of_class = f" ({layer_plan.block})" if layer_plan.block else ""
    return f"blocks {spans_text(blocks)}{of_class}" if blocks else str(layer_plan.layer)


def _print_placements(plan: Plan, out: Console) -> None:
    """Print each distinct placement once: most layer plans differ in recompute and ZeRO only."""
    shown: list[LayerPlan] = []
    for layer_plan in plan.layer_plans.values():
        if not any(
            (known.layer, known.block, known.operators)
            == (layer_plan.layer, layer_plan.block, layer_plan.operators)
            for known in shown
        ):
            shown.append(layer_plan)
    rows = [
        (
            layer_plan.block or str(layer_plan.layer) if index == 0 else "",
            name,
            _axes(placed.input),
            _axes(placed.output),
            _parameters(placed),
        )
        for layer_plan in shown
        for index, (name, placed) in enumerate(layer_plan.operators.items())
    ]
    heading = ("layer", "operator", "input", "output", "parameters")
    say(out)
    print_table(out, heading, rows, left=heading)
    say(out, "  '-' is replicated on every rank", "dim")


def _parameters(placed: OperatorPlacement) -> str:
    return (
        ", ".join(f"{name} {_axes(axes)}" for name, axes in placed.parameters.items() if axes)
        or "-"
    )


def _axes(placements: tuple[str, ...]) -> str:
    return " ".join(placements) or "-"
