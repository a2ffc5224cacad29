"""The timeline of a step: predicted, by replaying a plan's schedule, and what the spans of a run add up to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from costmodels.book import PriceBook
from costmodels.schedules import Work
from costmodels.simulate import RankTimeline, SimulatedStep, simulate
from costmodels.step import StepCosts, step_costs
from costmodels.strategy import Strategy
from planner.runs import NO_PLACE, RankRecord, Span

Key = tuple[str, int]  # the work, and the stage, or the pipeline rank of what is of a whole rank
RECEIVE = "receive_"
LOSS = "loss"
_PASS = {LOSS: "F", "I": "B", "W": "B"}  # what counts as part of which pass


@dataclass(frozen=True, slots=True)
class Timeline:
    """A predicted step: its spans by pipeline rank, and the seconds of every part."""

    step_s: float
    idle_share: float
    spans: tuple[tuple[Span, ...], ...]
    parts_s: Mapping[Key, float]


def predicted_timeline(strategy: Strategy, book: PriceBook) -> Timeline:
    """The step of `strategy` under the prices of `book`, replayed; a transfer is the gap before what waits for it."""
    frame, costs = strategy.frame, step_costs(strategy, book)
    step = simulate(frame.schedule, frame.num_micro_batches, costs.stages, costs.tail_s, keep_events=True)
    spans = tuple(tuple(_rank_spans(rank, timeline, costs)) for rank, timeline in enumerate(step.ranks))
    return Timeline(step.step_s, _idle_share(step), spans, parts_s(costs))


def _idle_share(step: SimulatedStep) -> float:
    return sum(rank.bubble_s + rank.transfer_s for rank in step.ranks) / (step.step_s * len(step.ranks))


def _rank_spans(rank: int, timeline: RankTimeline, costs: StepCosts) -> Iterator[Span]:
    pp = len(costs.stages)
    for event in timeline.events:
        action, cost = event.action, costs.stages[rank][event.action.chunk]
        received_s = cost.receive_forward_s if action.work is Work.FORWARD else cost.receive_backward_s
        yield Span(
            work=action.work.value, stage=action.chunk * pp + rank, micro_batch=action.micro_batch, start_s=event.start_s + received_s,
            end_s=event.end_s)
    updated_s, tail_s = costs.optimizer_s[rank], costs.tail_s[rank]
    ended = timeline.finish_s + tail_s
    for work, start_s, end_s in (("reduce", timeline.finish_s, ended - updated_s), ("optimizer", ended - updated_s, ended)):
        if end_s > start_s:
            yield Span(work=work, stage=NO_PLACE, micro_batch=NO_PLACE, start_s=start_s, end_s=end_s)


def parts_s(costs: StepCosts) -> dict[Key, float]:
    """The priced seconds of every part of a step, once each."""
    pp, found = len(costs.stages), dict[Key, float]()
    for rank, chunks in enumerate(costs.stages):
        for chunk, cost in enumerate(chunks):
            stage = chunk * pp + rank
            found["F", stage] = cost.forward_s
            found["B", stage] = cost.backward_s + cost.recompute_s
            found[RECEIVE + "F", stage] = cost.receive_forward_s
            found[RECEIVE + "B", stage] = cost.receive_backward_s
        found["reduce", rank] = costs.tail_s[rank] - costs.optimizer_s[rank]
        found["optimizer", rank] = costs.optimizer_s[rank]
    return found


def measured_parts_s(steps: Iterable[Sequence[RankRecord]]) -> dict[Key, float]:
    """The measured seconds of the same parts: medians over micro-batches, replicas and the steps given.

    The loss of a micro-batch is part of its stage's forward pass, a backward pass in two parts is their sum. A receive is
    what an action waited after its rank was free and its other end was done, which needs the ranks' clocks to agree.
    """
    found: dict[Key, list[float]] = defaultdict(list)
    for ranks in steps:
        for rank in ranks:
            for span in rank.spans:
                place = rank.pp if span.stage == NO_PLACE else span.stage
                found[span.work, place].append(span.seconds)
        for key, waited_s in _receives(ranks):
            found[key].append(waited_s)
    middle = {key: median(values) for key, values in found.items()}
    return _joined(middle)


def _joined(middle: Mapping[Key, float]) -> dict[Key, float]:
    joined: dict[Key, float] = defaultdict(float)
    for (work, stage), seconds in middle.items():
        joined[_PASS.get(work, work), stage] += seconds
    return dict(joined)


def _receives(ranks: Sequence[RankRecord]) -> Iterator[tuple[Key, float]]:
    """(part, seconds waited) of every action whose input came from another rank."""
    done = {
        (rank.dp, rank.tp, span.work, span.stage, span.micro_batch): (span.end_s, rank.rank) for rank in ranks for span in rank.spans}
    for rank in ranks:
        free_s: float | None = None
        for span in sorted(rank.spans, key=lambda span: span.start_s):
            for work, before in _waits_for(span):
                end = done.get((rank.dp, rank.tp, work, before, span.micro_batch))
                if end is not None and end[1] != rank.rank:
                    yield (RECEIVE + _PASS.get(span.work, span.work), span.stage), max(0.0, span.start_s - max(end[0], free_s if free_s is not None else end[0]))
            free_s = span.end_s


def _waits_for(span: Span) -> tuple[tuple[str, int], ...]:
    if span.work == "F":
        return (("F", span.stage - 1),)
    return (("B", span.stage + 1), ("I", span.stage + 1)) if span.work in ("B", "I") else ()


def measured_idle_share(steps: Iterable[Sequence[RankRecord]], step_s: Sequence[float]) -> float:
    """Of the ranks' time in the steps, the share that is in no span."""
    shares = [
        1 - sum(span.seconds for span in rank.spans) / seconds for ranks, seconds in zip(steps, step_s, strict=True) for rank in ranks]
    return sum(shares) / len(shares)
