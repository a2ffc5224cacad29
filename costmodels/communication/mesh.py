"""The device mesh: degrees of the parallel axes, and the nodes of their ranks (EQUATIONS C6)."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from parplan.costmodels.keyed_cache import HashedOnce
from parplan.profiles.documents.ranges import DEVICES
from parplan.profiles.elementwise import Number
from parplan.profiles.errors import ConfigError, coerce_choice
from parplan.profiles.models.spec import ModelSpec
from parplan.profiles.stack import ContextForm

_FORBID = {"extra": "forbid"}


class Axis(StrEnum):
    """Parallel axes."""

    PP = "pp"
    DP = "dp"
    CP = "cp"
    TP = "tp"


class MeshOrder(StrEnum):
    """Parallel axes in rank order, outermost first.

    Tensor-parallel ranks are always neighbours. Context parallelism, which is not named, is next
    to them, between dp and tp. With `dp-pp-tp` the stages of a pipeline come before the copies of
    the model: messages between stages stay inside a node where pp x tp fits one, and data-parallel
    groups span more nodes.
    """

    PP_DP_TP = "pp-dp-tp"
    DP_PP_TP = "dp-pp-tp"

    def inside(self, axis: Axis) -> tuple[Axis, ...]:
        """Returns the axes whose ranks are nearer to one another than those of `axis`."""
        return _INSIDE[self][axis]


_INSIDE = {
    MeshOrder.PP_DP_TP: {
        Axis.PP: (Axis.DP, Axis.CP, Axis.TP),
        Axis.DP: (Axis.CP, Axis.TP),
        Axis.CP: (Axis.TP,),
        Axis.TP: (),
    },
    MeshOrder.DP_PP_TP: {
        Axis.DP: (Axis.PP, Axis.CP, Axis.TP),
        Axis.PP: (Axis.CP, Axis.TP),
        Axis.CP: (Axis.TP,),
        Axis.TP: (),
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh(HashedOnce):
    """Degrees of the parallel axes.

    order: axes in rank order: of pp-dp-tp, rank = ((pp_rank * dp + dp_rank) * cp + cp_rank) * tp
        + tp_rank
    cp: number of ranks over which every sequence is divided
    context_form: the way in which their attention reads the whole sequence, None for cp 1
    ep, etp: the experts of a block are divided over ep x etp of the dp x cp x tp ranks of a stage,
        which are neighbours: over ep ranks by whole experts, and each expert over etp ranks, which
        divide tp: 1 or tp where plans are searched or run. The other ranks hold copies
    tp_rows: rows of the grid of tensor-parallel ranks that divides products in two dims (EQUATIONS
        T7), whose columns are neighbours; 1 where they are one row, as in Megatron
    """

    __pydantic_config__ = _FORBID
    __hash__ = HashedOnce.__hash__

    pp: int
    dp: int
    cp: int = 1
    tp: int
    ep: int = 1
    etp: int = 1
    order: MeshOrder = MeshOrder.PP_DP_TP
    context_form: ContextForm | None = None
    tp_rows: int = 1

    def __post_init__(self) -> None:
        coerce_choice(self, "order", MeshOrder, where="mesh")
        if self.context_form is not None:
            coerce_choice(self, "context_form", ContextForm, where="mesh")
        if (self.context_form is None) != (self.cp == 1):
            raise ConfigError(
                f"mesh: context_form is {self.context_form} with cp {self.cp}",
                hint="give it where cp is more than 1, and only there",
            )
        for axis in Axis:
            if self.degree(axis) not in DEVICES:
                raise ConfigError(f"mesh: {axis} is {self.degree(axis)}, it must be {DEVICES}")
        if self.etp < 1 or self.tp % self.etp:
            raise ConfigError(
                f"mesh: etp is {self.etp}, it must divide tp {self.tp}",
                hint="an expert is whole, or tensor-parallel ranks divide it",
            )
        self._require_grid()
        ranks = self.ranks_per_stage
        if self.ep < 1 or ranks % (self.ep * self.etp):
            divided = f"ep {self.ep}" + (f" x etp {self.etp}" if self.etp > 1 else "")
            raise ConfigError(
                f"mesh: {divided} does not divide the {ranks} ranks of a stage, "
                "over which the experts are divided",
                hint=f"use a divisor of {ranks // self.etp}",
            )
        if (self.ep > 1 or self.cp > 1) and self.order is not MeshOrder.PP_DP_TP:
            name, degree = ("ep", self.ep) if self.ep > 1 else ("cp", self.cp)
            raise ConfigError(
                f"mesh: the order is {self.order} with {name} {degree}, whose ranks are neighbours",
                hint=f"use the order {MeshOrder.PP_DP_TP}, or {name} 1",
            )

    def _require_grid(self) -> None:
        if self.tp_rows == 1:
            return
        if self.tp_rows < 1 or self.tp % self.tp_rows or self.tp_rows == self.tp:
            raise ConfigError(
                f"mesh: tp_rows is {self.tp_rows}, it must divide tp {self.tp} into rows of two "
                "ranks or more",
                hint="use 2 for tp 4, or 1 for one row",
            )
        if self.cp > 1 or self.ep * self.etp > 1:
            raise ConfigError(
                f"mesh: tp_rows is {self.tp_rows} with cp {self.cp}, ep {self.ep} and etp "
                f"{self.etp}; 2-D tensor parallelism divides dense models with whole sequences",
                hint="use tp_rows 1, or cp, ep and etp 1",
            )

    def __str__(self) -> str:
        context = f" x cp {self.cp} ({self.context_form})" if self.cp > 1 else ""
        experts = f" (ep {self.ep})" if self.ep > 1 else ""
        if self.etp > 1:
            experts = f" (ep {self.ep} x etp {self.etp})"
        order = "" if self.order is MeshOrder.PP_DP_TP else f" in order {self.order}"
        grid = f" ({self.tp_rows} x {self.tp_columns})" if self.tp_rows > 1 else ""
        return f"pp {self.pp} x dp {self.dp}{context} x tp {self.tp}{grid}{experts}{order}"

    @property
    def tp_columns(self) -> int:
        """The columns of the grid of tensor-parallel ranks, all of them where there is one row."""
        return self.tp // self.tp_rows

    @property
    def replicas(self) -> int:
        """The ranks of a stage that hold the same part of parameters that no expert has.

        They are the data-parallel and the context-parallel ranks: gradients are reduced over them,
        and ZeRO divides states over them.
        """
        return self.dp * self.cp

    @property
    def replica_stride(self) -> int:
        """Distance in ranks between neighbours among the replicas."""
        return self.stride(Axis.CP if self.cp > 1 else Axis.DP)

    @property
    def ranks_per_stage(self) -> int:
        """The devices that share one pipeline stage."""
        return self.replicas * self.tp

    @property
    def expert_replicas(self) -> int:
        """The ranks of a stage that hold the same part of the same experts."""
        return self.ranks_per_stage // (self.ep * self.etp)

    @property
    def num_ranks(self) -> int:
        return self.pp * self.ranks_per_stage

    def degree(self, axis: Axis) -> int:
        degree: int = getattr(self, axis)  # an axis is the name of its degree
        return degree

    def stride(self, axis: Axis) -> int:
        """Distance in ranks between neighbours along `axis`."""
        return math.prod([self.degree(inner) for inner in self.order.inside(axis)])

    def rank(self, pp: int = 0, dp: int = 0, tp: int = 0, cp: int = 0) -> int:
        """Returns the rank at these coordinates."""
        places = ((Axis.PP, pp), (Axis.DP, dp), (Axis.CP, cp), (Axis.TP, tp))
        return sum(at * self.stride(axis) for axis, at in places)

    def coordinates(self, rank: int) -> tuple[int, int, int, int]:
        """Returns the coordinates (pp, dp, cp, tp) of a rank."""
        pp, dp, cp, tp = (rank // self.stride(axis) % self.degree(axis) for axis in Axis)
        return pp, dp, cp, tp


@functools.lru_cache(maxsize=4096)
def mesh_without_experts(mesh: Mesh) -> Mesh:
    """Returns the mesh of layers that have no experts."""
    return replace(mesh, ep=1, etp=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The placement of one group of an axis: `ranks_per_node` ranks on each of `nodes` nodes.

    `groups_per_node` is the number of groups of the same axis that cross a node's boundary at once
    and share its NICs. `stride` is the distance in ranks between neighbours of the group, None for
    the nearest; it tells which units of a network's tiers the group spans, and placements that
    differ in it alone are equal.
    """

    nodes: int
    ranks_per_node: int
    groups_per_node: int
    stride: int | None = field(default=None, compare=False)

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def crosses_nodes(self) -> bool:
        return self.nodes > 1

    @property
    def distance(self) -> int:
        """Distance in ranks between neighbours of the group."""
        return self.groups_per_node if self.stride is None else self.stride

    def ranks_within(self, gpus: int) -> int:
        """Returns the number of the group's ranks among `gpus` neighbouring GPUs."""
        return _ranks_within(self.num_ranks, self.distance, gpus)


