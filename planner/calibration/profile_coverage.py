"""Sizes of a plan that its machine's profile has measured, interpolates, or lacks.

The sizes are those of every operator of the plan as it is divided, of the optimizer, and of
collectives and messages by group shape. Left out: work of the host for offloaded states, updates
of chunks, the exchanges of experts, and the reduction of a tied embedding.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from parplan.costmodels.communication.collectives import (
    POINT_TO_POINT,
    Collective,
    collective_time,
    point_to_point_time,
)
from parplan.costmodels.communication.mesh import (
    Axis,
    Placement,
    place_axis,
    place_copies,
    units_crossed,
)
from parplan.costmodels.layers.model_states import local_parameters, stage_groups
from parplan.costmodels.layers.sub_pipeline import HALVES
from parplan.costmodels.operators.compute import kernel_time
from parplan.costmodels.operators.kernels import Kernel, StreamKernel
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy, in_chunks
from parplan.costmodels.usage.rank_traffic import SentBytes, rank_tally
from parplan.planner.calibration.operator_cases import (
    kernels_by_case,
    kernels_of_update,
    update_cases,
)
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.plan_strategy import prices_of_plan, strategy_of
from parplan.profiles.machines.measurements import Case
from parplan.profiles.machines.shipped_profiles import analytic_profile
from parplan.profiles.machines.speeds import Profile
from parplan.profiles.models.operator_graph import LayerKind, Operator
from parplan.profiles.profiler.communication.comm_cases import SMALLEST_BYTES, TIMED, timed_case
from parplan.profiles.profiler.communication.group_shapes import Shape
from parplan.profiles.provenance import NEGLIGIBLE_SHARE, Kind, Seconds, weakest_kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """The cases of a plan with the kinds of their prices.

    beyond  names of operations that no case measures
    """

    cases: tuple[tuple[Case, Kind], ...]
    beyond: tuple[str, ...] = ()

    @property
    def missing(self) -> tuple[Case, ...]:
        """Returns the cases whose price does not come from the profile."""
        return tuple(case for case, kind in self.cases if kind is Kind.ANALYTIC)

    def count(self, kind: Kind, *, of_ranks: bool) -> int:
        """Counts cases of a kind, either of communication between ranks or of one rank's work."""
        return sum(
            case_kind is kind and (case.work in TIMED) is of_ranks for case, case_kind in self.cases
        )


def missing_cases(
    plan: Plan, profile: Profile | None = None, *, messages: bool = True
) -> tuple[Case, ...]:
    """Returns the cases to measure so that a profile has all of a plan.

    The profile is `profile`, else the plan's, else one without measurements. `messages` includes
    messages between ranks, which need more than one process. Raises ConfigError like `coverage`.
    """
    profile = profile or plan.cluster.profile or analytic_profile(plan.cluster.device.name)
    profiled = coverage(replace(plan, cluster=replace(plan.cluster, profile=profile)))
    assert profiled is not None
    return tuple(case for case in profiled.missing if messages or case.work not in TIMED)


def coverage(plan: Plan) -> Coverage | None:
    """Returns the coverage of the plan by the profile in `plan.cluster`, None without one.

    Raises ConfigError when its layers have no price today.
    """
    if plan.cluster.profile is None:
        return None
    price_cache = prices_of_plan(plan)
    strategy = strategy_of(plan, price_cache)
    kinds: dict[Case, Kind] = {}
    beyond: dict[str, None] = {}
    for choice in dict.fromkeys(choice for stage in strategy.stages for choice in stage):
        kinds |= _of_operators(choice, strategy.layout, price_cache, beyond)
    kinds |= _of_updates(strategy, price_cache)
    for rank in range(strategy.layout.mesh.pp):
        kinds |= _of_traffic(strategy, rank, price_cache)
    return Coverage(cases=tuple(kinds.items()), beyond=tuple(beyond))


def _of_operators(
    choice: LayerChoice, layout: ParallelLayout, price_cache: PriceCache, beyond: dict[str, None]
) -> dict[Case, Kind]:
    """Returns the cases of one layer; operations without a case are added to `beyond`."""
    kinds: dict[Case, Kind] = {}
    for operator in _operators_of(choice, layout, price_cache):
        measured, unmeasured = kernels_by_case(
            operator, layout.sharding_of(choice), price_cache.model, price_cache.training
        )
        kinds |= {case: _kind(kernels, price_cache) for case, kernels in measured.items()}
        beyond |= dict.fromkeys(
            kernel.name if isinstance(kernel, StreamKernel) else f"{operator.name}'s products"
            for kernel in unmeasured
        )
    return kinds


