"""Memory, redundant bytes and step of Megatron-LM by the year and of our plans in one setting.

The baselines are Megatron-LM in the order of the years (planner/baselines/systems.py says where its
flags were read). Each may use what those before it had:

2021        v2.5: no sequence parallelism, no distributed optimizer, all layers recomputed or none
2022 +sp    also sequence parallelism and selective recompute (32132c6e84, 2022-05-20)
2022 +do    also the distributed optimizer (d07d29df14, 2022-06-08)

Every baseline has two plans of its own: the one whose fullest device holds least at any step, and
the fastest that fits. All systems have the prices of one stack.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from parplan.commands.options.target_options import TargetOptions
from parplan.commands.requests.requests import request_of
from parplan.costmodels.layers.recompute import RecomputedOperators
from parplan.costmodels.memory.rank_memory import RankMemory
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.step import StepPrice, price_step
from parplan.costmodels.strategy import Strategy
from parplan.planner.baselines.optimum import fastest, leanest
from parplan.planner.baselines.systems import baseline_strategies
from parplan.planner.infeasible.shortfall import limit_bytes
from parplan.planner.objective import Objective
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.reprice import reprice
from parplan.planner.request import Constraints, Request, SearchOptions
from parplan.planner.search.find_plan import find_plan
from parplan.profiles.errors import InfeasibleError
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.units import GIB, gib

GPU = "a100-80gb"
MEGATRON_2021, MEGATRON_SP, MEGATRON_DO = YEARS = (
    "megatron 2021",
    "megatron 2022 +sp",
    "megatron 2022 +do",
)
OURS = "ours"
LEAST_PEAK, FASTEST = "least peak", "fastest"
IN_A_THIRD = "throughput in a third"
WANTED_SAVING, WANTED_RATIO = 0.67, 1.10
CLASSES = ("parameters", "gradients", "optimizer", "activations", "temporaries", "reserve")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A setting by name; None for the sequence and the batch of the model's file.

    pipelines  pipelines are allowed; without them our blocks may divide weights over data as well
    tp         the tensor parallelism of every system, or None where each chooses its own
    """

    model: str
    gpus: int
    gpu: str = GPU
    seq_length: int | None = None
    batch: int | None = None
    pipelines: bool = False
    tp: int | None = None

    def __str__(self) -> str:
        tokens = f", {self.seq_length} tokens" if self.seq_length else ""
        batch = f", batch {self.batch}" if self.batch else ""
        tp = f", tp {self.tp}" if self.tp else ""
        pipeline = ", any pipeline" if self.pipelines else ""
        return f"{self.model} on {self.gpus} {self.gpu}{tokens}{batch}{tp}{pipeline}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A case with its request, its prices, and the bytes that a plan may fill of a device."""

    case: Case
    request: Request
    price_cache: PriceCache
    limit_bytes: float

    def may_have(self, strategy: Strategy) -> bool:
        """Return True if the degrees of `strategy` are those that the case allows."""
        mesh = strategy.layout.mesh
        return (self.case.pipelines or mesh.pp == 1) and self.case.tp in (None, mesh.tp)

    def find(self, objective: Objective, options: SearchOptions, **pins: Any) -> Plan | None:
        """Return our plan with `pins` beside those of the case; None if nothing fits."""
        case = self.case
        free = Constraints(
            pp=None if case.pipelines else (1,),
            tp=None if case.tp is None else (case.tp,),
            weights_over_data=(False,) if case.pipelines else (False, True),
        )
        try:
            return find_plan(
                replace(
                    self.request,
                    objective=objective,
                    constraints=replace(free, **pins),
                    options=options,
                )
            )
        except InfeasibleError:
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One plan: how it was picked, its step, the GiB of its fullest device, the redundant GiB.

    The redundant GiB are those of the whole cluster.
    """

    setting: str
    system: str
    picked: str
    plan: str
    fits: bool
    step_s: float
    peak_gib: float
    redundant_gib: float
    memory_gib: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Ours against one plan of a baseline: shares of memory saved, and our step over theirs.

    by_class   GiB saved on the fullest device by class; they add up to the peak's
    """

    setting: str
    system: str
    against: str
    ours: str
    peak_saving: float
    redundant_saving: float
    step_ratio: float
    by_class: dict[str, float]

    @property
    def in_time(self) -> bool:
        """Return True if our step is at most 10 % longer."""
        return self.step_ratio <= WANTED_RATIO

    @property
    def reaches(self) -> bool:
        """Return True if the peak is at least 67 % lower in time."""
        return self.peak_saving >= WANTED_SAVING and self.in_time


def setting_of(case: Case) -> Setting:
    """Return the setting of `case` with the default stack."""
    request = request_of(
        TargetOptions(
            model=case.model,
            gpus=case.gpus,
            gpu=case.gpu,
            seq_length=case.seq_length,
            global_batch_size=case.batch,
        )
    )
    return setting_of_request(case, request)


def setting_of_request(case: Case, request: Request) -> Setting:
    """Return `case` with a request of its own."""
    return Setting(
        case=case,
        request=request,
        price_cache=PriceCache(request.model, request.training, machine_for(request.cluster)),
        limit_bytes=limit_bytes(request.cluster, request.training.stack, SearchOptions()),
    )


