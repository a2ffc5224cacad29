"""The survey's schemes of parallel training as a table that can be asked (S1).

Every scheme uses all devices of a request by itself. What the search may choose is priced as the
search prices it; the others have formulas of their own (costmodels/schemes/formula_schemes.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from parplan.costmodels.communication.collectives import Collective
from parplan.costmodels.communication.mesh import Axis, Mesh
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.schemes.formula_schemes import (
    Formula,
    SchemeCase,
    SchemeCost,
    parameter_server,
    tensor_2d,
    tensor_3d,
    tensor_25d,
)
from parplan.costmodels.strategy import ParallelLayout
from parplan.costmodels.usage.rank_traffic import SentBytes, rank_traffic
from parplan.planner.infeasible.shortfall import price_cache_of
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.plan_strategy import prices_of_plan, strategy_of
from parplan.planner.request import Request
from parplan.planner.search.estimate import UniformChoices, estimate_plan
from parplan.profiles.errors import ConfigError, InfeasibleError
from parplan.profiles.stack import EVERY_SCHEDULE, ContextForm
from parplan.profiles.units import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeInput:
    """A request with the sequences of one device in a micro-batch, or of all where one is shared.

    price_cache    the prices of the formulas
    """

    request: Request
    micro_batch_size: int
    price_cache: PriceCache

    @property
    def num_devices(self) -> int:
        return self.request.cluster.num_gpus


Price = Callable[[SchemeInput], SchemeCost]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """One row of the table.

    sends, holds    formulas of the bytes that a device sends in a step, and holds: w parameters, n
                    devices, M micro-batches; X, W, Y tensors of a product (docs/equations.md)
    searched        whether a search may choose it
    """

    name: str
    sends: str
    holds: str
    price: Price
    searched: bool = True


@dataclass(frozen=True, slots=True)
class PricedScheme:
    """A scheme with its cost, or with the reason why the request cannot have it."""

    scheme: Scheme
    cost: SchemeCost | None
    reason: str = ""


def _layout(given: SchemeInput, mesh: Mesh, **choices: object) -> ParallelLayout:
    per_replica = given.request.training.global_batch_size // mesh.dp
    fields = {
        "schedule": Schedule.ONE_F_ONE_B,
        "virtual_stages": 1,
        "sequence_parallel": False,
        **choices,
    }
    return ParallelLayout(
        mesh=mesh,
        micro_batch_size=given.micro_batch_size,
        num_micro_batches=max(1, per_replica // given.micro_batch_size),
        **fields,  # type: ignore[arg-type]
    )


def _by_search(
    mesh_of: Callable[[SchemeInput], Mesh], choices: UniformChoices | None = None, **layout: object
) -> Price:
    """Returns the price of a layout as a search has it."""

    def price(given: SchemeInput) -> SchemeCost:
        plan = estimate_plan(
            given.request, _layout(given, mesh_of(given), **layout), choices or UniformChoices()
        )
        return cost_of_plan(plan)

    return price


def _interleaved(given: SchemeInput) -> SchemeCost:
    stages = given.num_devices
    chunks, over = divmod(given.request.model.num_layers, stages)
    if over or chunks < 2:
        raise ConfigError(
            f"{given.request.model.num_layers} layers are not two or more for each of {stages}"
        )
    return _by_search(_stages, schedule=Schedule.INTERLEAVED, virtual_stages=chunks)(given)


def cost_of_plan(plan: Plan) -> SchemeCost:
    """Returns the cost of a plan on its fullest and its busiest device."""
    parts, price_cache = plan.predicted.breakdown, prices_of_plan(plan)
    strategy = strategy_of(plan, price_cache)
    sent = max(
        sum(_sent_bytes(each, plan.mesh) for each in rank_traffic(strategy, rank, price_cache))
        for rank in range(plan.mesh.pp)
    )
    memory = plan.predicted.memory_gib
    return SchemeCost(
        compute_s=parts.compute_s.value + parts.recompute_s.value + parts.optimizer_s.value,
        comm_s=sum(
            each.value
            for each in (parts.tp_comm_s, parts.dp_comm_s, parts.pp_comm_s, parts.host_comm_s)
        ),
        wait_s=parts.pp_bubble_s.value,
        sent_bytes=sent,
        states_bytes=GIB * max(m.parameters + m.gradients + m.optimizer for m in memory),
        activation_bytes=GIB * max(m.activations + m.temporaries for m in memory),
    )


def _sent_bytes(sent: SentBytes, mesh: Mesh) -> float:
    """Bytes that a device sends in collectives that move `sent.num_bytes` (C1 to C4)."""
    ranks = mesh.ep if sent.kind == Collective.ALL_TO_ALL else mesh.degree(Axis(sent.axis))
    share = (ranks - 1) / ranks
    shares = {
        Collective.ALL_REDUCE.value: 2 * share,
        Collective.ALL_GATHER.value: share,
        Collective.REDUCE_SCATTER.value: share,
        Collective.ALL_TO_ALL.value: share,
    }
    return shares.get(sent.kind, 1.0) * sent.num_bytes


def _by_formula(formula: Formula, *, shared: bool = True) -> Price:
    """Returns the price of a formula; micro-batches are shared, or each device has its own."""

    def price(given: SchemeInput) -> SchemeCost:
        b = given.micro_batch_size * (1 if shared else given.num_devices)
        if given.request.training.global_batch_size % b:
            raise ConfigError(f"micro-batches of {b} sequences do not divide the global batch")
        return formula(SchemeCase(given.price_cache, given.num_devices, b))

    return price


def _copies(given: SchemeInput) -> Mesh:
    return Mesh(pp=1, dp=given.num_devices, tp=1)


def _tensor(given: SchemeInput) -> Mesh:
    return Mesh(pp=1, dp=1, tp=given.num_devices)


def _stages(given: SchemeInput) -> Mesh:
    return Mesh(pp=given.num_devices, dp=1, tp=1)


def _context(given: SchemeInput, form: ContextForm) -> Mesh:
    if given.num_devices == 1:
        raise ConfigError("one device divides no sequence")
    return Mesh(pp=1, dp=1, cp=given.num_devices, tp=1, context_form=form)


def _experts(given: SchemeInput) -> Mesh:
    if not given.request.model.num_experts:
        raise ConfigError(f"{given.request.model.name} has no experts")
    return Mesh(pp=1, dp=given.num_devices, tp=1, ep=given.num_devices)


_GATHER = "(n-1)/n"
SCHEMES = (
    Scheme(
        name="data parallel",
        sends=f"2{_GATHER} g w",
        holds="states, activations",
        price=_by_search(_copies),
    ),
    Scheme(
        name="parameter server",
        sends="g w; server n (g + p) w",
        holds="states, activations",
        price=_by_formula(parameter_server, shared=False),
        searched=False,
    ),
    *(
        Scheme(
            name=f"ZeRO {stage}",
            sends=sends,
            holds=holds,
            price=_by_search(_copies, UniformChoices(zero=stage)),
        )
        for stage, sends, holds in (
            (1, f"{_GATHER} (g + p) w", "p + g + 12/n"),
            (2, f"{_GATHER} (M g + p) w", "p + (g + 12)/n"),
            (3, f"{_GATHER} M (g + 2p) w", "(g + 12)/n, 2 layers"),
        )
    ),
    Scheme(
        name="tensor 1-D",
        sends=f"8{_GATHER} Sbh a block",
        holds="states/n, part of activations",
        price=_by_search(_tensor),
    ),
    Scheme(
        name="tensor 1-D, sequence parallel",
        sends=f"8{_GATHER} Sbh a block",
        holds="states/n, activations/n",
        price=_by_search(_tensor, sequence_parallel=True),
    ),
    Scheme(
        name="tensor 2-D",
        sends="3(q-1)/q2 (X + W)",
        holds="all/n, n = q q",
        price=_by_formula(tensor_2d),
        searched=False,
    ),
    Scheme(
        name="tensor 2.5-D",
        sends="3(q-1)/q2 (X/d + W) + 2(d-1)/d W/q2",
        holds="states/q2, activations/n",
        price=_by_formula(tensor_25d),
        searched=False,
    ),
    Scheme(
        name="tensor 3-D",
        sends="3(l-1)/l3 (X + W + Y)",
        holds="all/n, n = l l l",
        price=_by_formula(tensor_3d),
        searched=False,
    ),
    *(
        Scheme(
            name=f"context, {form}",
            sends=f"{sends} a block + 2{_GATHER} g w",
            holds="states, activations/n",
            price=_by_search(partial(_context, form=form)),
        )
        for form, sends in (
            (ContextForm.RING, "3(n-1) KV/n"),
            (ContextForm.ALL_GATHER, f"3{_GATHER} KV"),
            (ContextForm.ALL_TO_ALL, f"2{_GATHER} (2Q + KV)/n"),
        )
    ),
    Scheme(
        name="pipeline, GPipe",
        sends="2 M Sbh p",
        holds="states/n, M activations/n",
        price=_by_search(_stages, schedule=Schedule.GPIPE),
    ),
    Scheme(
        name="pipeline, 1F1B",
        sends="2 M Sbh p",
        holds="states/n, n - s activations/n",
        price=_by_search(_stages),
    ),
    Scheme(
        name="pipeline, interleaved",
        sends="2 v M Sbh p",
        holds="states/n, more activations/n",
        price=_interleaved,
    ),
    Scheme(
        name="expert parallel",
        sends=f"4{_GATHER} k Sbh p a block",
        holds="experts/n",
        price=_by_search(_experts),
    ),
    Scheme(
        name="data parallel, full recompute",
        sends=f"2{_GATHER} g w",
        holds="states, block inputs",
        price=_by_search(_copies, UniformChoices(recompute=Recompute.FULL)),
    ),
    Scheme(
        name="ZeRO 3, states on the host",
        sends=f"{_GATHER} M (g + 2p) w",
        holds="2 layers, activations",
        price=_by_search(_copies, UniformChoices(zero=3, offload=(Offload.STATES,))),
    ),
)


def priced_schemes(request: Request, micro_batch_size: int) -> Iterator[PricedScheme]:
    """Yields every scheme over all devices of a request.

    micro_batch_size    sequences of one device in a micro-batch; of all devices together where they
                        share a micro-batch
    The stack's prices hold for schedules that it does not run too.
    """
    training = request.training
    stack = replace(training.stack, schedules=EVERY_SCHEDULE)
    request = replace(request, training=replace(training, stack=stack))
    given = SchemeInput(
        request=request, micro_batch_size=micro_batch_size, price_cache=price_cache_of(request)
    )
    for scheme in SCHEMES:
        try:
            yield PricedScheme(scheme, scheme.price(given))
        except (ConfigError, InfeasibleError) as error:
            yield PricedScheme(scheme, None, str(error))