def place(mesh: Mesh, axis: Axis, gpus_per_node: int) -> Placement:
    """Returns the placement of `axis` when ranks fill the nodes in order."""
    return place_axis(mesh.degree(axis), mesh.stride(axis), mesh.num_ranks, gpus_per_node)


def crosses_nodes(mesh: Mesh, here: Number, there: Number, gpus_per_node: int) -> Number:
    """Returns whether a message between two pipeline ranks leaves a node in some copy of them.

    The pipeline ranks may be arrays.
    """
    stride = mesh.stride(Axis.PP)
    starts: tuple[int, ...] = (0,)
    if mesh.order is MeshOrder.DP_PP_TP:
        between = mesh.stride(Axis.DP)
        period = gpus_per_node // math.gcd(between, gpus_per_node)
        starts = tuple(copy * between % gpus_per_node for copy in range(min(mesh.dp, period)))
    crosses = [
        (start + here * stride) // gpus_per_node != (start + there * stride) // gpus_per_node
        for start in starts
    ]
    return functools.reduce(operator.or_, crosses)


def units_crossed(mesh: Mesh, here: Number, there: Number, unit_gpus: tuple[int, ...]) -> Number:
    """Returns how many levels a message between pipeline ranks leaves in some copy (EQUATIONS C9).

    It is 0 inside a node, 1 between nodes, and one more for each tier of which it leaves a unit.

    unit_gpus: number of GPUs of a node, and of a unit of each tier
    """
    return functools.reduce(
        operator.add, [1 * crosses_nodes(mesh, here, there, gpus) for gpus in unit_gpus]
    )


