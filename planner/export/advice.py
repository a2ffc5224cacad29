"""The single changes of a launcher's configuration that gain most.

Each change is of one setting. It is written in the launcher's arguments, read back and priced, and
the arguments that differ are what there is to change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from parplan.costmodels.schedules.schedule import Schedule
from parplan.planner.export.arguments import Facts, Given, Words, written
from parplan.planner.export.configured import Priced, price_settings
from parplan.planner.export.exported import training_on
from parplan.planner.export.launcher import Target
from parplan.planner.export.settings import Settings
from parplan.planner.infeasible.shortfall import limit_bytes
from parplan.planner.plan.plan import Plan
from parplan.planner.request import SearchOptions
from parplan.profiles.divisors import divisors
from parplan.profiles.errors import ConfigError

ChangedArgument = tuple[str, Words | None, Words | None]
_LEAST = 0.005  # share of a step that a change must gain to be said


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of one setting.

    arguments   those that differ: the name, the words before and after, None where it is absent
    configured  the configuration with it
    """

    arguments: tuple[ChangedArgument, ...]
    configured: Priced


def best_changes(
    plan: Plan, settings: Settings, target: Target, most: int = 5
) -> tuple[Change, ...]:
    """Returns the changes after which a configuration fits and is faster, the fastest first.

    The best change of each setting is among them.

    plan    that of the configuration; where it does not fit, slower changes count too
    """
    limit = limit_bytes(plan.cluster, plan.training.stack, SearchOptions())
    base_s = plan.predicted.step_time_s.value
    fits = all(each.total <= each.capacity for each in plan.predicted.memory_gib)
    before = dict(written(target.table, settings))
    found: dict[str, Change] = {}
    for setting, other in _neighbours(plan, settings, target):
        after = dict(written(target.table, other))
        differing = tuple(
            (name, before.get(name), after.get(name))
            for name in dict.fromkeys((*before, *after))
            if before.get(name) != after.get(name)
        )
        one = _priced(after, plan, target) if differing else None
        gains = one is not None and (not fits or one.price.step_s < base_s * (1 - _LEAST))
        if one is None or not gains or one.peak_bytes > limit:
            continue
        known = found.get(setting)
        if known is None or one.price.step_s < known.configured.price.step_s:
            found[setting] = Change(arguments=_of_files(differing, target), configured=one)
    return tuple(sorted(found.values(), key=lambda each: each.configured.price.step_s)[:most])


def _of_files(
    differing: tuple[ChangedArgument, ...], target: Target
) -> tuple[ChangedArgument, ...]:
    """Returns the arguments that files have; options of `plan read` only where no file says it."""
    stated = {row.name for row in target.stated}
    return tuple(each for each in differing if each[0] not in stated) or differing


def _priced(arguments: dict[str, Words], plan: Plan, target: Target) -> Priced | None:
    """Returns the price of arguments, None where they cannot run."""
    given = tuple(Given(name, words, target.name) for name, words in arguments.items())
    training = training_on(target, plan.training)
    try:
        settings = target.settings(given, plan.model, plan.cluster.num_gpus)
        return price_settings(settings, plan.model, plan.cluster, training)
    except ConfigError:
        return None


def _neighbours(plan: Plan, settings: Settings, target: Target) -> Iterator[tuple[str, Settings]]:
    """Yields the settings that differ in one choice, each with the name of that choice."""
    for zero in target.zeros:
        yield "zero", replace(settings, zero=zero)
    for recompute in target.recomputes(plan.model, max(settings.blocks)):
        yield "recompute", replace(settings, **recompute)
    for size in (settings.micro_batch_size * 2, settings.micro_batch_size // 2):
        if size and (settings.global_batch_size // settings.dp) % size == 0:
            yield "micro_batch_size", replace(settings, micro_batch_size=size)
    yield "sequence_parallel", replace(settings, sequence_parallel=settings.tp > 1)
    yield "overlap", replace(settings, overlap=True)
    yield from (("virtual_stages", each) for each in _stages(settings))
    for axis in ("tp", "pp"):
        degree = getattr(settings, axis)
        for other in (degree * 2, degree // 2):
            yield from ((axis, each) for each in _with_degree(plan, settings, axis, other))


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
    """Yields the settings with another degree of an axis, and the data parallelism that is left."""
    if degree < 1:
        return
    change: Facts = {axis: degree}
    changed = replace(settings, **change)
    inside = changed.pp * changed.cp * changed.tp
    whole = plan.cluster.num_gpus % inside == 0 and changed.num_layers % changed.pp == 0
    if not whole or (settings.tp < changed.tp > plan.cluster.gpus_per_node):
        return
    dp = plan.cluster.num_gpus // inside
    if changed.global_batch_size % (changed.micro_batch_size * dp) == 0:
        etp = changed.tp if settings.etp == settings.tp else settings.etp
        yield _staged(replace(changed, dp=dp, etp=etp, zero_ranks=None), 1)
