"""The device and the meshes of one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parplan.costmodels.communication.mesh import Axis, Mesh
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.layers.context_parallel import ranks_with_heads
from parplan.executor.context.context_attention import Context
from parplan.executor.models.expert_exchange import COPIES, EP, ETP, ExpertRanks
from parplan.executor.placed_layers import (
    PlacedLayer,
    effective_zero,
    expert_shards,
    zero_ranks,
)
from parplan.executor.sharding.summa import COLUMNS, ROWS, Grid
from parplan.executor.sharding.zero_units import Unit, shard_unit
from parplan.planner.plan.plan import Plan


def rank_mesh(mesh: Mesh, device: torch.device) -> DeviceMesh:
    """Returns all ranks by axis, in the order of the mesh. Collective.

    Its axis dp has all replicas: context-parallel ranks are neighbours in it, since they hold
    states and reduce gradients as data-parallel ranks do.
    """
    names = tuple(mesh.order.split("-"))
    degrees = {Axis.PP: mesh.pp, Axis.DP: mesh.replicas, Axis.TP: mesh.tp}
    return init_device_mesh(
        device.type, tuple(degrees[Axis(name)] for name in names), mesh_dim_names=names
    )


def rank_grid(mesh: Mesh, ranks: DeviceMesh) -> Grid | None:
    """Returns the tensor-parallel ranks as rows and columns, None where there is one row.

    `ranks` are those of `rank_mesh`. Collective.
    """
    if mesh.tp_rows == 1:
        return None
    ranks = ranks._unflatten("tp", (mesh.tp_rows, mesh.tp_columns), (ROWS, COLUMNS))
    return Grid(ranks[ROWS, COLUMNS])


def rank_context(plan: Plan) -> Context | None:
    """Returns this rank among those that divide its sequences, None where they are whole.

    Its groups are its own, so that no gradient waits for keys and values. Collective.
    """
    mesh, form = plan.mesh, plan.mesh.context_form
    if form is None:
        return None
    cp = mesh.cp
    near = ranks_with_heads(form, cp, mesh.tp, plan.model.num_heads, plan.cluster.gpus_per_node)
    assert near is not None, "a rule refuses ranks that cannot divide the heads"
    neighbours = [range(first, first + near) for first in range(0, cp, near)]
    rings = [range(first, cp, near) for first in range(near)]
    return Context(
        rank=mesh.coordinates(dist.get_rank())[2],
        ranks=cp,
        form=form,
        heads=_group_of(mesh, neighbours) if near > 1 else None,
        around=_group_of(mesh, rings) if near < cp else None,
    )


def _group_of(mesh: Mesh, parts: Sequence[range]) -> dist.ProcessGroup:
    """Returns this rank's group, where the context-parallel ranks are divided into `parts`."""
    others = product(range(mesh.pp), range(mesh.dp), range(mesh.tp))
    groups = [
        [mesh.rank(pp=pp, dp=dp, cp=cp, tp=tp) for cp in part]
        for pp, dp, tp in others
        for part in parts
    ]
    group, _ = dist.new_subgroups_by_enumeration(groups)
    return group


def stage_mesh(mesh: Mesh, device: torch.device, **degrees: int) -> DeviceMesh:
    """Returns all ranks by pp and by the axes of `degrees`, outermost first.

    These axes divide the ranks of a stage anew, which are in the order of dp, cp and tp.
    Collective.
    """
    inside = tuple(product(range(mesh.dp), range(mesh.cp), range(mesh.tp)))
    ranks = [
        mesh.rank(pp=pp, dp=dp, cp=cp, tp=tp) for pp in range(mesh.pp) for dp, cp, tp in inside
    ]
    shape = (mesh.pp, *degrees.values())
    return DeviceMesh(device.type, torch.tensor(ranks).view(shape), mesh_dim_names=("pp", *degrees))