def where_axes_lie(mesh: Mesh, unit_gpus: tuple[int, ...]) -> Hashable:
    """Returns all that prices know of the order of a mesh: equal for orders that cost the same."""
    here = np.arange(mesh.pp)
    copies = place_copies(mesh, mesh.replicas, unit_gpus[0])
    crossed = np.asarray(units_crossed(mesh, here, (here + 1) % mesh.pp, unit_gpus))
    stride = mesh.stride(Axis.PP)
    return (
        copies,
        tuple(copies.ranks_within(gpus) for gpus in unit_gpus[1:]),
        crossed.tobytes(),
        tuple(min(stride, gpus) for gpus in unit_gpus) if crossed.any() else 0,
    )


def distinct_orders(
    mesh: Mesh, orders: Iterable[MeshOrder], unit_gpus: tuple[int, ...]
) -> tuple[Mesh, ...]:
    """Returns a mesh in each of the orders, of those that cost the same only the first.

    Ranks that divide experts or sequences are neighbours, which pp-dp-tp alone has.

    unit_gpus: number of GPUs of a node, and of a unit of each tier of the network
    """
    if mesh.ep > 1 or mesh.cp > 1:
        return (mesh,)
    meshes: dict[Hashable, Mesh] = {}
    for order in orders:
        ordered = replace(mesh, order=order)
        meshes.setdefault(where_axes_lie(ordered, unit_gpus), ordered)
    return tuple(meshes.values())


def place_copies(
    mesh: Mesh, ranks: int, gpus_per_node: int, *, of_experts: bool = False, apart: int = 1
) -> Placement:
    """The placement of `ranks` of those of a stage that hold the same part of a parameter.

    They are every `apart`-th of them.
    """
    stride = mesh.ep * mesh.etp if of_experts else mesh.replica_stride
    return place_axis(ranks, stride * apart, mesh.num_ranks, gpus_per_node)


def place_axis(degree: int, stride: int, num_ranks: int, gpus_per_node: int) -> Placement:
    """The placement of an axis of `degree` ranks at a distance of `stride` ranks.

    It puts min(degree, max(1, gpus_per_node / stride)) ranks of a group on a node; the node's other
    ranks belong to other groups of the axis. Degrees that do not divide a node are rounded to the
    widest spread.
    """
    local = min(gpus_per_node, num_ranks)
    ranks_per_node = _ranks_within(degree, stride, local)
    nodes = degree // ranks_per_node
    return Placement(
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        groups_per_node=max(1, local // ranks_per_node) if nodes > 1 else 1,
        stride=stride,
    )


def _ranks_within(degree: int, stride: int, gpus: int) -> int:
    """Returns the number of an axis's ranks at a distance of `stride` among `gpus` neighbours."""
    return math.gcd(degree, max(1, gpus // stride)) if stride < gpus else 1


def illegal_expert_parallel(mesh: Mesh, model: ModelSpec) -> str | None:
    """Returns why the experts of this model cannot be divided as the mesh says, or None."""
    if not model.num_experts:
        for axis, degree in (("ep", mesh.ep), ("etp", mesh.etp)):
            if degree > 1:
                return f"{axis} {degree} divides experts, {model.name} has none"
        return None
    if mesh.etp not in (1, mesh.tp):
        return f"etp {mesh.etp} is neither 1 nor tp {mesh.tp}: plans have one tensor-parallel group"
    if model.num_experts % mesh.ep:
        return f"ep {mesh.ep} does not divide the {model.num_experts} experts"
    if model.expert_ffn_hidden_size % mesh.etp:
        return f"etp {mesh.etp} does not divide the experts' width {model.expert_ffn_hidden_size}"
    return None
