"""Prices of layers of any kind, each computed once per way of running it.

The kinds are parts of a described model or shards of a traced one.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Self

from parplan.costmodels.communication.collectives import (
    Collective,
    collective_time,
    point_to_point_time,
)
from parplan.costmodels.communication.mesh import Axis, Mesh, mesh_without_experts, place
from parplan.costmodels.host.offload import COPIED_BYTES, HOST_STATE_BYTES
from parplan.costmodels.host.state_location import Access, ChunkCommunication, StateLocation
from parplan.costmodels.layers.block_parts import (
    PartPass,
    part_passes,
    parts_of,
    tensor_counts,
)
from parplan.costmodels.layers.chunk_owners import expert_elements
from parplan.costmodels.layers.chunked_layer import (
    BlockCost,
    block_cost,
    chunk_by_chunk,
    group_collectives,
)
from parplan.costmodels.layers.data_parallel import (
    DataParallelMoves,
    DataParallelTime,
    data_parallel_moves,
    exposed_moves,
)
from parplan.costmodels.layers.layer_price import (
    ENDLESS,
    LayerOperators,
    LayerTime,
)
from parplan.costmodels.layers.layer_times import LayerTimes
from parplan.costmodels.layers.model_states import (
    ZERO_2_COPIES,
    ZERO_3_COPIES,
    LocalParameters,
    OwnZero,
    StateBytes,
    StateSharding,
    held_states,
    ideal_states_of,
    local_parameters,
    owned_parameters,
    stage_groups,
    step_copy_bytes,
    zero_buffer_bytes,
)
from parplan.costmodels.layers.narrow_products import NarrowWeights, narrow_weights
from parplan.costmodels.layers.recompute import (
    RecomputedOperators,
)
from parplan.costmodels.operators.sharding import Sharding, without_experts
from parplan.profiles.machines.shipped_profiles import Machine
from parplan.profiles.models.operator_graph import LayerKey, Tensor
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.provenance import ZERO, Seconds


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters of a layer that are gathered and reduced together.

    offloaded    the host holds their states
    """

    zero: int
    parameters: LocalParameters
    offloaded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStates:
    """Bytes of the states of one layer on one rank.

    states       on the device
    ideal        one copy over all ranks, wherever it lies, by class
    buffers      ZeRO's buffers by stage, one for each group of parameters
    step_copies  fp32 copies for the optimizer's step
    host         on the host for this rank
    frozen       gathered frozen parameters of the current and the prefetched layer at stage 3
    """

    states: StateBytes
    ideal: tuple[float, float, float]
    buffers: tuple[tuple[int, int], ...]
    step_copies: int
    host: int = 0
    frozen: int = 0

    @property
    def zero_buffer(self) -> int:
        """Bytes of ZeRO's buffers at their fullest moment.

        Groups at stages 2 and 3 are gathered and reduced in the same backward pass, the others one
        after the other at the end of the step.
        """
        after = max((size for stage, size in self.buffers if stage < 2), default=0)
        return max(after, self.frozen + sum(size for stage, size in self.buffers if stage >= 2))

    @property
    def gathered_bytes(self) -> float:
        """Bytes of the buffers that hold gathered parameters in a backward pass."""
        trained = sum(2 * (size / ZERO_3_COPIES) for stage, size in self.buffers if stage == 3)
        return self.frozen + trained

    @property
    def reduced_bytes(self) -> float:
        """Bytes of the buffers that hold gradients in a backward pass."""
        copies = {2: ZERO_2_COPIES, 3: ZERO_3_COPIES}
        return sum(size / copies[stage] for stage, size in self.buffers if stage >= 2)

    @property
    def reduced_after_bytes(self) -> int:
        """Bytes of the buffers that hold gradients after the backward pass."""
        return sum(size for stage, size in self.buffers if stage == 1)


