"""The meshes of a number of GPUs: the degrees of all axes, each illegal one with its reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from math import gcd

from parplan.costmodels.communication.mesh import (
    Mesh,
    MeshOrder,
    distinct_orders,
    illegal_expert_parallel,
)
from parplan.costmodels.layers.context_parallel import illegal_context
from parplan.planner.request import Constraints, Request
from parplan.profiles.divisors import divisors
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.models.spec import ModelSpec
from parplan.profiles.stack import ContextForm, Stack

# Sequences are divided over ranks, unless pinned, from so many tokens on, or where there are more
# GPUs than sequences.
LONG_SEQUENCE = 16384
OUTSIDE_PINS = "excluded by"  # the start of a reason that a pin or a ban gives
# degrees of a mesh whose pins give one reason
_PINNED_TOGETHER = (("pp", "dp", "cp", "tp"), ("ep",), ("etp",), ("context_form",), ("tp_rows",))


@dataclass(frozen=True, slots=True)
class Pruned:
    """A candidate, or a family of them, that is not searched, with the reason.

    candidate    the text of the first of the family
    count        the number of candidates of the family
    """

    candidate: str
    reason: str
    count: int = 1


class PrunedFamilies:
    """The candidates of a mesh that are not searched: a family for each reason."""

    def __init__(self) -> None:
        self._first: dict[str, str] = {}
        self._counts: Counter[str] = Counter()

    def add(self, reason: str, text: Callable[[], str], count: int = 1) -> None:
        """Counts candidates; the text of the first is asked for where it begins a family."""
        if reason not in self._first:
            self._first[reason] = text()
        self._counts[reason] += count

    def __iter__(self) -> Iterator[Pruned]:
        for reason, text in self._first.items():
            yield Pruned(text, reason, self._counts[reason])


def illegal_tensor_parallel(
    tp: int, model: ModelSpec, cluster: Cluster, *, across_nodes: bool, rows: int = 1
) -> str | None:
    """Returns why `tp` cannot shard this model on this cluster, or None.

    rows    those of a grid, whose columns alone divide these sizes
    """
    columns = tp // rows
    for name, size in model.tensor_parallel_sizes:
        if size % columns:
            of_grid = f" in {rows} rows" if rows > 1 else ""
            return f"tp {tp}{of_grid} does not divide the {size} {name}"
    if not across_nodes and (tp > cluster.gpus_per_node or cluster.gpus_per_node % tp):
        return (
            f"tp {tp} does not fit inside a node of {cluster.gpus_per_node} GPUs "
            "(--tp-across-nodes allows it)"
        )
    return None


def expert_divisions(
    ranks: int, tp: int, model: ModelSpec, stack: Stack
) -> Iterator[tuple[int, int]]:
    """Yields the degrees (ep, etp) of the `ranks` of a stage, 1 and 1 for a dense model.

    Each expert is whole, or divided over the tp ranks where the stack runs it.
    """
    if not model.num_experts:
        yield 1, 1
        return
    for etp in (1, tp) if tp > 1 and stack.divides_experts else (1,):
        for ep in divisors(gcd(ranks // etp, model.num_experts)):
            yield ep, etp


def context_degrees(ranks: int, request: Request) -> tuple[int, ...]:
    """Returns the degrees of context parallelism that are tried on `ranks` GPUs, ascending."""
    training, pins = request.training, request.constraints
    searched = training.stack.context_forms and (
        training.seq_length >= LONG_SEQUENCE
        or training.global_batch_size < request.cluster.num_gpus
    )
    if pins.cp is None and not searched:
        return (1,)
    return tuple(cp for cp in divisors(ranks) if cp == 1 or training.seq_length % (2 * cp) == 0)


def meshes(request: Request) -> Iterator[Mesh | Pruned]:
    """Yields the meshes that the pins leave, and a Pruned entry for each other."""
    model, cluster = request.model, request.cluster
    pins, stack = request.constraints, request.training.stack
    orders = pins.mesh_order or tuple(map(MeshOrder, stack.mesh_orders))
    for plain in _plain_meshes(request):
        excluded = (
            excluded_mesh(plain, pins, model.num_blocks, "layers")
            or illegal_tensor_parallel(
                plain.tp, model, cluster, across_nodes=pins.tp_across_nodes, rows=plain.tp_rows
            )
            or illegal_expert_parallel(plain, model)
            or illegal_context(plain, model, cluster)
            or _not_alone(plain, stack)
        )
        if excluded:
            yield Pruned(str(plain), excluded)
            continue
        for mesh in distinct_orders(plain, orders, cluster.unit_gpus):
            excluded = excluded_order(mesh, pins)
            yield Pruned(str(mesh), excluded) if excluded else mesh


def _plain_meshes(request: Request) -> Iterator[Mesh]:
    """Yields the meshes of all GPUs in the order of ranks pp-dp-tp."""
    gpus = request.cluster.num_gpus
    model, stack = request.model, request.training.stack
    for tp in divisors(gpus):
        for pp in divisors(gpus // tp):
            ranks = gpus // tp // pp
            for cp, form in _contexts(ranks, request):
                for ep, etp in expert_divisions(ranks * tp, tp, model, stack):
                    plain = Mesh(
                        pp=pp, dp=ranks // cp, cp=cp, tp=tp, ep=ep, etp=etp, context_form=form
                    )
                    yield plain
                    if cp == ep * etp == 1:
                        yield from (replace(plain, tp_rows=rows) for rows in _rows(tp, request))


def _rows(tp: int, request: Request) -> Iterator[int]:
    """Yields the numbers of rows of a grid of tensor-parallel ranks that are tried, beside one."""
    if request.constraints.tp_rows:
        yield from (rows for rows in divisors(tp) if 1 < rows < tp)


def _not_alone(mesh: Mesh, stack: Stack) -> str | None:
    """Returns why the stack does not run context parallelism beside the other axes, or None."""
    if stack.context_alone and mesh.cp > 1 and mesh.tp * mesh.pp > 1:
        return f"the stack {stack.name} runs cp {mesh.cp} only with tp 1 and pp 1"
    return None


def _contexts(ranks: int, request: Request) -> Iterator[tuple[int, ContextForm | None]]:
    """Yields the degrees of context parallelism, each in the forms that the stack runs."""
    forms = tuple(map(ContextForm, request.training.stack.context_forms))
    for cp in context_degrees(ranks, request):
        if cp == 1:
            yield cp, None
            continue
        yield from ((cp, form) for form in request.constraints.context_form or forms)


def allowed(pinned: Collection[object] | None, value: object) -> bool:
    """Returns True if a pin has the value, or leaves the choice open."""
    return pinned is None or value in pinned


def excluded_mesh(mesh: Mesh, pins: Constraints, num_layers: int, what: str) -> str | None:
    """Returns the pin that excludes a mesh, or that it has more stages than layers, or None.

    what    the layers in words
    """
    for names in _PINNED_TOGETHER:
        if not pins.forbid and all(getattr(pins, name) is None for name in names):
            continue
        values = {name: getattr(mesh, name) for name in names}
        ban = pins.ban(**{name: value for name, value in values.items() if value is not None})
        if ban:
            return f"excluded by --forbid {ban}"
        left_out = [name for name in names if not allowed(getattr(pins, name), values[name])]
        if left_out and (mesh.cp > 1 or left_out != ["context_form"]):
            flags = " or ".join(f"--{name.replace('_', '-')}" for name in left_out)
            return f"{OUTSIDE_PINS} {flags}"
    if mesh.pp > num_layers:
        return f"pp {mesh.pp} is more than the {num_layers} {what}"
    return None


def excluded_order(mesh: Mesh, pins: Constraints) -> str | None:
    """Returns the pin that excludes the order of the axes of a mesh, or None."""
    ban = pins.ban(mesh_order=mesh.order)
    if ban:
        return f"excluded by --forbid {ban}"
    return None if allowed(pins.mesh_order, mesh.order) else f"{OUTSIDE_PINS} --mesh-order"
