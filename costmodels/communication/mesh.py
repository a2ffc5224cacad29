"""The device mesh: degrees of the parallel axes, and the nodes of their ranks (EQUATIONS C6)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from parplan.profiles.documents.ranges import DEVICES
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.spec import ModelSpec

_FORBID = {"extra": "forbid"}


class Axis(StrEnum):
    """Parallel axes in rank order, outermost first: tp ranks are neighbours."""

    PP = "pp"
    DP = "dp"
    TP = "tp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Degrees of pipeline, data and tensor parallelism.

    rank = (pp_rank * dp + dp_rank) * tp + tp_rank.

    ep: number of neighbouring dp ranks over which the experts of a block are divided; dp / ep ranks
    hold the same experts
    """

    __pydantic_config__ = _FORBID

    pp: int
    dp: int
    tp: int
    ep: int = 1

    def __post_init__(self) -> None:
        for axis in Axis:
            if self.degree(axis) not in DEVICES:
                raise ConfigError(f"mesh: {axis} is {self.degree(axis)}, it must be {DEVICES}")
        if self.ep < 1 or self.dp % self.ep:
            raise ConfigError(
                f"mesh: ep {self.ep} does not divide dp {self.dp}, "
                "over whose ranks the experts are divided",
                hint=f"use a divisor of {self.dp}",
            )

    def __str__(self) -> str:
        experts = f" (ep {self.ep})" if self.ep > 1 else ""
        return f"pp {self.pp} x dp {self.dp} x tp {self.tp}{experts}"

    @property
    def ranks_per_stage(self) -> int:
        """The devices that share one pipeline stage."""
        return self.dp * self.tp

    @property
    def expert_dp(self) -> int:
        """The data-parallel ranks that hold the same experts."""
        return self.dp // self.ep

    @property
    def num_ranks(self) -> int:
        return self.pp * self.ranks_per_stage

    def degree(self, axis: Axis) -> int:
        degree: int = getattr(self, axis.value)
        return degree

    def stride(self, axis: Axis) -> int:
        """Distance in ranks between neighbours along `axis`."""
        return {Axis.PP: self.ranks_per_stage, Axis.DP: self.tp, Axis.TP: 1}[axis]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The placement of one group of an axis: `ranks_per_node` ranks on each of `nodes` nodes.

    `groups_per_node` is the number of groups of the same axis that cross a node's boundary at once
    and share its NICs.
    """

    nodes: int
    ranks_per_node: int
    groups_per_node: int

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def crosses_nodes(self) -> bool:
        return self.nodes > 1


def place(mesh: Mesh, axis: Axis, gpus_per_node: int) -> Placement:
    """Returns the placement of `axis` when ranks fill the nodes in order."""
    return place_axis(mesh.degree(axis), mesh.stride(axis), mesh.num_ranks, gpus_per_node)


def place_expert_copies(mesh: Mesh, gpus_per_node: int) -> Placement:
    """The placement of the data-parallel ranks that hold the same experts: every ep-th rank."""
    return place_axis(mesh.expert_dp, mesh.ep * mesh.stride(Axis.DP), mesh.num_ranks, gpus_per_node)


def place_axis(degree: int, stride: int, num_ranks: int, gpus_per_node: int) -> Placement:
    """The placement of an axis of `degree` ranks at a distance of `stride` ranks.

    It puts min(degree, max(1, gpus_per_node / stride)) ranks of a group on a node; the node's other
    ranks belong to other groups of the axis. Degrees that do not divide a node are rounded to the
    widest spread.
    """
    local = min(gpus_per_node, num_ranks)
    ranks_per_node = math.gcd(degree, max(1, local // stride)) if stride < local else 1
    nodes = degree // ranks_per_node
    return Placement(
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        groups_per_node=max(1, local // ranks_per_node) if nodes > 1 else 1,
    )


def illegal_expert_parallel(mesh: Mesh, model: ModelSpec) -> str | None:
    """Returns why the experts of this model cannot be divided over the `ep` of a mesh, or None."""
    if mesh.ep > 1 and not model.num_experts:
        return f"ep {mesh.ep} divides experts, {model.name} has none"
    if model.num_experts % mesh.ep:
        return f"ep {mesh.ep} does not divide the {model.num_experts} experts"
    return None