class LayerPriceCache(LayerTimes):
    """Prices of the layers of a model, each computed once: also states, data parallelism, chunks.

    Raises ConfigError where the stack has no kernel for the chosen attention.

    whole           of a pool, the prices of its unequal cluster
    most_bytes      of a pool, the memory limit of its devices, which a search may lower
    """

    whole: LayerPriceCache | None = None
    most_bytes: float = float("inf")

    @abstractmethod
    def on(self, machine: Machine, training: TrainingSpec | None = None) -> Self:
        """Returns an empty cache of the same prices on another machine, or with its own stack."""

    def with_table(self, *, on_host: bool) -> LayerPriceCache:
        """Returns the same prices with the token table on the host, or on the device."""
        return self

    def _state_sharding(self, mesh: Mesh, group: ParameterGroup) -> StateSharding:
        shards, with_tied = self.shards(mesh), self.counts_tied(mesh)
        return StateSharding(group.zero, shards, with_tied, group.offloaded)

    def data_parallel(
        self,
        kind: LayerKey,
        micro_batch_size: int,
        mesh: Mesh,
        sharding: Sharding,
        zero: int,
        own_zero: OwnZero = (),
    ) -> DataParallelTime:
        """Gradient reduction, gathers and the optimizer step of one layer at ZeRO stage `zero`.

        The operators of `own_zero` have another stage. Replicas wait for the longest documents.
        """
        mesh, sharding = self._apart(kind, mesh, sharding)

        def make() -> DataParallelTime:
            groups = self.groups(kind, mesh, sharding, zero, own_zero)
            time = self.layer_time(kind, micro_batch_size, sharding)
            moved = self._data_parallel(time, mesh, groups)
            repeats = self.training.global_batch_size // (mesh.dp * micro_batch_size)
            if sharding.data > 1 or any(group.zero >= 2 for group in groups):
                wait = self.replica_wait(kind, micro_batch_size, mesh, sharding, 1)
                return moved.waiting(wait)
            wait = self.replica_wait(kind, micro_batch_size, mesh, sharding, repeats)
            return moved.waiting_once(wait, repeats)

        return self._once(
            ("dp", kind, micro_batch_size, mesh, sharding, zero, own_zero, self.offloads_states),
            make,
        )

    def hidden_data_parallel(
        self, kind: LayerKey, mesh: Mesh, sharding: Sharding, zero: int, own_zero: OwnZero = ()
    ) -> DataParallelTime:
        """A lower bound of `data_parallel`: endless compute hides all that the stack can hide.

        It has no wait for documents.
        """
        mesh, sharding = self._apart(kind, mesh, sharding)
        return self._once(
            ("hidden dp", kind, mesh, sharding, zero, own_zero, self.offloads_states),
            lambda: self._data_parallel(
                ENDLESS, mesh, self.groups(kind, mesh, sharding, zero, own_zero)
            ),
        )

    def _apart(self, kind: LayerKey, mesh: Mesh, sharding: Sharding) -> tuple[Mesh, Sharding]:
        """Returns mesh and sharding, without the ranks of experts where a layer has no experts."""
        if mesh.ep == mesh.etp == 1 or self.zero_ranks or self.layer(kind, 1).has_experts:
            return mesh, sharding
        return mesh_without_experts(mesh), without_experts(sharding)

    def _data_parallel(
        self, time: LayerTime, mesh: Mesh, groups: tuple[ParameterGroup, ...]
    ) -> DataParallelTime:
        def moves(group: ParameterGroup) -> DataParallelMoves:
            parameters, states = group.parameters, self._state_sharding(mesh, group)
            if group.zero < 3:
                parameters = parameters.trained
            return self._once(
                ("dp moves", parameters, mesh, group.zero > 0, group.offloaded),
                lambda: data_parallel_moves(parameters, mesh, states, self.machine, self.training),
            )

        moved = [(group.zero, moves(group)) for group in groups]
        return exposed_moves(moved, time, self.machine, self.training)

    def groups(
        self, kind: LayerKey, mesh: Mesh, sharding: Sharding, zero: int, own_zero: OwnZero = ()
    ) -> tuple[ParameterGroup, ...]:
        """Returns the groups of the parameters of a layer."""
        on_host = self.offloads_states
        if not own_zero:
            return (ParameterGroup(zero, self._parameters(kind, sharding), on_host),)

        def make() -> tuple[ParameterGroup, ...]:
            layer = self.layer(kind, 1)
            return tuple(
                ParameterGroup(stage, local_parameters(layer, sharding, names), on_host)
                for stage, names in stage_groups(layer, zero, own_zero)
            )

        return self._once(("groups", kind, sharding, zero, own_zero, on_host), make)

    def _parameters(self, kind: LayerKey, sharding: Sharding) -> LocalParameters:
        return self._once(
            ("parameters", kind, sharding), lambda: local_parameters(self.layer(kind, 1), sharding)
        )

    def states(
        self,
        kind: LayerKey,
        mesh: Mesh,
        sharding: Sharding,
        zero: int,
        own_zero: OwnZero = (),
    ) -> LayerStates:
        """State bytes of one layer of `kind`, whose operators of `own_zero` have another stage.

        A tied head holds its own copy only when stages are apart.
        """
        mesh, sharding = self._apart(kind, mesh, sharding)
        groups = self.groups(kind, mesh, sharding, zero, own_zero)

        def make() -> LayerStates:
            states = StateBytes()
            owned = host = frozen = 0
            buffers: list[tuple[int, int]] = []
            for group in groups:
                sharded = self._state_sharding(mesh, group)
                states += held_states(
                    group.parameters.each, sharded, self.training, narrow=self.narrow_weights
                )
                shards = sharded.shards if group.zero else 1
                trained = group.parameters.trained
                updated = trained.owned(shards, with_tied=sharded.with_tied)
                owned += updated
                buffer = self._zero_buffer(trained, mesh, sharded) if trained.each else 0
                if group.zero == 3 and mesh.replicas > 1:
                    frozen += 2 * group.parameters.frozen_bytes(
                        self.training, with_tied=sharded.with_tied
                    )
                if group.offloaded:
                    buffer += COPIED_BYTES * updated
                    host += HOST_STATE_BYTES * updated
                # without ZeRO a copy to the host comes when ZeRO 1 would reduce
                buffers.append((group.zero or int(group.offloaded), buffer))
            whole = self._parameters(kind, Sharding()).each
            return LayerStates(
                states=states,
                ideal=ideal_states_of(whole, mesh.ranks_per_stage, self.training),
                buffers=tuple(buffers),
                step_copies=step_copy_bytes(owned, self.training),
                host=host,
                frozen=frozen,
            )

        return self._once(("states", kind, mesh, groups, self.offloads_states), make)

    def _zero_buffer(self, parameters: LocalParameters, mesh: Mesh, states: StateSharding) -> int:
        local = parameters.owned(with_tied=states.with_tied, of_experts=False)
        of_experts = parameters.owned(of_experts=True)
        # the host counts as a holder
        holding = max(mesh.replicas, 2) if states.offloaded else mesh.replicas
        gathered = [
            parameters.gathered_bytes(
                self.training,
                with_tied=states.with_tied,
                of_experts=own,
                narrow=self.narrow_weights,
            )
            for own in (False, True)
        ]
        buffer = zero_buffer_bytes(local, states.zero, holding, self.training, gathered[0])
        if of_experts:
            buffer += zero_buffer_bytes(
                of_experts, states.zero, mesh.expert_replicas, self.training, gathered[1]
            )
        return buffer

    @property
    def narrow_weights(self) -> NarrowWeights | None:
        """Bytes of the weights of narrow products on this device, None where none is narrow."""
        return self._once(
            "narrow weights",
            lambda: narrow_weights(self.training, self.machine.cluster.device.compute_capability),
        )

    def chunked(
        self,
        kind: LayerKey,
        location: StateLocation,
        micro_batch_size: int,
        mesh: Mesh,
        sharding: Sharding,
        *,
        in_parameters: bool,
        elements: int | None = None,
        experts: int | None = None,
    ) -> BlockCost:
        """Returns the cost of one layer held in chunks at `location`.

        elements    of its chunks on all their owners together; without padding by default
        experts     those among them with owners of their own; without padding by default
        """
        if elements is None:
            elements = owned_parameters(self.layer(kind, 1), sharding)
        if experts is None:
            experts = expert_elements(self.layer(kind, 1), sharding, mesh)

        def make() -> BlockCost:
            time = self.layer_time(kind, micro_batch_size, sharding)
            cost = block_cost(
                location,
                elements,
                time,
                mesh=mesh,
                in_parameters=in_parameters,
                machine=self.machine,
                training=self.training,
                experts=experts,
            )
            if communication is ChunkCommunication.GROUP:
                return cost
            collectives = group_collectives(
                elements,
                mesh,
                self.machine,
                self.training,
                in_parameters=in_parameters,
                communication=communication,
                experts=experts,
            )
            return chunk_by_chunk(cost, collectives, time, self.machine, self.training)

        communication = self.chunking.communication

        def waiting() -> BlockCost:
            return make().waiting(self.replica_wait(kind, micro_batch_size, mesh, sharding, 1))

        sizes = elements, experts
        which = kind, location, micro_batch_size, mesh, sharding, in_parameters, sizes
        return self._once(("chunked", communication, *which), waiting)

    def tensors_by_part(self, kind: LayerKey, access: Access) -> tuple[int, ...]:
        """Returns the number of tensors of each part of a layer in chunks."""
        return self._once(
            ("tensors by part", kind, access), lambda: tensor_counts(self.layer(kind, 1), access)
        )

    def part_passes(
        self, kind: LayerKey, access: Access, level: RecomputedOperators, *, backward: bool
    ) -> tuple[PartPass, ...]:
        """Returns the accesses of a layer's pass that recomputes `level`."""
        return self._once(
            ("part passes", kind, access, level, backward),
            lambda: part_passes(
                self.layer(kind, 1),
                access,
                self.recompute_operators(kind, level),
                backward=backward,
            ),
        )

    def part_time(
        self,
        kind: LayerKey,
        micro_batch_size: int,
        sharding: Sharding,
        level: RecomputedOperators,
        access: Access,
    ) -> tuple[LayerTime, ...]:
        """Returns `layer_time` by part: in shares of the seconds of its operators."""

        def make() -> tuple[LayerTime, ...]:
            priced = self._operators(kind, (micro_batch_size,), sharding)
            assert isinstance(priced, LayerOperators), "blocks in chunks run one after the other"
            whole = self.layer_time(kind, micro_batch_size, sharding, level)
            return priced.by_part(
                whole,
                self.recompute_operators(kind, level),
                parts_of(self.layer(kind, micro_batch_size), access),
            )

        return self._once(("part time", kind, micro_batch_size, sharding, level, access), make)

    def transfer(
        self,
        cut_class: int,
        micro_batch_size: int,
        sharding: Sharding,
        *,
        level: int,
        sharing: int,
    ) -> Seconds:
        """Seconds of a micro-batch's tensors across a cut between pipeline ranks (EQUATIONS T4).

        level      0 inside a node, 1 between nodes, one more for each tier that it leaves
        sharing    neighbouring ranks that send at once

        Each tensor is a message, unless the stack sends all of them as one. Without sequence
        parallelism each tensor-parallel rank sends the whole tensor. If the stack partitions
        transfers, it sends its part, which the receivers gather (scatter/gather of Narayanan et al.
        2021, section 4.1).
        """

        def make() -> Seconds:
            tensors = self.crossing_tensors(cut_class, micro_batch_size, sharding.part)
            parts = [self._sent_part(tensor, sharding) for tensor in tensors]
            if self.training.stack.paired_exchanges and parts:
                all_gathered = sum((gathered for _, gathered in parts), ZERO)
                parts = [(sum(part_bytes for part_bytes, _ in parts), all_gathered)]
            total = ZERO
            for part_bytes, gathered in parts:
                sent = self.message(part_bytes, level=level, sharing=sharing)
                total += sent + gathered
            return self.machine.corrected("pipeline", total)

        key = ("transfer", cut_class, micro_batch_size, sharding, level, sharing)
        return self._once(key, make)

    def _sent_part(self, tensor: Tensor, sharding: Sharding) -> tuple[int, Seconds]:
        """Returns the bytes of a tensor that a rank sends, and the gather of the parts if any."""
        n_bytes = sharding.local_bytes(tensor, sharding.boundary)
        parted = (
            self.training.stack.partitioned_transfers
            and sharding.tp > 1
            and n_bytes == tensor.num_bytes
        )
        if not parted:
            return n_bytes, ZERO
        ranks = place(Mesh(pp=1, dp=1, tp=sharding.tp), Axis.TP, self.machine.cluster.gpus_per_node)
        gathered = collective_time(Collective.ALL_GATHER, n_bytes, ranks, self.machine)
        return -(-n_bytes // sharding.tp), gathered

    def sent_part_bytes(self, cut_class: int, micro_batch_size: int, sharding: Sharding) -> int:
        """Bytes that one rank sends of a micro-batch's tensors across a cut."""
        tensors = self.crossing_tensors(cut_class, micro_batch_size, sharding.part)
        return sum(self._sent_part(tensor, sharding)[0] for tensor in tensors)

    def sent_bytes(self, cut_class: int, micro_batch_size: int, sharding: Sharding) -> int:
        """Bytes of the tensors across a cut, zero unless the stack keeps them to the step's end."""
        if not self.training.stack.keeps_sent:
            return 0
        return sum(
            sharding.local_bytes(tensor, sharding.boundary)
            for tensor in self.crossing_tensors(cut_class, micro_batch_size, sharding.part)
        )

    def message(self, num_bytes: int, *, level: int, sharing: int) -> Seconds:
        """One message between two pipeline ranks; `sharing` neighbours send at once."""
        # that many bytes take as long on the whole link
        as_slow_bytes = round(num_bytes / self.training.stack.transfer_share)
        return point_to_point_time(
            as_slow_bytes, level=level, sharing=sharing, machine=self.machine
        )
