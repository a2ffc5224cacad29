"""The price of a scheme at a degree: as the search prices it, or by a formula of its own.

The other devices hold copies of the model and share the batch, so that a scheme that not all
devices can run together has a price as well (EQUATIONS T6).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from parplan.costmodels.communication.collectives import Collective
from parplan.costmodels.communication.mesh import Axis, Mesh
from parplan.costmodels.operators.sharding import GRID
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.schemes.formula_schemes import Formula, SchemeCase, SchemeCost
from parplan.costmodels.strategy import ParallelLayout
from parplan.costmodels.usage.rank_traffic import (
    EXPERT_COPIES,
    EXPERT_PARALLEL,
    SentBytes,
    rank_traffic,
)
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.plan_strategy import prices_of_plan, strategy_of
from parplan.planner.request import Request
from parplan.planner.search.estimate import UniformChoices, estimate_plan
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.machine_catalog import with_gpus
from parplan.profiles.provenance import Kind
from parplan.profiles.stack import ContextForm
from parplan.profiles.units import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeInput:
    """A request with the sequences of one device in a micro-batch, or of all where one is shared.

    price_cache    the prices of the formulas
    local_steps    steps of a device between two sums of local SGD
    """

    request: Request
    micro_batch_size: int
    price_cache: PriceCache
    local_steps: int = 1

    @property
    def num_devices(self) -> int:
        return self.request.cluster.num_gpus

    def on(self, num_devices: int) -> SchemeInput:
        """Returns the same on fewer devices. Raises ConfigError where they fill no whole nodes."""
        if num_devices == self.num_devices:
            return self
        cluster = with_gpus(self.request.cluster, num_devices)
        return replace(self, request=replace(self.request, cluster=cluster))

    def copies(self, degree: int) -> int:
        """Returns how many copies of a model over `degree` devices there are."""
        return self.num_devices // degree


Price = Callable[[SchemeInput, int], SchemeCost]  # of a scheme over a number of devices
MeshOf = Callable[[SchemeInput, int], Mesh]


def by_search(mesh_of: MeshOf, choices: UniformChoices | None = None, **layout: object) -> Price:
    """Returns the price of a layout as a search has it."""

    def price(given: SchemeInput, degree: int) -> SchemeCost:
        return cost_of_plan(plan_of(given, mesh_of(given, degree), choices, **layout))

    return price


def plan_of(
    given: SchemeInput, mesh: Mesh, choices: UniformChoices | None = None, **layout: object
) -> Plan:
    """Returns the plan of a layout by hand. Raises ConfigError where it is not legal."""
    whole = _layout(given, mesh, **layout)
    return estimate_plan(given.request, whole, choices or UniformChoices())


def _layout(given: SchemeInput, mesh: Mesh, **choices: object) -> ParallelLayout:
    """Returns a layout of a mesh; the rows of a grid need a sequence each in a micro-batch."""
    micro_batch_size = math.lcm(given.micro_batch_size, mesh.tp_rows)
    per_replica = given.request.training.global_batch_size // mesh.dp
    fields = {
        "schedule": Schedule.ONE_F_ONE_B,
        "virtual_stages": 1,
        "sequence_parallel": False,
        **choices,
    }
    return ParallelLayout(
        mesh=mesh,
        micro_batch_size=micro_batch_size,
        num_micro_batches=max(1, per_replica // micro_batch_size),
        **fields,  # type: ignore[arg-type]
    )


def interleaved(given: SchemeInput, degree: int) -> SchemeCost:
    """Returns the price of as many virtual stages as the layers of a stage."""
    chunks, over = divmod(given.request.model.num_layers, degree)
    if over or chunks < 2:
        raise ConfigError(
            f"{given.request.model.num_layers} layers are not two or more for each of {degree}"
        )
    mesh = stages_of_degree(given, degree)
    return cost_of_plan(plan_of(given, mesh, schedule=Schedule.INTERLEAVED, virtual_stages=chunks))


def asynchronous_pipeline(given: SchemeInput, degree: int) -> SchemeCost:
    """Returns the price of PipeDream: a stage updates its weights after every micro-batch.

    No stage waits for a flush. Stage s of P keeps the weights of its P - s micro-batches in flight
    (Narayanan et al. 2019, doi 10.1145/3341301.3359646, weight stashing).
    """
    return _unflushed(given, degree, updates_each=True, versions=lambda stage: degree - stage)


def two_buffered_pipeline(given: SchemeInput, degree: int) -> SchemeCost:
    """Returns the price of PipeDream-2BW: two versions of the weights, one update a step.

    No stage waits for a flush; the gradients of a step are those of the weights before it
    (Narayanan et al. 2021, arXiv 2006.09503).
    """
    return _unflushed(given, degree, updates_each=False, versions=lambda stage: min(2, degree))


def _unflushed(
    given: SchemeInput, degree: int, *, updates_each: bool, versions: Callable[[int], int]
) -> SchemeCost:
    """Returns the price of 1F1B without its wait, with several versions of the weights."""
    plan = plan_of(given, stages_of_degree(given, degree))
    cost, parts = cost_of_plan(plan), plan.predicted.breakdown
    sent = cost.sent_bytes
    optimizer_s, reduced_s = parts.optimizer_s.value, parts.dp_comm_s.value
    more = plan.pipeline.num_micro_batches - 1 if updates_each else 0
    if more:
        sent += more * max(_sent(plan, rank, axes=(Axis.DP.value,)) for rank in range(plan.mesh.pp))
    held = max(
        versions(stage) * memory.parameters + memory.gradients + memory.optimizer
        for stage, memory in enumerate(plan.predicted.memory_gib)
    )
    return replace(
        cost,
        compute_s=cost.compute_s + more * optimizer_s,
        comm_s=cost.comm_s + more * reduced_s,
        wait_s=0.0,
        sent_bytes=sent,
        states_bytes=GIB * held,
        kind=Kind.ANALYTIC,
    )


def cost_of_plan(plan: Plan) -> SchemeCost:
    """Returns the cost of a plan on its fullest and its busiest device."""
    parts, memory = plan.predicted.breakdown, plan.predicted.memory_gib
    return SchemeCost(
        compute_s=parts.compute_s.value + parts.recompute_s.value + parts.optimizer_s.value,
        comm_s=sum(
            each.value
            for each in (parts.tp_comm_s, parts.dp_comm_s, parts.pp_comm_s, parts.host_comm_s)
        ),
        wait_s=parts.pp_bubble_s.value,
        sent_bytes=max(_sent(plan, rank) for rank in range(plan.mesh.pp)),
        states_bytes=GIB * max(m.parameters + m.gradients + m.optimizer for m in memory),
        activation_bytes=GIB * max(m.activations + m.temporaries for m in memory),
        kind=plan.predicted.step_time_s.kind,
    )


def _sent(plan: Plan, rank: int, axes: tuple[str, ...] = ()) -> float:
    """Returns the bytes that a device of a pipeline rank sends over some axes, or over all."""
    price_cache = prices_of_plan(plan)
    traffic = rank_traffic(strategy_of(plan, price_cache), rank, price_cache)
    return sum(sent_bytes(each, plan.mesh) for each in traffic if not axes or each.axis in axes)


def sent_bytes(sent: SentBytes, mesh: Mesh) -> float:
    """Returns the bytes that a device sends in collectives that move `sent.num_bytes` (C1 to C4).

    Over the data-parallel axis gradients are those of all replicas.
    """
    share = (_ranks(sent, mesh) - 1) / _ranks(sent, mesh)
    shares = {
        Collective.ALL_REDUCE.value: 2 * share,
        Collective.ALL_GATHER.value: share,
        Collective.REDUCE_SCATTER.value: share,
        Collective.ALL_TO_ALL.value: share,
    }
    return shares.get(sent.kind, 1.0) * sent.num_bytes


def _ranks(sent: SentBytes, mesh: Mesh) -> int:
    """Returns the ranks that take part in a collective over an axis."""
    if sent.axis == EXPERT_PARALLEL:
        return mesh.ep
    if sent.axis == EXPERT_COPIES:
        return mesh.expert_replicas
    if sent.axis in GRID:
        return dict(zip(GRID, (mesh.tp_rows, mesh.tp_columns), strict=True))[sent.axis]
    return mesh.replicas if sent.axis == Axis.DP else mesh.degree(Axis(sent.axis))


def by_formula(formula: Formula, *, shared: bool = True) -> Price:
    """Returns the price of a formula; micro-batches are shared, or each device has its own."""

    def price(given: SchemeInput, degree: int) -> SchemeCost:
        copies = given.copies(degree)
        b = given.micro_batch_size * (1 if shared else degree)
        batch = given.request.training.global_batch_size
        if batch % (b * copies):
            raise ConfigError(
                f"{copies} micro-batches of {b} sequences do not divide the global batch of {batch}"
            )
        case = SchemeCase(given.price_cache, degree, b, copies, given.local_steps)
        return formula(case)

    return price


def copies_of_degree(given: SchemeInput, degree: int) -> Mesh:
    """Returns the mesh of a scheme that all devices run together."""
    return Mesh(pp=1, dp=given.num_devices, tp=1)


def tensor_of_degree(given: SchemeInput, degree: int) -> Mesh:
    """Returns the mesh of tensor parallelism over `degree` devices."""
    return Mesh(pp=1, dp=given.copies(degree), tp=degree)


def grid_of_degree(given: SchemeInput, degree: int) -> Mesh:
    """Returns the mesh of a square of tensor-parallel devices, of one where that is all."""
    side = math.isqrt(degree)
    if side * side != degree:
        raise ConfigError(f"2-D tensor parallelism needs q x q devices, there are {degree}")
    return Mesh(pp=1, dp=given.copies(degree), tp=degree, tp_rows=side)


def stages_of_degree(given: SchemeInput, degree: int) -> Mesh:
    """Returns the mesh of `degree` pipeline stages."""
    return Mesh(pp=degree, dp=given.copies(degree), tp=1)


def experts_of_degree(given: SchemeInput, degree: int) -> Mesh:
    """Returns the mesh with experts over `degree` devices."""
    return Mesh(pp=1, dp=given.num_devices, tp=1, ep=degree)


def context_of_form(form: ContextForm) -> MeshOf:
    """Returns the mesh of sequences over `degree` devices whose attention has that form."""

    def mesh(given: SchemeInput, degree: int) -> Mesh:
        parts = form if degree > 1 else None
        return Mesh(pp=1, dp=given.copies(degree), cp=degree, tp=1, context_form=parts)

    return mesh
