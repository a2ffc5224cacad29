"""A plan beside the plans of other systems, with equal model, cluster, batch, prices and limit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from parplan.costmodels.memory.fullest_moment import at_fullest
from parplan.costmodels.memory.rank_memory import RankMemory
from parplan.costmodels.step import StepPrice
from parplan.costmodels.step_breakdown import StepParts, parts_of
from parplan.costmodels.strategy import Strategy
from parplan.planner.baselines.optimum import Optimum
from parplan.planner.baselines.systems import Baseline
from parplan.planner.infeasible.shortfall import limit_bytes
from parplan.planner.objective import Objective
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.prediction import Candidates, SearchRecord, Status
from parplan.planner.plan.ratio_band import plan_shape, ratio_share
from parplan.planner.plan.traced_plan import AnyPlan, TracedPlan
from parplan.planner.plan.traits import family_of
from parplan.planner.request import SearchOptions
from parplan.profiles.displayed import Displayed
from parplan.profiles.errors import OutOfTimeError

OURS = "ours"
MEMORY_NAMES = ("parameters", "gradients", "optimizer", "activations", "temporaries", "reserve")
Assembled = Callable[[Strategy, StepPrice, SearchRecord], AnyPlan]  # makes the plan of a strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPlan:
    """One plan of the comparison, the parts of its step, and the memory of its fullest device."""

    name: str
    plan: AnyPlan
    step_s: float
    parts: StepParts
    fullest: RankMemory

    @property
    def memory_bytes(self) -> tuple[float, ...]:
        """Peak bytes of the fullest device by class, in the order of `MEMORY_NAMES`.

        They add up to its total.
        """
        held = at_fullest(self.fullest)
        return tuple(held[name] for name in MEMORY_NAMES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRow:
    """A baseline and its plan, None where nothing fits; or another plan without a baseline."""

    baseline: Baseline | None
    side: ComparedPlan | None

    @property
    def name(self) -> str:
        named = self.baseline or self.side
        assert named is not None, "a row without a baseline has a plan"
        return named.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(Displayed):
    """Our plan and the baselines, or two and more plans, in the requested order.

    limit_bytes     bytes that a plan may fill on a device
    filed_step_s    the step time in the plan file, where today's prices differ
    unpriced        names of baselines for which there was no time
    """

    ours: ComparedPlan
    rows: tuple[ComparisonRow, ...]
    limit_bytes: float
    filed_step_s: float | None = None
    unpriced: tuple[str, ...] = ()

    def is_tie(self, plan: ComparedPlan) -> bool:
        """Returns True if the prices cannot say which step is shorter.

        This is so when its ratio to ours lies inside the error band.
        """
        share = self.share_of(plan)
        return share is not None and abs(self.slower(plan)) <= share

    def slower(self, plan: ComparedPlan) -> float:
        """Returns the share by which a plan takes longer than ours.

        Of plans whose steps have other tokens or other GPUs it is that of a token of a GPU.
        """
        ours = self.ours
        if self.same_work(plan):
            return plan.step_s / ours.step_s - 1
        return _tokens_per_s_per_gpu(ours) / _tokens_per_s_per_gpu(plan) - 1

    def same_work(self, plan: ComparedPlan) -> bool:
        """True if the steps of a plan have the tokens of ours, on as many GPUs.

        Beside a plan over unequal pools the number of GPUs says little, and one pool counts too.
        """
        (tokens, gpus), (our_tokens, our_gpus) = _work(plan), _work(self.ours)
        return tokens == our_tokens and (gpus == our_gpus or bool(self.ours.plan.pools))

    def share_of(self, plan: ComparedPlan) -> float | None:
        """Returns the error band of the ratio of a step to ours, None where it is unknown.

        Plans of two families of stacks, two devices or models have nothing in common: they have the
        band of our step.
        """
        ours, theirs = self.ours.plan, plan.plan
        band = ours.predicted.error_band
        if band is None:
            return None
        stacks = family_of(ours.training.stack), family_of(theirs.training.stack)
        devices = ours.cluster.device, theirs.cluster.device
        if stacks[0] != stacks[1] or devices[0] != devices[1] or not _same_model(ours, theirs):
            return band.time.share
        return ratio_share(band, plan_shape(ours), plan_shape(theirs))


def _work(compared: ComparedPlan) -> tuple[int, int]:
    """Returns the tokens of a step, and the GPUs that share them."""
    training = compared.plan.training
    tokens = training.global_batch_size * training.seq_length
    return tokens, compared.plan.cluster.num_gpus


def _tokens_per_s_per_gpu(compared: ComparedPlan) -> float:
    tokens, gpus = _work(compared)
    return tokens / compared.step_s / gpus


def _same_model(one: AnyPlan, other: AnyPlan) -> bool:
    if isinstance(one, Plan) and isinstance(other, Plan):
        return one.model == other.model
    return isinstance(one, TracedPlan) and isinstance(other, TracedPlan)


def side(name: str, plan: AnyPlan, strategy: Strategy, price: StepPrice) -> ComparedPlan:
    """Returns a plan with the parts of its step and the memory of its fullest device."""
    fullest = max(price.memory, key=lambda memory: memory.total)
    return ComparedPlan(
        name=name,
        plan=plan,
        step_s=price.step_s,
        parts=parts_of(strategy.layout, price),
        fullest=fullest,
    )


def row(baseline: Baseline, assembled: Assembled) -> ComparisonRow:
    """Returns a baseline with its plan, which `assembled` makes."""
    optimum = baseline.optimum
    if optimum is None:
        return ComparisonRow(baseline=baseline, side=None)
    strategy, price = optimum.strategy, optimum.price
    plan = assembled(strategy, price, _record(baseline, optimum))
    return ComparisonRow(baseline=baseline, side=side(baseline.name, plan, strategy, price))


def _record(baseline: Baseline, optimum: Optimum) -> SearchRecord:
    step_s = round(optimum.price.step_s, 6)
    return SearchRecord(
        objective=Objective.THROUGHPUT,
        status=Status.OPTIMAL,
        value=step_s,
        bound=step_s,
        gap=0.0,
        fastest_step_time_s=step_s,
        candidates=Candidates(
            considered=baseline.candidates,
            pruned=baseline.candidates - optimum.simulated,
            solved=optimum.simulated,
            left=0,
        ),
    )


def plans_side_by_side(sides: Sequence[ComparedPlan], options: SearchOptions) -> Comparison:
    """Returns two and more plans; the first takes the place of ours."""
    first, *others = sides
    plan = first.plan
    return Comparison(
        ours=first,
        rows=tuple(ComparisonRow(baseline=None, side=each) for each in others),
        limit_bytes=limit_bytes(plan.cluster, plan.training.stack, options),
    )


def side_by_side(
    filed: AnyPlan,
    ours: ComparedPlan,
    names: Iterable[str],
    row_of: Callable[[str], ComparisonRow],
    options: SearchOptions,
) -> Comparison:
    """Returns our plan beside the baselines that there is time to price.

    filed: our plan as its file has it
    row_of: prices a baseline
    """
    names, rows = tuple(names), list[ComparisonRow]()
    filed_s = filed.predicted.step_time_s.value
    with suppress(OutOfTimeError):
        for name in names:
            rows.append(row_of(name))
    return Comparison(
        ours=ours,
        rows=tuple(rows),
        unpriced=names[len(rows) :],
        limit_bytes=limit_bytes(filed.cluster, filed.training.stack, options),
        filed_step_s=None if filed_s == ours.plan.predicted.step_time_s.value else filed_s,
    )
