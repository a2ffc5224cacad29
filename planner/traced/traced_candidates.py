"""The outer candidates of a traced module: mesh, micro-batch and schedule, with illegal ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import gcd

from parplan.costmodels.communication.mesh import Mesh, MeshOrder, distinct_orders
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import AHEAD, LAST_KEEPS_ALL, Schedule
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.candidates.enumeration import (
    CandidateSpace,
    excluded_pipeline,
    illegal_pipeline,
    layout_text,
    micro_batch_sizes,
)
from parplan.planner.candidates.meshes import Pruned, excluded_mesh, excluded_order
from parplan.planner.candidates.stack_rules import require_stack_runs
from parplan.planner.host_options.state_locations import has_chunks, illegal_chunks
from parplan.planner.request import Constraints, TracedRequest
from parplan.planner.stage_recompute import illegal_stage_recompute
from parplan.profiles.divisors import divisors
from parplan.profiles.errors import ConfigError
from parplan.profiles.stack import Stack

MOST_CHUNKS = 4  # virtual stages of a rank that are searched when none are pinned
RUN = (
    Schedule.ONE_F_ONE_B,
    Schedule.GPIPE,
    Schedule.INTERLEAVED,
    Schedule.EARLY_RECOMPUTE,
    Schedule.LAST_NO_RECOMPUTE,
    Schedule.SCP,
)


def require_known(pins: Constraints) -> None:
    """Raise ConfigError for pins of choices that a traced module does not have."""
    for option, values, only in (
        ("--ep", pins.ep, 1),
        ("--sequence-parallel", pins.sequence_parallel, False),
    ):
        if values is not None and set(values) != {only}:
            raise ConfigError(
                f"{option} is pinned, a traced module has neither experts apart nor sequences "
                "divided between its layers",
                hint=f"leave out {option}",
            )
    if pins.recompute and Recompute.SELECTIVE in pins.recompute:
        raise ConfigError(
            "--recompute selective needs a described model, no operators of a traced one are the "
            "selected ones",
            hint="leave it out, and the search chooses operators; or --recompute none,full",
        )
    unknown = [schedule for schedule in pins.schedule or () if schedule not in RUN]
    if unknown:
        raise ConfigError(
            f"--schedule {unknown[0]} does not run a traced module",
            hint=f"use one of {', '.join(RUN)}",
        )


def enumerate_traced_candidates(
    num_shards: int,
    request: TracedRequest,
    illegal_tp: Callable[[int], str | None],
    counts: tuple[int, ...] = (),
) -> CandidateSpace:
    """Returns all candidates of a module of `num_shards` shards.

    `illegal_tp` says why a tensor-parallel degree cannot divide the module. `counts` are the shards
    of each virtual stage, empty when the search decides. Raises ConfigError for pins that the stack
    does not run.
    """
    training, pins = request.training, request.constraints
    require_stack_runs(training.stack, pins)
    pins = pins.resolved(training.stack)
    layouts: list[ParallelLayout] = []
    pruned: list[Pruned] = []
    for mesh in _meshes(request):
        reason = excluded_mesh(mesh, pins, num_shards, "shards that the module can be cut into")
        reason = reason or excluded_order(mesh, pins) or illegal_tp(mesh.tp)
        if reason:
            pruned.append(Pruned(str(mesh), reason))
            continue
        for layout in _layouts(mesh, num_shards, request, pruned):
            stages = layout.num_virtual_stages
            reason = _excluded(layout, pins, training.stack)
            if not reason and counts and len(counts) != stages:
                reason = f"--stages gives {len(counts)} stages, not {stages}"
            if reason:
                pruned.append(Pruned(layout_text(layout), reason))
                continue
            layouts.append(layout)
            if Offload.STATES in (pins.offload or ()):
                layouts.append(replace(layout, states_on_host=True))
            if has_chunks(pins.offload):
                chunked = replace(layout, chunked=True)
                if reason := _unchunkable(layout, pins):
                    pruned.append(Pruned(layout_text(chunked), reason))
                else:
                    layouts.append(chunked)
    return CandidateSpace(tuple(layouts), tuple(pruned))


def _unchunkable(layout: ParallelLayout, pins: Constraints) -> str | None:
    """Returns the reason why no search holds states of a layout in chunks, or None."""
    if layout.virtual_stages > 1:
        return "chunks of a traced module are searched with one part a pipeline rank"
    return illegal_chunks(layout, pins.zero)


def _meshes(request: TracedRequest) -> Iterator[Mesh]:
    """Yields the meshes whose tensor-parallel ranks are inside a node."""
    gpus = request.cluster.num_gpus
    orders = request.constraints.mesh_order or (MeshOrder.PP_DP_TP,)
    for tp in divisors(gcd(gpus, request.cluster.gpus_per_node)):
        for pp in divisors(gpus // tp):
            mesh = Mesh(pp=pp, dp=gpus // tp // pp, tp=tp)
            yield from distinct_orders(mesh, orders, request.cluster.unit_gpus)


def _layouts(
    mesh: Mesh, num_shards: int, request: TracedRequest, pruned: list[Pruned]
) -> Iterator[ParallelLayout]:
    for size in micro_batch_sizes(mesh, request):
        if isinstance(size, Pruned):
            pruned.append(size)
            continue
        plain = ParallelLayout(
            mesh=mesh,
            schedule=Schedule.ONE_F_ONE_B,
            virtual_stages=1,
            micro_batch_size=size,
            num_micro_batches=request.training.global_batch_size // mesh.dp // size,
            sequence_parallel=False,
        )
        for schedule, chunks in _schedules(plain, num_shards, request.constraints):
            yield replace(plain, schedule=schedule, virtual_stages=chunks)


def _schedules(
    layout: ParallelLayout, num_shards: int, pins: Constraints
) -> Iterator[tuple[Schedule, int]]:
    """Yields schedules worth trying, with their virtual stages.

    GPipe takes as long as 1F1B and holds more: it is tried when the pipeline does not fill, or
    when it is pinned.
    """
    pp, m = layout.mesh.pp, layout.num_micro_batches
    if pp == 1:
        yield Schedule.ONE_F_ONE_B, 1
        return
    named = (
        *(pins.schedule or ()),
        *((Schedule.GPIPE,) if pins.ban(schedule=Schedule.ONE_F_ONE_B) else ()),
    )
    if m >= pp or Schedule.ONE_F_ONE_B in named:
        yield Schedule.ONE_F_ONE_B, 1
    if m < pp or Schedule.GPIPE in named:
        yield Schedule.GPIPE, 1
    if m >= pp:
        yield from ((schedule, 1) for schedule in RUN if schedule in AHEAD)
    most = max(pins.virtual_stages or (MOST_CHUNKS,))
    yield from (
        (Schedule.INTERLEAVED, chunks) for chunks in range(2, most + 1) if pp * chunks <= num_shards
    )


def _excluded(layout: ParallelLayout, pins: Constraints, stack: Stack) -> str | None:
    reason = excluded_pipeline(layout, pins, stack)
    if not reason and pins.recompute_first_stage is not None:
        reason = illegal_stage_recompute(layout, pins.recompute_first_stage)
    if reason or layout.mesh.pp == 1:
        return reason
    levels = pins.recompute
    if layout.schedule in AHEAD and levels is not None and Recompute.FULL not in levels:
        return f"{layout.schedule} is for recompute, --recompute or --forbid excludes that"
    if layout.schedule in LAST_KEEPS_ALL and levels is not None and Recompute.NONE not in levels:
        return (
            f"the last stage of {layout.schedule} recomputes nothing, --recompute or --forbid "
            f"excludes that"
        )
    return illegal_pipeline(layout)
