"""The timeline of a step: predicted by a replay of the schedule, and the spans of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
from parplan.costmodels.schedules.actions import ActionKind
from parplan.costmodels.schedules.simulator import RankTimeline, StageCost
from parplan.costmodels.stage_costs import StepCosts, step_costs
from parplan.costmodels.step import simulated_step
from parplan.costmodels.strategy import Strategy
from parplan.planner.plan.assemble import stage_waits
from parplan.planner.plan.prediction import StageWait
from parplan.planner.runs.run_file import WHOLE_RANK, RankRecord, WorkSpan

Key = tuple[str, int]  # the work, and its stage, or its pipeline rank for work of a whole rank
RECEIVE = "receive_"
TIED = "tied"
_PASS = {"I": "B", "W": "B", "R": "B"}  # by work, the pass that it is a part of


@dataclass(frozen=True, slots=True)
class Timeline:
    """A predicted step: its waits and spans by pipeline rank, and the seconds of every part."""

    step_s: float
    waits: tuple[StageWait, ...]
    spans: tuple[tuple[WorkSpan, ...], ...]
    parts_s: Mapping[Key, float]


def predicted_timeline(strategy: Strategy, price_cache: LayerPriceCache) -> Timeline:
    """Returns the replayed step; a transfer is the gap before the action that waits for it."""
    costs = step_costs(strategy, price_cache)
    step = simulated_step(strategy, costs, keep_events=True)
    spans = tuple(
        tuple(_rank_spans(strategy, rank, timeline, costs))
        for rank, timeline in enumerate(step.ranks)
    )
    return Timeline(step.step_s, stage_waits(step), spans, parts_s(strategy, costs))


def _rank_spans(
    strategy: Strategy, rank: int, timeline: RankTimeline, costs: StepCosts
) -> Iterator[WorkSpan]:
    ahead = {
        (event.action.chunk, event.action.micro_batch)
        for event in timeline.events
        if event.action.work is ActionKind.RECOMPUTE
    }
    for event in timeline.events:
        action, cost = event.action, costs.stages[rank][event.action.chunk]
        start_s = event.start_s + _received_s(
            action.work, cost, after_recompute=(action.chunk, action.micro_batch) in ahead
        )
        yield WorkSpan(
            work=action.work.value,
            stage=_stage(strategy, rank, action.chunk),
            micro_batch=action.micro_batch,
            start_s=start_s,
            end_s=event.end_s,
        )
    end_s, tail = timeline.finish_s, (costs.reduced_s, costs.tied_s, costs.optimizer_s)
    for work, seconds in zip(
        ("reduce", "tied", "optimizer"), (by_rank[rank] for by_rank in tail), strict=True
    ):
        start_s, end_s = end_s, end_s + seconds
        if seconds > 0:
            yield WorkSpan(
                work=work, stage=WHOLE_RANK, micro_batch=WHOLE_RANK, start_s=start_s, end_s=end_s
            )


def _stage(strategy: Strategy, rank: int, chunk: int) -> int:
    """Returns the virtual stage of a rank's model chunk."""
    return strategy.layout.stages_of(rank)[chunk]


def _received_s(work: ActionKind, cost: StageCost, *, after_recompute: bool) -> float:
    """Seconds of an action that are its receive, less what a recompute ahead hides."""
    backward_s = cost.receive_backward_s - (cost.hidden_s if after_recompute else 0.0)
    return {
        ActionKind.FORWARD: cost.receive_forward_s,
        ActionKind.BACKWARD: backward_s,
        ActionKind.INPUT_GRADIENT: backward_s,
    }.get(work, 0.0)


