"""The deviations of a dry run from the prices of its plan, by class, with one verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from parplan.costmodels.memory.rank_memory import occupied_bytes
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.strategy import Strategy
from parplan.costmodels.usage.rank_traffic import SentBytes
from parplan.costmodels.usage.rank_usage import RankUse, predicted_use
from parplan.planner.plan.derived import fullest_node
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.plan_strategy import prices_of_plan, strategy_of
from parplan.planner.plan.prediction import StageMemory
from parplan.profiles.errors import ConfigError
from parplan.profiles.units import GIB, MIB

STATES = ("parameters", "gradients", "optimizer")
CLASSES = (*STATES, "activations", "temporaries", "held")
HOST = "host"  # a class of plans that use the host
# Share of the peak that the memory margin of a plan covers (planner/plan/error_band.py).
CLOSE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCheck:
    """One pipeline rank with its predicted and its measured use.

    planned         the predicted peak in the plan file, rounded
    repriced        the same at today's prices
    occupied        bytes of the device, including those outside tensors
    micro_batches   the micro-batches that were run, of as many as `of`
    node_host       bytes that the fullest node's host holds, with the predictions of ranks that
                    were not run
    """

    rank: int
    predicted: RankUse
    found: RankUse
    planned: float
    repriced: float
    occupied: float
    capacity: int
    micro_batches: tuple[int, ...]
    of: int
    node_host: float = 0.0
    node_host_capacity: int = 0

    @property
    def outdated(self) -> bool:
        """Returns whether the plan file was written under other prices than today's."""
        return abs(self.planned - self.repriced) > MIB + self.repriced / 1000

    @property
    def fits(self) -> bool:
        """Returns whether the device and the hosts have enough memory."""
        return self.fits_device and self.fits_host

    @property
    def fits_device(self) -> bool:
        return self.occupied <= self.capacity

    @property
    def fits_host(self) -> bool:
        return self.node_host <= self.node_host_capacity

    def share(self, name: str) -> float | None:
        """Returns the relative deviation from the prediction, None where only the latter is 0."""
        predicted = class_bytes(self.predicted, name)
        measured = class_bytes(self.found, name)
        if predicted == measured:
            return 0.0
        return measured / predicted - 1 if predicted else None


@dataclass(frozen=True, slots=True)
class RepricedPlan:
    """A plan, its strategy, and today's prices."""

    plan: Plan
    strategy: Strategy
    price_cache: PriceCache


@dataclass(frozen=True, slots=True, kw_only=True)
class SentCheck:
    """One kind of collective over one axis, predicted and measured."""

    axis: str
    kind: str
    predicted: SentBytes
    found: SentBytes


def class_bytes(use: RankUse, name: str) -> int:
    """Bytes of one of CLASSES, or of HOST."""
    n_bytes: int = getattr(use.states if name in STATES else use, name)
    return n_bytes


def repriced_today(plan: Plan) -> RepricedPlan:
    """Returns the plan at prices of today. Raises ConfigError where a dry run cannot count it."""
    if plan.chunks is not None:
        raise ConfigError(
            "a dry run does not hold states in chunks",
            hint="run it on real tensors: plan check --execute",
        )
    price_cache = prices_of_plan(plan)
    return RepricedPlan(plan, strategy_of(plan, price_cache), price_cache)


def check_ranks(
    today: RepricedPlan, used: Mapping[int, tuple[RankUse, tuple[int, ...]]]
) -> tuple[RankCheck, ...]:
    """Returns each pipeline rank of `used` (its use and micro-batches) beside its prediction.

    A dry run gives every expert as many tokens, so its prediction is that of balanced experts.
    """
    plan, price_cache = today.plan, today.price_cache
    repriced = _uses(today)
    predicted = repriced
    if plan.training.expert_imbalance > 1:
        training = replace(plan.training, expert_imbalance=1.0)
        predicted = _uses(repriced_today(replace(plan, training=training)))
    found = {rank: use for rank, (use, _) in used.items()}
    node_host = fullest_node(
        plan, [found.get(rank, use).host for rank, use in enumerate(predicted)]
    )
    return tuple(
        RankCheck(
            rank=rank,
            predicted=predicted[rank],
            found=use,
            planned=_planned_bytes(plan.predicted.memory_gib[rank]),
            repriced=repriced[rank].held,
            occupied=occupied_bytes(use.held, plan.mesh, price_cache),
            capacity=plan.cluster.device.memory_bytes,
            micro_batches=steps,
            of=plan.pipeline.num_micro_batches,
            node_host=node_host,
            node_host_capacity=plan.cluster.host_memory_bytes,
        )
        for rank, (use, steps) in sorted(used.items())
    )


def _uses(today: RepricedPlan) -> list[RankUse]:
    """Returns the predicted use of every pipeline rank."""
    ranks = range(today.plan.mesh.pp)
    return [predicted_use(today.strategy, rank, today.price_cache) for rank in ranks]


def _planned_bytes(memory: StageMemory) -> float:
    return GIB * (memory.total - memory.reserve)


def sent_checks(check: RankCheck) -> tuple[SentCheck, ...]:
    """Returns every kind of collective that was predicted or measured."""
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


def worst_deviation(checks: Sequence[RankCheck], name: str) -> float | None:
    """Returns the largest deviation of a class over all ranks, None where a rank's is None."""
    shares = [check.share(name) for check in checks]
    if None in shares:
        return None
    return max((share for share in shares if share is not None), key=abs)


def class_is_exact(checks: Sequence[RankCheck], name: str) -> bool:
    """Returns whether the class is as predicted on every rank, to the byte."""
    return all(
        class_bytes(check.predicted, name) == class_bytes(check.found, name) for check in checks
    )


def class_names(checks: Sequence[RankCheck]) -> tuple[str, ...]:
    """Returns CLASSES, and HOST where a rank uses the host."""
    hosts = any(use.host for check in checks for use in (check.predicted, check.found))
    return (*CLASSES, HOST) if hosts else CLASSES


def all_match(checks: Sequence[RankCheck]) -> bool:
    """Returns whether every state is as predicted to the byte, and peak and host are close."""
    close = [worst_deviation(checks, name) for name in ("held", HOST)]
    return all(class_is_exact(checks, name) for name in STATES) and all(
        share is not None and abs(share) <= CLOSE for share in close
    )
