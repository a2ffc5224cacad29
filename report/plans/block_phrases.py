"""ZeRO stages, recompute and host activations of a plan in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from parplan.planner.plan.plan import OVER_DATA, Plan
from parplan.planner.plan.traced_plan import AnyPlan, TracedPlan
from parplan.profiles.units import counted
from parplan.report.names import (
    blocks_by_plan,
    graph_of,
    host_activations_text,
    recompute_text,
    zero_text,
)


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


def _shares(counts: Counter[str]) -> Iterator[str]:
    for index, (name, count) in enumerate(counts.items()):
        number = counted(count, "block") if index == 0 else count
        yield name if len(counts) == 1 else f"{name} on {number}"
