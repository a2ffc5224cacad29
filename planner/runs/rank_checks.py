"""What a dry run found against what the plan was priced with: deviations by class, whether it fits,
one verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parplan.costmodels.memory.rank_memory import occupied_bytes
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.strategy import Strategy
from parplan.costmodels.usage.rank_traffic import SentBytes
from parplan.costmodels.usage.rank_usage import RankUse, predicted_use
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.plan_strategy import prices_of_plan, strategy_of
from parplan.planner.plan.prediction import StageMemory
from parplan.profiles.errors import ConfigError
from parplan.profiles.units import GIB, MIB

STATES = ("parameters", "gradients", "optimizer")
CLASSES = (*STATES, "activations", "temporaries", "held")
CLOSE = 0.05  # of the peak: what a plan's memory margin (planner/plan/error_band.py) takes up


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCheck:
    """One pipeline rank: predicted and found.

    planned: the predicted peak that stands in the plan file, rounded
    occupied: bytes of the device with what is no tensor; micro_batches: of the steps that were run,
    of as many as `of`
    """

    rank: int
    predicted: RankUse
    found: RankUse
    planned: float
    occupied: float
    capacity: int
    micro_batches: tuple[int, ...]
    of: int

    @property
    def outdated(self) -> bool:
        """Whether the plan file was written under other prices than today's."""
        return abs(self.planned - self.predicted.held) > MIB + self.predicted.held / 1000

    @property
    def fits(self) -> bool:
        return self.occupied <= self.capacity

    def share(self, name: str) -> float | None:
        """By how much the class was found larger than predicted, None where it was predicted to be
        empty and is not.
        """
        predicted, found = class_bytes(self.predicted, name), class_bytes(self.found, name)
        if predicted == found:
            return 0.0
        return found / predicted - 1 if predicted else None


@dataclass(frozen=True, slots=True)
class RepricedPlan:
    """A plan, the strategy that it holds, and today's prices."""

    plan: Plan
    strategy: Strategy
    price_cache: PriceCache


@dataclass(frozen=True, slots=True, kw_only=True)
class SentCheck:
    """One kind of collective over one axis: predicted and found."""

    axis: str
    kind: str
    predicted: SentBytes
    found: SentBytes


def class_bytes(use: RankUse, name: str) -> int:
    """Bytes of one of CLASSES."""
    n_bytes: int = getattr(use.states if name in STATES else use, name)
    return n_bytes


def priced(plan: Plan) -> RepricedPlan:
    """What a plan is priced as today. Raises ConfigError where the prices do not know its
    placements, or a dry run cannot count it.
    """
    if plan.model.num_experts:
        raise ConfigError(
            "the routing of experts depends on the data, which a dry run has none of",
            hint="run it on real tensors: plan check --execute",
        )
    if plan.chunks is not None:
        raise ConfigError(
            "a dry run does not hold states in chunks",
            hint="run it on real tensors: plan check --execute",
        )
    if any(
        layer_plan.offload or layer_plan.keep_on_host for layer_plan in plan.layer_plans.values()
    ):
        raise ConfigError(
            "a dry run has one memory, it cannot tell what the host keeps",
            hint="check the plan without offload, or use --execute",
        )
    price_cache = prices_of_plan(plan)
    return RepricedPlan(plan, strategy_of(plan, price_cache), price_cache)


def check_ranks(
    today: RepricedPlan, found: Mapping[int, tuple[RankUse, tuple[int, ...]]]
) -> tuple[RankCheck, ...]:
    """Each pipeline rank of `found` (its use, and the steps that were run) beside its
    prediction.
    """
    plan, price_cache = today.plan, today.price_cache
    return tuple(
        RankCheck(
            rank=rank,
            predicted=predicted_use(today.strategy, rank, price_cache),
            found=use,
            planned=_planned_bytes(plan.predicted.memory_gib[rank]),
            occupied=occupied_bytes(use.held, plan.mesh, price_cache),
            capacity=plan.cluster.device.memory_bytes,
            micro_batches=steps,
            of=plan.pipeline.num_micro_batches,
        )
        for rank, (use, steps) in sorted(found.items())
    )


def _planned_bytes(memory: StageMemory) -> float:
    return GIB * (memory.total - memory.reserve)


def sent_checks(check: RankCheck) -> tuple[SentCheck, ...]:
    """Every kind of collective that was predicted or found."""
    sides = [
        {(str(sent.axis), str(sent.kind)): sent for sent in use.sent}
        for use in (check.predicted, check.found)
    ]
    return tuple(
        SentCheck(
            axis=key[0],
            kind=key[1],
            predicted=sides[0].get(key, SentBytes(*key, 0, 0)),
            found=sides[1].get(key, SentBytes(*key, 0, 0)),
        )
        for key in sorted(sides[0].keys() | sides[1].keys())
    )


def worst(checks: Sequence[RankCheck], name: str) -> float | None:
    """The largest deviation of a class over all ranks; None: found where nothing was predicted."""
    shares = [check.share(name) for check in checks]
    return (
        None if None in shares else max((share for share in shares if share is not None), key=abs)
    )


def exact(checks: Sequence[RankCheck], name: str) -> bool:
    """Whether the class is as predicted on every rank, to the byte."""
    return all(
        class_bytes(check.predicted, name) == class_bytes(check.found, name) for check in checks
    )


def matches(checks: Sequence[RankCheck]) -> bool:
    """Whether every state is as predicted to the byte and every peak is close."""
    peak = worst(checks, "held")
    return all(exact(checks, name) for name in STATES) and peak is not None and abs(peak) <= CLOSE
