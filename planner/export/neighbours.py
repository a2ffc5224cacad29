"""The settings that differ from given ones in one choice: what advice tries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from parplan.costmodels.communication.mesh import MeshOrder
from parplan.costmodels.schedules.schedule import Schedule
from parplan.planner.export.fields.arguments import Facts
from parplan.planner.export.fields.launcher import Target
from parplan.planner.export.fields.settings import Settings
from parplan.planner.plan.plan import Plan
from parplan.profiles.divisors import divisors
from parplan.profiles.stack import AttentionKernel

_COUNTS = 8  # numbers of recomputed blocks of a stage that are tried, at even distances


def neighbours(plan: Plan, settings: Settings, target: Target) -> Iterator[tuple[str, Settings]]:
    """Yields the settings that differ in one choice, each with the name of that choice.

    Some may not be legal. A change of a degree leaves data parallelism what is left of the GPUs.
    """
    for zero in target.zeros:
        yield "zero", replace(settings, zero=zero, zero_of_blocks=None, zero_of_ends=None)
    most = max(settings.blocks)
    for recompute in target.recomputes(plan.model, most):
        if (recompute.get("recompute_blocks") or 0) % -(-most // _COUNTS) == 0:
            yield "recompute", replace(settings, recompute_of_blocks=None, **recompute)
    for size in (settings.micro_batch_size * 2, settings.micro_batch_size // 2):
        if size and (settings.global_batch_size // settings.dp) % size == 0:
            yield "micro_batch_size", replace(settings, micro_batch_size=size)
    yield "sequence_parallel", replace(settings, sequence_parallel=settings.tp > 1)
    yield "overlap", replace(settings, overlap=True)
    yield "attention", replace(settings, attention=AttentionKernel.FLASH)
    yield "fused_loss", replace(settings, fused_loss=True)
    yield from _with_switch(plan, settings, target)
    yield from (("order", replace(settings, order=order)) for order in MeshOrder)
    yield from (("virtual_stages", each) for each in _stages(settings))
    for axis in ("tp", "pp", "cp"):
        degree = getattr(settings, axis)
        for other in (degree * 2, degree // 2):
            yield from ((axis, each) for each in _with_degree(plan, settings, axis, other))
    if settings.has_experts:
        yield from (("ep", replace(settings, ep=ep)) for ep in (settings.ep * 2, settings.ep // 2))
        yield "etp", replace(settings, etp=1)


def _with_switch(plan: Plan, settings: Settings, target: Target) -> Iterator[tuple[str, Settings]]:
    """Yields the settings with each switch of the launcher that has an effect on them."""
    for switch in target.switches:
        if switch.is_on(settings, plan.cluster) and not switch.idle(settings):
            on: Facts = {switch.fact: True}
            yield switch.fact, replace(settings, **on)


def _stages(settings: Settings) -> Iterator[Settings]:
    """Yields other numbers of virtual stages, all of equal stages."""
    per_rank = settings.num_layers // settings.pp
    if settings.pp == 1 or settings.num_layers % settings.pp:
        return
    for virtual in divisors(per_rank):
        yield _staged(settings, virtual)


def _staged(settings: Settings, virtual: int) -> Settings:
    """Returns the settings with equal stages."""
    stages = settings.pp * virtual
    return replace(
        settings,
        virtual_stages=virtual,
        schedule=Schedule.INTERLEAVED if virtual > 1 else Schedule.ONE_F_ONE_B,
        blocks=(settings.num_layers // stages,) * stages,
    )


def _with_degree(plan: Plan, settings: Settings, axis: str, degree: int) -> Iterator[Settings]:
    """Yields the settings with another degree of an axis, and the data parallelism that is left.

    The micro-batch is as large as before, or smaller where the batch of a rank has to be.
    """
    if degree < 1:
        return
    change: Facts = {axis: degree}
    changed = replace(settings, **change)
    inside = changed.pp * changed.cp * changed.tp
    whole = plan.cluster.num_gpus % inside == 0 and changed.num_layers % changed.pp == 0
    if not whole or (settings.tp < changed.tp > plan.cluster.gpus_per_node):
        return
    dp = plan.cluster.num_gpus // inside
    if changed.global_batch_size % dp == 0:
        per_rank = changed.global_batch_size // dp
        size = max(each for each in divisors(per_rank) if each <= changed.micro_batch_size)
        changed = replace(changed, micro_batch_size=size)
        etp = changed.tp if settings.etp == settings.tp else settings.etp
        changed = replace(changed, dp=dp, etp=etp, zero_ranks=None)
        per_rank = changed.num_layers // changed.pp
        kept = settings.virtual_stages
        for virtual in {1, kept if changed.pp > 1 and per_rank % kept == 0 else 1}:
            yield _staged(changed, virtual)