def expert_mesh(plan: Plan, device: torch.device) -> DeviceMesh | None:
    """Returns all ranks as those of experts, None where a replica has all experts on one rank.

    Whole experts in chunks are owned as all else there. Collective.
    """
    mesh = plan.mesh
    alike = mesh.ep == mesh.tp == 1
    in_chunks = plan.chunks is not None and mesh.ep == mesh.etp == 1
    if not plan.model.num_experts or alike or in_chunks:
        return None
    degrees = {COPIES: mesh.expert_replicas, EP: mesh.ep, ETP: mesh.etp}
    return stage_mesh(mesh, device, **degrees)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """The device and the meshes of this process.

    mesh             all ranks by pp, dp and tp, where dp has the context-parallel ranks too
    sharded          number of ranks that hold one copy of the states -> dp as (copies, shards)
    expert_mesh      all ranks by pp, copies, ep and etp, where experts have other copies than other
                     parameters
    expert_sharded   number of ranks that hold one copy of the experts' states -> copies as (copies
                     of shards, shards)
    data_mesh        all ranks with dp as (copies, data) of one copy, where blocks divide weights
                     over data-parallel ranks
    context          this rank among those that divide its sequences, None where they are whole
    grid             the tensor-parallel ranks where they are a grid, None where they are one row
    """

    device: torch.device
    mesh: DeviceMesh
    sharded: Mapping[int, DeviceMesh] = field(default_factory=dict)
    expert_mesh: DeviceMesh | None = None
    expert_sharded: Mapping[int, DeviceMesh] = field(default_factory=dict)
    data_mesh: DeviceMesh | None = None
    context: Context | None = None
    grid: Grid | None = None

    def coordinate(self, axis: str) -> int:
        return int(self.mesh.get_local_rank(axis))

    @property
    def tp_mesh(self) -> DeviceMesh | None:
        """The tensor-parallel ranks as one row; None for one rank, and for a grid."""
        return self.mesh["tp"] if self.grid is None and self.mesh["tp"].size() > 1 else None

    @property
    def summed_mesh(self) -> DeviceMesh | None:
        """The ranks that have summands of the gradient of a parameter that they share."""
        return self.tp_mesh if self.grid is None else self.grid.mesh[ROWS]

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        return (
            *self.mesh.get_all_groups(),
            *(self.expert_mesh.get_all_groups() if self.expert_mesh is not None else ()),
            *(self.data_mesh.get_all_groups() if self.data_mesh is not None else ()),
            *(self.context.groups if self.context is not None else ()),
            *(self.grid.mesh.get_all_groups() if self.grid is not None else ()),
        )

    @property
    def expert_ranks(self) -> ExpertRanks | None:
        """This rank among those that divide experts, or have copies of them."""
        return ExpertRanks(mesh=self.expert_mesh) if self.expert_mesh is not None else None

    @property
    def both_mesh(self) -> DeviceMesh | None:
        """The data-parallel and tensor-parallel ranks that divide weights of blocks together."""
        return self.data_mesh["data", "tp"] if self.data_mesh is not None else None

    @property
    def dp_mesh(self) -> DeviceMesh:
        return self.mesh["dp"]

    def shard_mesh(self, num_ranks: int) -> DeviceMesh:
        """Returns the `num_ranks` data-parallel ranks that hold one copy of the states together."""
        return self.sharded[num_ranks]["shards"] if num_ranks in self.sharded else self.dp_mesh

    def unit(
        self,
        plan: Plan,
        placed: PlacedLayer,
        layers: tuple[nn.Module, ...],
        apart: tuple[nn.Module, ...] = (),
        zero: int | None = None,
        *,
        casts_inputs: bool = True,
        offloaded: bool | None = None,
    ) -> Unit:
        """Returns the sharded unit of a layer, of two tied layers, or of operators of a layer.

        zero       its ZeRO stage, None for that of the layer
        offloaded  whether the host holds its states, None for as the layer says
        """
        zero = effective_zero(placed, plan.mesh) if zero is None else zero
        num_shards = zero_ranks(placed, plan.mesh)
        unit = Unit(
            layers=layers,
            zero=zero,
            mesh=self.shard_mesh(num_shards) if zero else self.dp_mesh,
            apart=apart,
            copies=self.copies_mesh(num_shards) if zero else None,
            offloaded=Offload.STATES in placed.plan.offload if offloaded is None else offloaded,
            casts_inputs=casts_inputs,
            fine_tuned=plan.training.fine_tuning is not None,
        )
        shard_unit(unit, plan.training)
        return unit

    def expert_unit(self, plan: Plan, placed: PlacedLayer, experts: nn.Module) -> Unit:
        """Returns the sharded unit of the experts of a layer, over the ranks with copies of them.

        A replica must have them on several ranks.
        """
        assert self.expert_mesh is not None, "the experts are a part of their layer"
        shards = expert_shards(zero_ranks(placed, plan.mesh), plan.mesh)
        zero = placed.plan.zero if shards > 1 else 0
        divided = self.expert_sharded.get(shards) if zero else None
        unit = Unit(
            layers=(experts,),
            zero=zero,
            mesh=self.expert_mesh[COPIES] if divided is None else divided["shards"],
            copies=None if divided is None else divided["apart"],
            offloaded=Offload.STATES in placed.plan.offload,
            fine_tuned=plan.training.fine_tuning is not None,
        )
        shard_unit(unit, plan.training)
        return unit

    def copies_mesh(self, num_ranks: int) -> DeviceMesh | None:
        """Returns the ranks that hold this shard in each copy, if there are several copies."""
        return self.sharded[num_ranks]["copies"] if num_ranks in self.sharded else None
