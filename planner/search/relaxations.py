"""When nothing fits: single changes of the request that make it fit, each with its step time.

A change drops a pin or a ban, leaves less memory free, or adds GPUs. Each is confirmed by a search.
Where no dropped pin alone helps, all are dropped and as many as possible are put back. This file is
above planner/search/find_plan.py: a search without a plan raises
`parplan.report.searches.infeasible_text.explained_error`, which calls this file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from parplan.costmodels.layers.recompute import Recompute, recompute_operators
from parplan.planner.deadline import Deadline
from parplan.planner.forbid import Ban, Value
from parplan.planner.infeasible.shortfall import EXPLAINED_S, limit_bytes
from parplan.planner.objective import Objective
from parplan.planner.plan.oom_risk import default_margin
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.prediction import Status
from parplan.planner.plan.traits import family_of
from parplan.planner.request import Constraints, Request, SearchOptions
from parplan.planner.search.described_shortfall import enough_gpus
from parplan.planner.search.find_plan import find_plan
from parplan.profiles.errors import ConfigError, InfeasibleError, OutOfTimeError, SolverError
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.machines.machine_catalog import cluster_names, load_cluster
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.units import GIB, gib

BUDGET_S = 10.0  # for all searches together: they only explain
UNLIMITED_BYTES = 1 << 60
MARGIN_STEP = 0.001
LIMIT_STEP_GIB = 0.1
GPUS = "--gpus"
MOST_STEPS = 3  # the need of the leanest plan is known to 1 MiB
RULE = "recompute_first_stage"  # it is dropped, since no one value of it is a plan's
PINS = (  # the easiest to give up last
    "schedule",
    "virtual_stages",
    "sequence_parallel",
    "weights_over_data",
    "tp",
    "pp",
    "dp",
    "cp",
    "context_form",
    "ep",
    "etp",
    "tp_rows",
    "micro_batch_size",
    "zero",
    "tp_overlap",
    "recompute",
    RULE,
)
SWITCHES = ("sequence_parallel", "weights_over_data")
MESH = frozenset({"tp", "pp", "dp"})
OF_MESH = MESH | {"cp", "context_form", "ep", "etp", "tp_rows"}
Item = str | Ban  # a pin by its name, or a ban


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """A request that fits, and its options: `flags` replace theirs, the options `dropped` go.

    step_s: step of its fastest plan; an upper bound where its search was cut off (`proven` False);
    None where there was no time
    note: a remark for the user
    """

    flags: tuple[str, ...]
    request: Request
    step_s: float | None
    proven: bool
    dropped: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxations:
    """Changes that make a request fit, fastest first, more GPUs last.

    unlimited_s: step time with unlimited memory
    untried: changes that were not tried
    """

    found: tuple[Relaxation, ...]
    unlimited_s: float | None
    untried: tuple[str, ...]


class _Searches:
    """Searches of relaxed requests before one deadline."""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline

    def plan(self, request: Request) -> Plan | None:
        """Returns the fastest plan, or None when nothing fits or the solver fails.

        Raises OutOfTimeError and KeyboardInterrupt.
        """
        if self._deadline.is_over:
            raise OutOfTimeError("the time for what would fit is over")
        try:
            fastest = replace(request.until(self._deadline), objective=Objective.THROUGHPUT)
            plan = find_plan(fastest, explain=_unexplained)
        except (InfeasibleError, ConfigError, SolverError):
            return None
        if (
            plan.search.status is Status.FEASIBLE
            and not plan.search.solver_failure
            and not self._deadline.is_over
        ):
            raise KeyboardInterrupt  # only Ctrl-C ends a search early; it is meant for all of them
        return plan


def _unexplained(*_: object) -> InfeasibleError:
    return InfeasibleError("nothing fits")


def relaxations(
    request: Request, need_bytes: float, budget_s: float = BUDGET_S, host_bytes: int | None = None
) -> Relaxations:
    """Returns every change that makes a request fit.

    need_bytes: bytes of the leanest plan on its fullest device
    budget_s: limit of all searches together; the deadline of the request may come before
    host_bytes: memory of a node's host with which its devices are enough, None without such
    """
    untried: list[str] = []
    enough, deadline = None, request.options.deadline
    try:
        enough = enough_gpus(
            request.until(deadline.within(EXPLAINED_S).share(2)),
            limit_bytes(request.cluster, request.training.stack, request.options),
        )
    except OutOfTimeError:
        untried.append(GPUS)
    searches = _Searches(deadline.within(budget_s))

    def within(name: str, find: Callable[[], Relaxation | None]) -> list[Relaxation]:
        try:
            relaxation = find()
        except OutOfTimeError:
            untried.append(name)
            return []
        return [relaxation] if relaxation else []

    unlimited = _plan_or_none(searches, _with_unlimited_memory(request))
    hosts = (
        within("--host-memory", lambda: _more_host(request, host_bytes, searches))
        if host_bytes
        else []
    )
    larger = within(GPUS, lambda: _more_gpus(request, enough, searches)) if enough else []
    less_free = within("less free memory", lambda: _less_free(request, need_bytes, searches))
    dropped = [
        relaxed
        for items in _single_changes(request.constraints)
        for relaxed in within(_named(items), partial(_without, request, items, searches))
    ]
    everything = _items(request.constraints)
    if not dropped and len(everything) > 1:
        dropped = within(_named(everything), lambda: _fewest_changes(request, everything, searches))
    ranked = sorted(
        [*less_free, *dropped, *hosts],
        key=lambda relaxed: (relaxed.step_s or math.inf, relaxed.flags),
    )
    return Relaxations(
        found=(*ranked, *larger),
        unlimited_s=unlimited.predicted.step_time_s.value if unlimited else None,
        untried=tuple(untried),
    )


def _plan_or_none(searches: _Searches, request: Request) -> Plan | None:
    try:
        return searches.plan(request)
    except OutOfTimeError:
        return None


def _with_unlimited_memory(request: Request) -> Request:
    device = replace(request.cluster.device, memory_bytes=UNLIMITED_BYTES)
    options = replace(request.options, memory_margin=0.0, memory_limit_bytes=None)
    return replace(
        request,
        cluster=replace(request.cluster, device=device),
        constraints=replace(request.constraints, offload=()),
        options=options,
    )


def _relaxation(
    flags: Iterable[str],
    request: Request,
    plan: Plan | None,
    *,
    dropped: Iterable[Item] = (),
    note: str = "",
) -> Relaxation:
    return Relaxation(
        flags=tuple(flags),
        request=request,
        step_s=plan.predicted.step_time_s.value if plan else None,
        proven=plan is not None and plan.search.status is Status.OPTIMAL,
        dropped=tuple(_named([item]) for item in dropped),
        note=note,
    )


# Pins and bans


def _items(pins: Constraints) -> tuple[Item, ...]:
    return (*(name for name in PINS if getattr(pins, name) is not None), *pins.forbid)


def _single_changes(pins: Constraints) -> Iterator[tuple[Item, ...]]:
    """Yields the items to drop together: one pin or ban.

    Of a whole pinned mesh, tp or pp is dropped with the dp that follows from it.
    """
    whole = all(getattr(pins, name) is not None for name in MESH)
    for item in _items(pins):
        if item == "dp" and whole:
            continue
        yield (item, "dp") if whole and item in ("tp", "pp") else (item,)


def _named(items: Sequence[Item]) -> str:
    return " ".join(f"--forbid {item}" if isinstance(item, Ban) else _flag(item) for item in items)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _dropping(pins: Constraints, items: Sequence[Item]) -> Constraints:
    without = dict.fromkeys((item for item in items if isinstance(item, str)), None)
    return replace(pins, **without, forbid=tuple(ban for ban in pins.forbid if ban not in items))  # type: ignore[arg-type]


def _without(request: Request, items: Sequence[Item], searches: _Searches) -> Relaxation | None:
    """The request without some pins and bans; pins are then set to its fastest plan's values."""
    freed = replace(request, constraints=_dropping(request.constraints, items))
    plan = searches.plan(freed)
    if plan is None:
        return None
    names = [item for item in items if isinstance(item, str) and item != RULE]
    used = {name: values_used(plan, name) for name in names}
    values = {name: each for name, each in used.items() if each is not None}
    dropped = [item for item in items if item not in values]
    narrowed = replace(freed, constraints=replace(freed.constraints, **values))  # type: ignore[arg-type]
    confirmed = searches.plan(narrowed) if values else plan
    if confirmed is None:
        return None
    flags = [_setting(name, values[name]) for name in PINS if name in values]
    return _relaxation(flags, narrowed, confirmed, dropped=dropped)