def _operators_of(
    choice: LayerChoice, layout: ParallelLayout, price_cache: PriceCache
) -> tuple[Operator, ...]:
    """Returns the operators of a layer at their sizes.

    Under sub-pipelining a block runs halves of a micro-batch; at level 1 it runs both sizes.
    """
    whole = price_cache.layer(choice.kind, layout.micro_batch_size).operators
    if not layout.tp_overlap or choice.kind.role is not LayerKind.BLOCK:
        return whole
    halves = price_cache.graph(layout.micro_batch_size // HALVES).block.operators
    return (*whole, *halves) if layout.tp_overlap == 1 else halves


def _kind(kernels: tuple[Kernel, ...], price_cache: PriceCache) -> Kind:
    return weakest_kind(
        kernel_time(kernel, price_cache.machine, price_cache.training).kind for kernel in kernels
    )


def _of_updates(strategy: Strategy, price_cache: PriceCache) -> dict[Case, Kind]:
    """Returns the cases of the updates of layers, each priced alone.

    Left out are cases that cost nothing without a measurement, and cases too small to decide the
    kind of all updates (a head's norm).
    """
    if price_cache.offloads_states:
        return {}
    counts = Counter(
        owned
        for stage in strategy.stages
        for choice in stage
        if not in_chunks(choice, strategy.layout)
        for owned in _owned(choice, strategy.layout, price_cache)
    )
    prices = {
        case: kernel_time(kernel, price_cache.machine, price_cache.training)
        for owned in counts
        if owned
        for case in update_cases(owned, price_cache.training)
        for kernel in kernels_of_update(case, price_cache.training)
    }
    spent_s = {
        case: price.value_s * counts[case.size("parameters")] for case, price in prices.items()
    }
    whole_s: dict[str, float] = defaultdict(float)
    for case, seconds in spent_s.items():
        whole_s[case.work] += seconds
    return {
        case: price.kind
        for case, price in prices.items()
        if spent_s[case] > NEGLIGIBLE_SHARE * whole_s[case.work]
    }


def _owned(choice: LayerChoice, layout: ParallelLayout, price_cache: PriceCache) -> Iterator[int]:
    """Yields the number of parameters that a rank updates of each group of one layer."""
    layer = price_cache.layer(choice.kind, 1)
    sharding = layout.sharding_of(choice)
    for zero, names in stage_groups(layer, choice.zero, choice.own_zero):
        shards = price_cache.shards(layout.mesh) if zero else 1
        parameters = local_parameters(layer, sharding, names)
        yield parameters.owned(shards, with_tied=layout.mesh.pp > 1)


def _of_traffic(strategy: Strategy, rank: int, price_cache: PriceCache) -> dict[Case, Kind]:
    """Returns the collectives that a device of a pipeline rank sends, each size once.

    Negligible ones are left out. No curve starts below 1 KiB, where all is latency: smaller
    messages count as 1 KiB.
    """
    prices: dict[Case, Seconds] = {}
    spent_s: dict[Case, float] = {}
    for sent in rank_tally(strategy, rank, price_cache).by_size():
        n_bytes = max(SMALLEST_BYTES, sent.num_bytes // sent.calls)
        for shape, price in _prices(sent, n_bytes, rank, strategy.layout, price_cache):
            case = timed_case(sent.kind, n_bytes, shape, price_cache.training.precision.value)
            prices[case] = price
            spent_s[case] = sent.calls * price.value_s
    return {
        case: price.kind
        for case, price in prices.items()
        if spent_s[case] > NEGLIGIBLE_SHARE * sum(spent_s.values())
    }


def _prices(
    sent: SentBytes, n_bytes: int, rank: int, layout: ParallelLayout, price_cache: PriceCache
) -> Iterator[tuple[Shape, Seconds]]:
    """Yields the group shapes of one kind of message with their prices.

    Groups are placed as in costmodels/layers/layer_price.py and step.py.
    """
    machine = price_cache.machine
    gpus_per_node = machine.cluster.gpus_per_node
    if sent.kind == POINT_TO_POINT:
        stride = layout.mesh.stride(Axis.PP)
        sharing = min(stride, gpus_per_node)
        neighbours = [near for near in (rank - 1, rank + 1) if near in range(layout.mesh.pp)]
        unit_gpus = machine.cluster.unit_gpus
        for level in sorted(
            {int(units_crossed(layout.mesh, rank, near, unit_gpus)) for near in neighbours}
        ):
            nodes, ranks = (2, 1) if level else (1, 2)
            price = point_to_point_time(n_bytes, level=level, sharing=stride, machine=machine)
            yield Shape(nodes=nodes, ranks_per_node=ranks, groups=sharing), price
        return
    where = _place(sent, layout, price_cache)
    if where is not None:
        groups = (
            where.groups_per_node if where.crosses_nodes else gpus_per_node // where.ranks_per_node
        )
        price = collective_time(Collective(sent.kind), n_bytes, where, machine)
        yield Shape(nodes=where.nodes, ranks_per_node=where.ranks_per_node, groups=groups), price


def _place(sent: SentBytes, layout: ParallelLayout, price_cache: PriceCache) -> Placement | None:
    """Returns the placement of a collective's group, None for a tied embedding's two ends."""
    mesh = layout.mesh
    gpus_per_node = price_cache.machine.cluster.gpus_per_node
    if sent.axis == Axis.TP:
        return place_axis(mesh.tp, 1, mesh.tp, gpus_per_node)
    if sent.axis != Axis.DP:
        return None
    shards = price_cache.shards(mesh)
    copies = mesh.replicas // shards
    if sent.kind == Collective.ALL_REDUCE and copies > 1:
        return place_copies(mesh, copies, gpus_per_node, apart=shards)
    return place_copies(mesh, shards, gpus_per_node)
