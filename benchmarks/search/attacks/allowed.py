"""The strategies that count as an attack.

A strategy counts within the pins of the request if `estimate` prices it and the executor runs it.
One table lists the documented exclusions of the search with their documentation; no other strategy
is excused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from parplan.costmodels.communication.mesh import Mesh, illegal_expert_parallel
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import ParallelLayout, Strategy
from parplan.planner.candidates.enumeration import MAX_MICRO_BATCH_SIZE, illegal_layout
from parplan.planner.candidates.meshes import expert_divisions, illegal_tensor_parallel
from parplan.planner.candidates.stack_rules import lacking_schedule
from parplan.planner.request import Constraints
from parplan.planner.request import Request as PlanningRequest
from parplan.profiles.divisors import divisors
from parplan.profiles.models.operator_graph import LayerKind


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A part of the space outside the search: the reason, its documentation, and a test for it."""

    reason: str
    said: str
    has: Callable[[Strategy, Constraints], bool]


def _large_micro_batch(strategy: Strategy, pins: Constraints) -> bool:
    return strategy.layout.micro_batch_size > MAX_MICRO_BATCH_SIZE and pins.micro_batch_size is None


def _gathers_ahead(strategy: Strategy, pins: Constraints) -> bool:
    layout = strategy.layout
    return (
        layout.recomputes_ahead
        and layout.mesh.dp > 1
        and any(choice.zero == 3 for stage in strategy.stages for choice in stage)
    )


def _split_and_again(strategy: Strategy, pins: Constraints) -> bool:
    recomputed = (
        choice.recompute
        for stage in strategy.stages
        for choice in stage
        if choice.kind is LayerKind.BLOCK
    )
    return strategy.layout.splits_backward and any(
        names not in ((), "none") for names in recomputed
    )


def _uneven_chunks(strategy: Strategy, pins: Constraints) -> bool:
    """Return True if inner stages of the interleaved schedule differ in their number of blocks.

    Inner stages are all between the first and the last.
    """
    counts = [sum(choice.kind is LayerKind.BLOCK for choice in stage) for stage in strategy.stages]
    middle = counts[1:-1] or counts
    return strategy.layout.equal_ranks and (
        len(set(middle)) > 1 or {counts[0], counts[-1]} not in ({middle[0]}, {middle[0] - 1})
    )


LEFT_OUT = (
    LeftOut("micro-batches above 64 are searched only if pinned", "--explain", _large_micro_batch),
    LeftOut(
        "a gather for a recompute ahead of the gradient has no price",
        "docs/design/search.md, --explain",
        _gathers_ahead,
    ),
    LeftOut(
        "schedules that split backward passes run without recompute",
        "the error of estimate",
        _split_and_again,
    ),
    LeftOut(
        "virtual stages of the interleaved schedule hold equal numbers of blocks",
        "the error of estimate",
        _uneven_chunks,
    ),
)


def left_out(strategy: Strategy, pins: Constraints) -> LeftOut | None:
    """Return the entry of the table that a strategy belongs to, or None."""
    return next((entry for entry in LEFT_OUT if entry.has(strategy, pins)), None)


def zero_stages(layout: ParallelLayout, pins: Constraints) -> tuple[int, ...]:
    """Return the ZeRO stages that layers of `layout` may have."""
    if layout.mesh.dp == 1:
        return (0,)
    allowed = pins.resolved().zero or (0, 1, 2, 3)
    return tuple(
        zero
        for zero in allowed
        if zero < 3 or not (layout.splits_backward or layout.recomputes_ahead)
    )


def _meshes(request: PlanningRequest, pins: Constraints) -> Iterator[Mesh]:
    gpus = request.cluster.num_gpus
    for tp in divisors(gpus):
        if illegal_tensor_parallel(
            tp, request.model, request.cluster, across_nodes=pins.tp_across_nodes
        ):
            continue
        for pp in divisors(gpus // tp):
            dp, stack = gpus // tp // pp, request.training.stack
            for ep, etp in expert_divisions(dp * tp, tp, request.model, stack):
                mesh = Mesh(pp=pp, dp=dp, tp=tp, ep=ep, etp=etp)
                if not illegal_expert_parallel(mesh, request.model):
                    yield mesh
                    if mesh.ep * mesh.etp == 1:
                        rows_of_grids = (rows for rows in pins.tp_rows or () if 1 < rows < tp)
                        yield from (replace(mesh, tp_rows=rows) for rows in rows_of_grids)


def _schedules(mesh: Mesh, num_layers: int) -> Iterator[tuple[Schedule, int]]:
    if mesh.pp == 1:
        yield Schedule.ONE_F_ONE_B, 1
        return
    for schedule in Schedule:
        if schedule is Schedule.INTERLEAVED:
            yield from ((schedule, v) for v in range(2, num_layers // mesh.pp + 2))
        elif schedule is not Schedule.CUSTOM:
            yield schedule, 2 if schedule is Schedule.ZBV else 1


def _within(layout: ParallelLayout, pins: Constraints) -> bool:
    mesh = layout.mesh
    pipelined, divided = mesh.pp > 1, mesh.tp > 1
    values = {
        "pp": mesh.pp,
        "dp": mesh.dp,
        "tp": mesh.tp,
        "ep": mesh.ep,
        "micro_batch_size": layout.micro_batch_size,
        **(
            {"schedule": layout.schedule, "virtual_stages": layout.virtual_stages}
            if pipelined
            else {}
        ),
        **(
            {"sequence_parallel": layout.sequence_parallel, "tp_overlap": layout.tp_overlap}
            if divided
            else {}
        ),
    }
    pinned = ((getattr(pins, name), value) for name, value in values.items())
    return all(allowed is None or value in allowed for allowed, value in pinned) and not pins.ban(
        **values
    )


def layouts(request: PlanningRequest, pins: Constraints) -> Iterator[ParallelLayout]:
    """Yield every layout within the pins that `estimate` prices.

    The level of sub-pipelining is at most the level of the stack, or of the pins.
    """
    levels = (
        range(request.training.stack.tp_overlap + 1) if pins.tp_overlap is None else pins.tp_overlap
    )
    for mesh in _meshes(request, pins):
        if request.training.global_batch_size % mesh.dp:
            continue
        per_replica = request.training.global_batch_size // mesh.dp
        for micro_batch_size in divisors(per_replica):
            for schedule, virtual_stages in _schedules(mesh, request.model.num_layers):
                for sequence_parallel in (False, True) if mesh.tp > 1 else (False,):
                    for level in levels if mesh.tp > 1 else (0,):
                        layout = ParallelLayout(
                            mesh=mesh,
                            schedule=schedule,
                            virtual_stages=virtual_stages,
                            micro_batch_size=micro_batch_size,
                            num_micro_batches=per_replica // micro_batch_size,
                            sequence_parallel=sequence_parallel,
                            tp_overlap=level,
                        )
                        reason = lacking_schedule(layout, request.training.stack) or illegal_layout(
                            layout, request.model, request.training
                        )
                        if not reason and _within(layout, pins) and zero_stages(layout, pins):
                            yield layout