def _fewest_changes(
    request: Request, items: Sequence[Item], searches: _Searches
) -> Relaxation | None:
    """Drops all pins and bans, then puts them back one by one as long as something fits."""
    dropped = list(items)
    if searches.plan(replace(request, constraints=_dropping(request.constraints, dropped))) is None:
        return None
    for item in items:
        fewer = [kept for kept in dropped if kept != item]
        freed = replace(request, constraints=_dropping(request.constraints, fewer))
        if searches.plan(freed) is not None:
            dropped = fewer
    return _without(request, dropped, searches)


def values_used(plan: Plan, name: str) -> tuple[Value, ...] | None:
    """Returns the values that a plan has of a pin, None where it has none."""
    layers = plan.layer_plans.values()
    if name == "zero":
        return tuple(sorted({layer.zero for layer in layers}))
    if name == "recompute":
        graph = build_graph(plan.model, plan.training, 1)
        levels: set[Recompute] = set()
        for layer in (layer for layer in layers if layer.layer is LayerKind.BLOCK):
            block = graph.layer_class(layer.key(graph))
            known = {recompute_operators(block, level): level for level in Recompute}
            if layer.recompute not in known:
                return tuple(Recompute)
            levels.add(known[layer.recompute])
        return tuple(level for level in Recompute if level in levels)
    if name == "sequence_parallel":
        return (any(layer.sequence_parallel for layer in layers),)
    if name == "weights_over_data":
        return (any(layer.divides_over_data for layer in layers),)
    if name == "context_form" and plan.mesh.context_form is None:
        return None
    return (getattr(plan.mesh if name in OF_MESH else plan.pipeline, name),)


