"""The timeline of a step: predicted, by replaying a plan's schedule, and what the spans of a run add up to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from costmodels.book import PriceBook
from costmodels.schedules import Work
from costmodels.simulate import RankTimeline, SimulatedStep, simulate
from costmodels.step import StepCosts, step_costs
from costmodels.strategy import Strategy
from planner.runs import NO_PLACE, RankRecord, Span

Key = tuple[str, int]  # the work, and the stage, or the pipeline rank of what is of a whole rank
RECEIVE = "receive_"
LOSS = "loss"
TOGETHER = ("reduce", "tied")  # the ranks of a group end it together
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
    end_s, tail = timeline.finish_s, (costs.reduced_s, costs.tied_s, costs.optimizer_s)
    for work, seconds in zip(("reduce", "tied", "optimizer"), (by_rank[rank] for by_rank in tail), strict=True):
        start_s, end_s = end_s, end_s + seconds
        if seconds > 0:
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
        found["reduce", rank] = costs.reduced_s[rank]
        found["optimizer", rank] = costs.optimizer_s[rank]
    found["tied", 0] = max(costs.tied_s)
    return found


def measured_parts_s(steps: Iterable[Sequence[RankRecord]]) -> dict[Key, float]:
    """The measured seconds of the same parts: the mean over a step's micro-batches, of which the median over replicas and steps.

    The mean, since a gather of parameters once a step is in the first forward pass. Of a reduction the least over the ranks that
    reduce together: the others wait in it for the last one to come.

    The loss of a micro-batch is part of its stage's forward pass, a backward pass in two parts is their sum. A receive is
    what an action waited after its rank was free and its other end was done, which needs the ranks' clocks to agree.
    """
    found: dict[Key, list[float]] = defaultdict(list)
    for ranks in steps:
        waits, least = _receives(ranks), dict[Key, float]()
        for rank in ranks:
            for key, seconds in _means((*waits[rank.rank], *_works(rank))).items():
                if key[0] in TOGETHER:
                    least[key] = min(seconds, least.get(key, seconds))
                else:
                    found[key].append(seconds)
        for key, seconds in least.items():
            found[key].append(seconds)
    joined: dict[Key, float] = defaultdict(float)
    for (work, stage), values in found.items():
        joined[_PASS.get(work, work), stage] += median(values)
    return dict(joined)


def _works(rank: RankRecord) -> Iterator[tuple[Key, float]]:
    for span in rank.spans:
        place = 0 if span.work == "tied" else rank.pp if span.stage == NO_PLACE else span.stage
        yield (span.work, place), span.seconds


def _means(timed: Iterable[tuple[Key, float]]) -> dict[Key, float]:
    found: dict[Key, list[float]] = defaultdict(list)
    for key, seconds in timed:
        found[key].append(seconds)
    return {key: fmean(values) for key, values in found.items()}


def _receives(ranks: Sequence[RankRecord]) -> dict[int, list[tuple[Key, float]]]:
    """By rank, (part, seconds waited) of every action whose input came from another rank."""
    waits: dict[int, list[tuple[Key, float]]] = {rank.rank: [] for rank in ranks}
    done = {
        (rank.dp, rank.tp, span.work, span.stage, span.micro_batch): (span.end_s, rank.rank) for rank in ranks for span in rank.spans}
    for rank in ranks:
        free_s = 0.0
        for span in sorted(rank.spans, key=lambda span: span.start_s):
            for work, before in _waits_for(span):
                end_s, maker = done.get((rank.dp, rank.tp, work, before, span.micro_batch), (0.0, rank.rank))
                if maker != rank.rank:
                    key = RECEIVE + _PASS.get(span.work, span.work), span.stage
                    waits[rank.rank].append((key, max(0.0, span.start_s - max(end_s, free_s))))
            free_s = span.end_s
    return waits


def _waits_for(span: Span) -> tuple[tuple[str, int], ...]:
    if span.work == "F":
        return (("F", span.stage - 1),)
    return (("B", span.stage + 1), ("I", span.stage + 1)) if span.work in ("B", "I") else ()


def measured_idle_share(steps: Iterable[Sequence[RankRecord]], step_s: Sequence[float]) -> float:
    """Of the ranks' time in the steps, the share that is in no span."""
    shares = [
        1 - sum(span.seconds for span in rank.spans) / seconds for ranks, seconds in zip(steps, step_s, strict=True) for rank in ranks]
    return sum(shares) / len(shares)
