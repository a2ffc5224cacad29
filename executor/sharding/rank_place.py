"""The device and the meshes of one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parplan.costmodels.communication.mesh import Axis, Mesh
from parplan.costmodels.host.offload import Offload
from parplan.executor.placed_layers import PlacedLayer, effective_zero, zero_ranks
from parplan.executor.sharding.zero_units import Unit, shard_unit
from parplan.planner.plan.plan import Plan


def rank_mesh(mesh: Mesh, device: torch.device) -> DeviceMesh:
    """Returns all ranks by axis, in the order of the mesh. Collective."""
    names = tuple(mesh.order.split("-"))
    degrees = tuple(mesh.degree(Axis(name)) for name in names)
    return init_device_mesh(device.type, degrees, mesh_dim_names=names)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """The device and the meshes of this process.

    mesh         all ranks by pp, dp and tp
    sharded      number of ranks that hold one copy of the states -> dp as (copies, shards)
    expert_mesh  all ranks with dp as (copies, ep), where experts are divided
    data_mesh    all ranks with dp as (copies, data) of one copy, where blocks divide weights over
                 data-parallel ranks
    """

    device: torch.device
    mesh: DeviceMesh
    sharded: Mapping[int, DeviceMesh] = field(default_factory=dict)
    expert_mesh: DeviceMesh | None = None
    data_mesh: DeviceMesh | None = None

    def coordinate(self, axis: str) -> int:
        return int(self.mesh.get_local_rank(axis))

    @property
    def tp_mesh(self) -> DeviceMesh | None:
        return self.mesh["tp"] if self.mesh["tp"].size() > 1 else None

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        return (
            *self.mesh.get_all_groups(),
            *(self.expert_mesh.get_all_groups() if self.expert_mesh is not None else ()),
            *(self.data_mesh.get_all_groups() if self.data_mesh is not None else ()),
        )

    @property
    def ep_mesh(self) -> DeviceMesh | None:
        return self.expert_mesh["ep"] if self.expert_mesh is not None else None

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
        shard_unit(unit, plan.training.precision)
        return unit

    def copies_mesh(self, num_ranks: int) -> DeviceMesh | None:
        """Returns the ranks that hold this shard in each copy, if there are several copies."""
        return self.sharded[num_ranks]["copies"] if num_ranks in self.sharded else None
