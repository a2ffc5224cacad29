"""Bytes of activations that a pipeline rank holds over a predicted step, from its timeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
from parplan.costmodels.schedules.actions import ActionKind
from parplan.costmodels.schedules.simulator import StageCost
from parplan.costmodels.stage_costs import step_costs
from parplan.costmodels.strategy import Strategy
from parplan.planner.runs.run_file import WorkSpan
from parplan.planner.runs.timelines import Timeline

Moment = tuple[float, float]  # seconds into the step, and bytes held from then on


def held_activations(
    strategy: Strategy, price_cache: LayerPriceCache, timeline: Timeline
) -> tuple[tuple[Moment, ...], ...]:
    """Returns the moments of each pipeline rank at which its held bytes change.

    A stash is held from the start of its forward pass to the end of its backward pass, as the
    simulator counts it (costmodels/schedules/simulator.py).
    """
    stages = step_costs(strategy, price_cache).stages
    return tuple(
        tuple(_moments(spans, dict(zip(strategy.layout.stages_of(rank), costs, strict=True))))
        for rank, (spans, costs) in enumerate(zip(timeline.spans, stages, strict=True))
    )


def _moments(spans: Sequence[WorkSpan], costs: dict[int, StageCost]) -> Iterator[Moment]:
    changes = [change for change in _changes(spans, costs) if change[1]]
    held = accumulate(n_bytes for _, n_bytes in changes)
    return zip((at_s for at_s, _ in changes), held, strict=True)


def _changes(spans: Sequence[WorkSpan], costs: dict[int, StageCost]) -> Iterator[Moment]:
    """Yields the bytes that each pass adds at its start, or frees at its end, in their order."""
    ahead = {(span.stage, span.micro_batch) for span in spans if span.work == ActionKind.RECOMPUTE}
    for span in spans:
        cost = costs.get(span.stage)
        if cost is None:
            continue
        remade = cost.remade_bytes if (span.stage, span.micro_batch) in ahead else 0.0
        match span.work:
            case ActionKind.FORWARD:
                yield span.start_s, cost.stash_bytes
            case ActionKind.RECOMPUTE:
                yield span.start_s, cost.remade_bytes
            case ActionKind.BACKWARD:
                yield span.end_s, -cost.stash_bytes - remade
            case ActionKind.INPUT_GRADIENT:
                yield span.end_s, cost.waiting_bytes
            case ActionKind.WEIGHT_GRADIENT:
                yield span.end_s, -cost.stash_bytes - cost.waiting_bytes