def plan_text(strategy: Strategy) -> str:
    """Return a strategy in a line, with ZeRO stages and recompute of its blocks."""
    layout = strategy.layout
    blocks = [
        choice
        for stage in strategy.stages
        for choice in stage
        if choice.kind.role is LayerKind.BLOCK
    ]
    recompute = Counter(_recompute_text(choice.recompute) for choice in blocks)
    flags = (
        f"{layout.virtual_stages} chunks" if layout.virtual_stages > 1 else "",
        "sp" if layout.sequence_parallel else "",
        "weights over data" if layout.weights_over_data else "",
    )
    return ", ".join(
        (
            str(layout.mesh),
            f"b {layout.micro_batch_size}",
            *filter(None, flags),
            "ZeRO " + "+".join(str(stage) for stage in sorted({each.zero for each in blocks})),
            "recompute " + " + ".join(f"{name} x {count}" for name, count in recompute.items()),
        )
    )


def _recompute_text(recompute: RecomputedOperators) -> str:
    if isinstance(recompute, tuple):
        return f"{len(recompute)} operators" if recompute else "none"
    return recompute.value


def _classes(held: RankMemory) -> dict[str, float]:
    states = held.states
    sizes = (
        states.parameters,
        states.gradients,
        states.optimizer,
        held.activations,
        held.temporaries,
        held.reserve,
    )
    return {name: round(gib(size), 4) for name, size in zip(CLASSES, sizes, strict=True)}


def measure_of(
    setting: Setting, strategy: Strategy, price: StepPrice, system: str, picked: str
) -> Measure:
    """Return what `strategy` holds and takes by `price`."""
    held = max(price.memory, key=lambda memory: memory.total)
    per_stage = strategy.layout.mesh.ranks_per_stage
    return Measure(
        setting=str(setting.case),
        system=system,
        picked=picked,
        plan=plan_text(strategy),
        fits=held.total <= setting.limit_bytes,
        step_s=price.step_s,
        peak_gib=gib(held.total),
        redundant_gib=gib(per_stage * sum(rank.total for rank in price.redundant)),
        memory_gib=_classes(held),
    )


def megatron_spaces(setting: Setting) -> dict[str, tuple[Strategy, ...]]:
    """Return the strategies of Megatron-LM that the case allows, by the year."""
    cache, limit = setting.price_cache, setting.limit_bytes
    first = [
        strategy
        for name in ("megatron-1f1b-2021", "megatron-interleaved-2021")
        for strategy in baseline_strategies(name, cache, limit)
    ]
    last = baseline_strategies("megatron", cache, limit)
    replicated = [
        strategy
        for strategy in last
        if all(choice.zero == 0 for stage in strategy.stages for choice in stage)
    ]
    spaces = zip(YEARS, (first, replicated, last), strict=True)
    return {name: tuple(filter(setting.may_have, space)) for name, space in spaces}


def baseline_picks(setting: Setting) -> Iterator[tuple[str, str, Strategy]]:
    """Yield system, pick and strategy: of each year the least peak, and the fastest that fits."""
    for system, space in megatron_spaces(setting).items():
        if space:
            yield system, LEAST_PEAK, leanest(space, setting.price_cache).strategy
        best = fastest(space, setting.price_cache, setting.limit_bytes)
        if best:
            yield system, FASTEST, best.strategy


def baseline_measures(setting: Setting) -> Iterator[Measure]:
    """Yield the plans of Megatron-LM, by the year."""
    for system, picked, strategy in baseline_picks(setting):
        price = price_step(strategy, setting.price_cache)
        yield measure_of(setting, strategy, price, system, picked)


def our_measure(setting: Setting, plan: Plan, picked: str) -> Measure:
    """Return what our plan holds and takes."""
    repriced = reprice(plan)
    return measure_of(setting, repriced.strategy, repriced.price, OURS, picked)


def our_measures(setting: Setting) -> Iterator[Measure]:
    """Yield our plans of least redundancy within 10 % of the fastest step, and the fastest."""
    for objective in (Objective.MEMORY, Objective.THROUGHPUT):
        plan = setting.find(objective, SearchOptions())
        if plan:
            yield our_measure(setting, plan, objective.value)


def saving_of(ours: Measure, theirs: Measure) -> Saving:
    """Return what ours saves of theirs."""
    return Saving(
        setting=ours.setting,
        system=theirs.system,
        against=theirs.picked,
        ours=ours.picked,
        peak_saving=1 - ours.peak_gib / theirs.peak_gib,
        redundant_saving=1 - ours.redundant_gib / theirs.redundant_gib,
        step_ratio=ours.step_s / theirs.step_s,
        by_class={name: theirs.memory_gib[name] - ours.memory_gib[name] for name in CLASSES},
    )


def savings(
    setting: Setting, ours: Iterable[Measure], theirs: Iterable[Measure]
) -> Iterator[Saving]:
    """Yield the savings of our plans on each plan of a baseline that fits.

    Where neither saves 67 % of the peak in time, the fastest plan in a third of that peak is
    searched, which proves whether there is one.
    """
    listed = list(ours)
    for row in theirs:
        if not row.fits:
            continue
        found = [saving_of(our, row) for our in listed]
        yield from found
        if not any(saving.reaches for saving in found):
            third = int((1 - WANTED_SAVING) * row.peak_gib * GIB)
            plan = setting.find(Objective.THROUGHPUT, SearchOptions(memory_limit_bytes=third))
            if plan:
                yield saving_of(our_measure(setting, plan, IN_A_THIRD), row)