def parts_s(strategy: Strategy, costs: StepCosts) -> dict[Key, float]:
    """Returns the priced seconds of every part of a step, once each."""
    seconds = dict[Key, float]()
    for rank, chunks in enumerate(costs.stages):
        for chunk, cost in enumerate(chunks):
            stage = _stage(strategy, rank, chunk)
            seconds["F", stage] = cost.forward_s
            seconds["B", stage] = cost.backward_s + cost.recompute_s
            seconds[RECEIVE + "F", stage] = cost.receive_forward_s
            seconds[RECEIVE + "B", stage] = cost.receive_backward_s
        seconds["reduce", rank] = costs.reduced_s[rank]
        seconds["optimizer", rank] = costs.optimizer_s[rank]
    seconds["tied", 0] = max(costs.tied_s)
    return seconds


def measured_parts_s(steps: Iterable[Sequence[RankRecord]]) -> dict[Key, float]:
    """Returns the measured seconds of every part.

    They are the mean over the micro-batches of a step, and the median of these over replicas and
    steps. A mean is taken because a gather of parameters once a step is in the first forward pass.
    All spans of a pass of a micro-batch are its parts: a backward pass in two, its recompute ahead
    of it, or the loss after the last stage's forward. A reduction includes the wait for slower
    replicas, as the step does. That of a tied embedding is the least over the ranks, since the
    other end of the pipeline waits in it for the bubble of this end. A receive is the wait of an
    action after its rank was free and its other end was done, which needs the clocks of the ranks
    to agree.
    """
    samples: dict[Key, list[float]] = defaultdict(list)
    for ranks in steps:
        waits = _receives(ranks)
        least: dict[Key, float] = {}
        for rank in ranks:
            for key, seconds in _means(rank, waits[rank.rank]).items():
                if key[0] == TIED:
                    least[key] = min(seconds, least.get(key, seconds))
                else:
                    samples[key].append(seconds)
        for key, seconds in least.items():
            samples[key].append(seconds)
    return {key: median(values) for key, values in samples.items()}


def _means(rank: RankRecord, waits: Iterable[tuple[Key, float]]) -> dict[Key, float]:
    """Returns the seconds of every part of one rank and step, the mean over micro-batches."""
    whole: dict[tuple[str, int, int], float] = defaultdict(float)
    for span in rank.spans:
        place = rank.pp if span.stage == WHOLE_RANK else span.stage
        if span.work == TIED:
            place = 0
        whole[_PASS.get(span.work, span.work), place, span.micro_batch] += span.seconds
    samples: dict[Key, list[float]] = defaultdict(list)
    for (work, stage, _), seconds in whole.items():
        samples[work, stage].append(seconds)
    for key, seconds in waits:
        samples[key].append(seconds)
    return {key: fmean(values) for key, values in samples.items()}


def _receives(ranks: Sequence[RankRecord]) -> dict[int, list[tuple[Key, float]]]:
    """Returns by rank the waits for input of other ranks, except after a recompute ahead."""
    waits: dict[int, list[tuple[Key, float]]] = {rank.rank: [] for rank in ranks}
    done = {
        (rank.dp, rank.tp, span.work, span.stage, span.micro_batch): (span.end_s, rank.rank)
        for rank in ranks
        for span in rank.spans
    }
    for rank in ranks:
        free_s, seen = 0.0, set[str]()
        for span in sorted(rank.spans, key=lambda span: span.start_s):
            hidden = (
                span.work == "B" and (rank.dp, rank.tp, "R", span.stage, span.micro_batch) in done
            )
            for work, before in () if hidden or span.name in seen else _waits_for(span):
                end_s, maker = done.get(
                    (rank.dp, rank.tp, work, before, span.micro_batch), (0.0, rank.rank)
                )
                if maker != rank.rank:
                    key = RECEIVE + _PASS.get(span.work, span.work), span.stage
                    waits[rank.rank].append((key, max(0.0, span.start_s - max(end_s, free_s))))
            free_s = span.end_s
            seen.add(span.name)
    return waits


def _waits_for(span: WorkSpan) -> tuple[tuple[str, int], ...]:
    """Returns the actions, whole or in two parts, that may have made the input of a span."""
    if span.work == "F":
        return (("F", span.stage - 1),)
    return (("B", span.stage + 1), ("I", span.stage + 1)) if span.work in ("B", "I") else ()