def _setting(name: str, values: Sequence[Value]) -> str:
    if name in SWITCHES:
        return _flag(name) if values[0] else _flag(f"no_{name}")
    return f"{_flag(name)} {','.join(map(str, values))}"


# Memory


def _less_free(request: Request, need_bytes: float, searches: _Searches) -> Relaxation | None:
    """The largest margin, or the smallest limit, at which something fits the device."""
    capacity = request.cluster.device.memory_bytes
    for flag, options in _memory_options(request.options, need_bytes, capacity):
        relaxed = replace(request, options=options)
        plan = searches.plan(relaxed)
        if plan:
            kept = 1 - limit_bytes(request.cluster, request.training.stack, options) / capacity
            measured = default_margin(family_of(request.training.stack)).share
            note = f"below the {measured:g} that measured runs ask for" if kept < measured else ""
            return _relaxation([flag], relaxed, plan, note=note)
    return None


def _memory_options(
    options: SearchOptions, need_bytes: float, capacity: int
) -> Iterator[tuple[str, SearchOptions]]:
    """Yields options with their flags, in steps from the need of the leanest plan."""
    for step in range(MOST_STEPS):
        if options.memory_limit_bytes is not None:
            limit_gib = round(
                (math.ceil(gib(need_bytes) / LIMIT_STEP_GIB) + step) * LIMIT_STEP_GIB, 3
            )
            if limit_gib * GIB <= capacity:
                yield (
                    f"--memory-limit {limit_gib:g}GiB",
                    replace(options, memory_limit_bytes=round(limit_gib * GIB)),
                )
            continue
        margin = round(
            (math.floor((1 - need_bytes / capacity) / MARGIN_STEP) - step) * MARGIN_STEP, 6
        )
        if margin >= 0:
            yield f"--memory-margin {margin:g}", replace(options, memory_margin=margin)


# The host


def _more_host(request: Request, host_bytes: int, searches: _Searches) -> Relaxation | None:
    """Hosts as large as the devices need, and a little more for exact schedules of chunks."""
    for step in range(MOST_STEPS):
        size_gib = math.ceil(host_bytes / GIB) + step
        cluster = replace(request.cluster, host_memory_bytes=size_gib * GIB)
        larger = replace(request, cluster=cluster)
        plan = searches.plan(larger)
        if plan:
            return _relaxation([f"--host-memory {size_gib}GiB"], larger, plan)
    return None


# GPUs


def _more_gpus(request: Request, num_gpus: int, searches: _Searches) -> Relaxation | None:
    """A larger cluster on which something fits.

    Pinned pp and dp become those of its plan where they belong to the old number of GPUs.
    """
    nodes = num_gpus // request.cluster.gpus_per_node
    larger = replace(request, cluster=replace(request.cluster, nodes=nodes))
    flags = [f"--gpus {num_gpus}", *_node_flag(request.cluster)]
    freed = tuple(name for name in ("pp", "dp") if getattr(request.constraints, name) is not None)
    try:
        plan = searches.plan(larger)
        if plan:
            return _relaxation(flags, larger, plan)
        relaxation = _without(larger, freed, searches)
    except OutOfTimeError:
        larger = replace(larger, constraints=_dropping(request.constraints, freed))
        return _relaxation(flags, larger, None, note=f"without {_named(freed)}" if freed else "")
    return relaxation and replace(relaxation, flags=(*flags, *relaxation.flags))


def _node_flag(cluster: Cluster) -> list[str]:
    """Returns `--gpus-per-node` where --gpus alone would make nodes of another size.

    That is so when the request has fewer GPUs than a usual node.
    """
    name = cluster.device.name
    usual = load_cluster(name).gpus_per_node if name in cluster_names() else cluster.gpus_per_node
    return [] if usual == cluster.gpus_per_node else [f"--gpus-per-node {cluster.gpus_per_node}"]
