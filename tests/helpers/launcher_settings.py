"""Random settings of launchers: changes of known settings, one or many after one another."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from parplan.costmodels.communication.mesh import MeshOrder
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.planner.export.fields.launcher import Target
from parplan.planner.export.fields.settings import Settings
from parplan.planner.request import Request

Change = Callable[[Settings, random.Random, Request, Target], Settings]


def _mesh(settings: Settings, rng: random.Random, *_: object) -> Settings:
    """Moves a factor of two from one axis to another."""
    more, less = rng.sample(("pp", "dp", "tp"), 2)
    if getattr(settings, less) % 2:
        return settings
    changed = {more: getattr(settings, more) * 2, less: getattr(settings, less) // 2}
    return _with_stages(replace(settings, **changed), rng)


def _experts(settings: Settings, rng: random.Random, *_: object) -> Settings:
    if not settings.has_experts:
        return settings
    ep = max(1, rng.choice((settings.ep * 2, settings.ep // 2)))
    return replace(settings, ep=ep, etp=rng.choice((1, settings.tp)))


def _micro_batch(settings: Settings, rng: random.Random, *_: object) -> Settings:
    size = rng.choice((settings.micro_batch_size * 2, settings.micro_batch_size // 2))
    return replace(settings, micro_batch_size=max(1, size))


def _zero(settings: Settings, rng: random.Random, _: Request, target: Target) -> Settings:
    return replace(settings, zero=rng.choice(target.zeros))


def _recompute(
    settings: Settings, rng: random.Random, request: Request, target: Target
) -> Settings:
    kinds = tuple(target.recomputes(request.model, max(settings.blocks)))
    return replace(settings, **rng.choice(kinds))


def _schedule(settings: Settings, rng: random.Random, request: Request, _: Target) -> Settings:
    """Takes another schedule of the stack, interleaved ones with equal stages."""
    layers = settings.num_layers
    known = request.training.stack.schedules
    schedule = rng.choice([Schedule(name) for name in known if name != "custom"])
    if settings.pp == 1 or schedule in (Schedule.ONE_F_ONE_B, Schedule.GPIPE):
        schedule = Schedule.ONE_F_ONE_B
        virtual = 1
    elif schedule is Schedule.INTERLEAVED:
        shares = [n // settings.pp for n in (layers, layers + 2) if n % settings.pp == 0]
        divisors = [v for share in shares for v in range(2, share + 1) if share % v == 0]
        if not divisors:
            return settings
        virtual = rng.choice(divisors)
    else:
        virtual = 2
    return _with_stages(replace(settings, schedule=schedule, virtual_stages=virtual), rng)


def _stages(settings: Settings, rng: random.Random, _: Request, target: Target) -> Settings:
    """Moves a block to another stage, or takes other stages that the launcher lists."""
    if settings.pp == 1 or settings.schedule is Schedule.INTERLEAVED:
        return settings
    if target.partitions is not None:
        said = tuple(target.partitions(settings.num_stages, settings.num_layers))
        return replace(settings, blocks=rng.choice(said)) if said else settings
    here, there = rng.sample(range(len(settings.blocks)), 2)
    blocks = list(settings.blocks)
    blocks[here] -= 1
    blocks[there] += 1
    return replace(settings, blocks=tuple(blocks)) if blocks[here] else settings


def _order(settings: Settings, rng: random.Random, request: Request, _: Target) -> Settings:
    return replace(settings, order=MeshOrder(rng.choice(request.training.stack.mesh_orders)))


def _sequence_parallel(settings: Settings, rng: random.Random, *_: object) -> Settings:
    return replace(settings, sequence_parallel=settings.tp > 1 and rng.random() < 0.5)


def _with_stages(settings: Settings, rng: random.Random) -> Settings:
    """Returns settings whose stages are as many as their pipeline has, about equal."""
    if settings.pp == 1:
        settings = replace(settings, schedule=Schedule.ONE_F_ONE_B, virtual_stages=1)
    stages, layers = settings.num_stages, settings.num_layers
    if settings.schedule is Schedule.INTERLEAVED and layers % stages:
        if (layers + 2) % stages:
            return _with_stages(
                replace(settings, schedule=Schedule.ONE_F_ONE_B, virtual_stages=1), rng
            )
        blocks = [(layers + 2) // stages] * stages
        blocks[0] -= 1
        blocks[-1] -= 1
    else:
        each, more = divmod(layers, stages)
        longer = set(rng.sample(range(stages), more))
        blocks = [each + (stage in longer) for stage in range(stages)]
    return replace(
        settings,
        blocks=tuple(blocks),
        sequence_parallel=settings.tp > 1 and settings.sequence_parallel,
    )


_CHANGES: tuple[Change, ...] = (
    _mesh,
    _experts,
    _micro_batch,
    _zero,
    _recompute,
    _schedule,
    _stages,
    _order,
    _sequence_parallel,
)


def changed(
    settings: Settings, changes: int, rng: random.Random, request: Request, target: Target
) -> Settings:
    """Returns settings after a number of random changes, which may be illegal."""
    for _ in range(changes):
        settings = rng.choice(_CHANGES)(settings, rng, request, target)
    if settings.schedule is Schedule.ZBV:
        settings = replace(settings, recompute=Recompute.NONE, full_in_turn=False)
    return settings
