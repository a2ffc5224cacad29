"""Prices of layers of any kind, each computed once per way of running it.

The kinds are parts of a described model or shards of a traced one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from dataclasses import dataclass, replace
from typing import Self

from parplan.costmodels.communication.collectives import (
    Collective,
    collective_time,
    point_to_point_time,
)
from parplan.costmodels.communication.mesh import Axis, Mesh, place
from parplan.costmodels.host.offload import COPIED_BYTES, HOST_STATE_BYTES, Offload, copy_time
from parplan.costmodels.host.state_location import Access, ChunkCommunication, StateLocation
from parplan.costmodels.keyed_cache import KeyedCache
from parplan.costmodels.layers.block_parts import (
    PartPass,
    part_passes,
    parts_of,
    tensor_counts,
)
from parplan.costmodels.layers.chunked_layer import (
    BlockCost,
    Chunking,
    block_cost,
    chunk_by_chunk,
    group_collectives,
)
from parplan.costmodels.layers.data_parallel import (
    DataParallelMoves,
    DataParallelTime,
    data_parallel_moves,
    exposed_moves,
    shared_reduction,
)
from parplan.costmodels.layers.halved_layer import HalvedOperators
from parplan.costmodels.layers.layer_price import (
    ENDLESS,
    LayerOperators,
    LayerTime,
    StageAxes,
    price_operators,
)
from parplan.costmodels.layers.model_states import (
    ZERO_2_COPIES,
    ZERO_3_COPIES,
    LocalParameters,
    OwnZero,
    StateBytes,
    StateSharding,
    held_states,
    ideal_states,
    local_parameters,
    owned_parameters,
    stage_groups,
    step_copy_bytes,
    zero_buffer_bytes,
)
from parplan.costmodels.layers.recompute import (
    Recompute,
    RecomputedOperators,
    backward_bytes,
    host_bytes_by_operator,
    ideal_saved_bytes,
    saved_bytes,
    workspace_of,
)
from parplan.costmodels.operators.compute import OperatorTime, operator_time
from parplan.costmodels.operators.host_launch import measured_layout_costs
from parplan.costmodels.operators.kernels import fused_kernel_of
from parplan.costmodels.operators.sharding import Sharding
from parplan.profiles.machines.shipped_profiles import Machine
from parplan.profiles.models.operator_graph import LayerClass, LayerKey, Operator, Tensor
from parplan.profiles.models.spec import Precision, TrainingSpec
from parplan.profiles.provenance import ZERO, Seconds
from parplan.profiles.stack import AttentionKernel

Ends = tuple[tuple[LayerKey, Sharding], ...]  # embedding and head with their shardings
IDS_BYTES = 16  # id and target of a token, as int64


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters of a layer that are gathered and reduced together.

    offloaded    the host holds their states
    """

    zero: int
    parameters: LocalParameters
    offloaded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationBytes:
    """Bytes of one layer and one micro-batch on one rank.

    saved        held on the device for the backward pass
    ideal_saved  without redundancy
    workspace    temporary
    host         held by the host
    """

    saved: int
    ideal_saved: float
    workspace: int
    host: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStates:
    """Bytes of the states of one layer on one rank.

    states       on the device
    ideal        one copy over all ranks, wherever it lies, by class
    buffers      ZeRO's buffers by stage, one for each group of parameters
    step_copies  fp32 copies for the optimizer's step
    host         on the host for this rank
    """

    states: StateBytes
    ideal: tuple[float, float, float]
    buffers: tuple[tuple[int, int], ...]
    step_copies: int
    host: int = 0

    @property
    def zero_buffer(self) -> int:
        """Bytes of ZeRO's buffers at their fullest moment.

        Groups at stages 2 and 3 are gathered and reduced in the same backward pass, the others one
        after the other at the end of the step.
        """
        after = max((size for stage, size in self.buffers if stage < 2), default=0)
        return max(after, sum(size for stage, size in self.buffers if stage >= 2))

    @property
    def gathered_bytes(self) -> float:
        """Bytes of the buffers that hold gathered parameters in a backward pass."""
        return sum(2 * (size / ZERO_3_COPIES) for stage, size in self.buffers if stage == 3)

    @property
    def reduced_bytes(self) -> float:
        """Bytes of the buffers that hold gradients in a backward pass."""
        copies = {2: ZERO_2_COPIES, 3: ZERO_3_COPIES}
        return sum(size / copies[stage] for stage, size in self.buffers if stage >= 2)

    @property
    def reduced_after_bytes(self) -> int:
        """Bytes of the buffers that hold gradients after the backward pass."""
        return sum(size for stage, size in self.buffers if stage == 1)


@dataclass(frozen=True, slots=True)
class ParameterSharing:
    """Parameters that several layers of a model hold.

    layers      numbers of the layers, ascending
    elements    number of the parameters
    in_ideal    every layer's ideal states have them, so that a rank takes off those of copies
    """

    layers: tuple[int, ...]
    elements: int
    in_ideal: bool = False


class LayerPriceCache(ABC):
    """Prices of the layers of a model, trained as `training` on `machine`, each computed once.

    zero_ranks  neighbours that hold one copy of sharded states together, on meshes whose dp it
                divides; None for all of dp
    offload     parts of every layer that the host holds
    chunking    how a device holds chunks in layouts with chunks; no other price depends on it
    ends        the shardings of embedding and head where they are not those of a layout

    Raises ConfigError where the stack has no kernel for the chosen attention.
    """

    def __init__(
        self,
        training: TrainingSpec,
        machine: Machine,
        *,
        zero_ranks: int | None = None,
        offload: tuple[Offload, ...] = (),
        chunking: Chunking | None = None,
    ) -> None:
        if training.attention is AttentionKernel.FLASH:
            fused_kernel_of(training.stack, machine.cluster.device)
        self.training = training
        self.machine = machine
        self.zero_ranks = zero_ranks
        self.offload = offload
        self.chunking = chunking or Chunking()
        self.ends: Ends = ()
        self.once = self._once = KeyedCache()

    @abstractmethod
    def layer(self, kind: LayerKey, micro_batch_size: int) -> LayerClass:
        """The operators of a layer of `kind`."""

    def whole_layer(self, kind: LayerKey) -> LayerClass:
        """The operators of a layer with those that the host runs, for one sequence."""
        return self.layer(kind, 1)

    def kept_layer(self, kind: LayerKey, micro_batch_size: int) -> LayerClass:
        """The layer with the tensors that its operators save on this device."""
        return self.layer(kind, micro_batch_size)

    @abstractmethod
    def recompute_operators(self, kind: LayerKey, level: RecomputedOperators) -> tuple[str, ...]:
        """The operators that `level` recomputes in a layer of `kind`."""

    @abstractmethod
    def on(self, machine: Machine) -> LayerPriceCache:
        """Returns an empty cache of the same prices on another machine."""

    @property
    @abstractmethod
    def num_layers(self) -> int:
        """Layers of the model, with embedding and head."""

    @abstractmethod
    def key(self, layer: int, first: int) -> LayerKey:
        """Returns the class of a layer by its number, in a stage that begins with layer `first`."""

    def keys(self, first: int, end: int) -> list[LayerKey]:
        """Returns the classes of layers [first, end) in a stage that begins with the first."""
        return self._once(
            ("keys", first, end), lambda: [self.key(layer, first) for layer in range(first, end)]
        )

    @abstractmethod
    def cut_class(self, cut: int) -> int:
        """Returns a number that is equal for cuts which the same tensors cross.

        A cut is named by the first layer behind it.
        """

    @abstractmethod
    def crossing_tensors(self, cut_class: int, micro_batch_size: int) -> tuple[Tensor, ...]:
        """Returns the tensors that a pipeline stage receives at a cut of a class."""

    @property
    @abstractmethod
    def num_parameters(self) -> int:
        """Parameters of the model, each counted once."""

    @property
    @abstractmethod
    def flops_per_sequence(self) -> int:
        """Forward and backward model FLOPs of a sequence, without recompute (EQUATIONS K4)."""

    def may_shard(self, kind: LayerKey, sharding: Sharding) -> bool:
        """True if ZeRO can shard the states of a layer beside the division of `sharding`."""
        return True

    def own_sharding(self, kind: LayerKey, sharding: Sharding) -> Sharding:
        """Returns the sharding of a layer in a layout with `sharding`."""
        return next((own for end, own in self.ends if end is kind), sharding)

    def with_ends(self, ends: Ends) -> Self:
        """Returns the same prices for layouts whose embedding and head have these shardings."""
        prices = copy(self)  # shares the cache of layers
        prices.ends = ends
        return prices

    def table_division(self, kind: LayerKey, sharding: Sharding) -> tuple[str | None, ...]:
        """Returns the division of a tied token table in embedding or head, which must be alike."""
        return ()

    @property
    def shared_parameters(self) -> tuple[ParameterSharing, ...]:
        """Parameters that several layers hold, such as a token table tied to the head."""
        return ()

    def shared_reduction(self, shared: ParameterSharing, mesh: Mesh, sharding: Sharding) -> Seconds:
        """Seconds a step to sum the gradients of parameters that several pipeline ranks hold.

        sharding    that of a layer with these parameters
        """
        elements = self._shared_elements(shared, sharding)
        return self._once(
            ("shared", shared, mesh, elements),
            lambda: shared_reduction(
                elements,
                len(shared.layers),
                mesh=mesh,
                machine=self.machine,
                training=self.training,
            ),
        )

    def _shared_elements(self, shared: ParameterSharing, sharding: Sharding) -> int:
        """Returns the shared parameters that one tensor-parallel rank holds."""
        return shared.elements // sharding.tp

    def constants(self, first: int, end: int, micro_batch_size: int) -> Seconds:
        """Seconds a micro-batch of the values that layers [first, end) make of the batch alone."""
        return ZERO

    def besides_bytes(self, first: int, end: int, micro_batch_size: int) -> float:
        """Bytes that a stage of layers [first, end) saves of a micro-batch besides its layers."""
        return 0.0

    counts_small_tensors = True  # saved bytes have statistics of norms, and what the loss makes

    @property
    def batch_bytes(self) -> int:
        """Bytes of the batch of one sequence or sample."""
        return IDS_BYTES * self.training.seq_length

    def stays_gathered(self, kind: LayerKey, mesh: Mesh) -> bool:
        """True if a layer is one ZeRO-3 unit with others, which begins and ends the passes."""
        return False

    def looks_up(self, kind: LayerKey) -> bool:
        """True if the host holds the table of a layer of `kind`."""
        return False

    def row_edges(self, micro_batch_size: int, sharding: Sharding) -> tuple[Seconds, Seconds]:
        """Seconds that blocks of a stage pay beside `layer_time`, forward and backward."""
        return ZERO, ZERO

    def shared_table_bytes(self, mesh: Mesh, sharding: Sharding) -> int:
        """Bytes of the gradient of a token table that head and embedding share in one stage."""
        return 0

    def table_workspace_bytes(self, mesh: Mesh, sharding: Sharding) -> int:
        """Bytes of temporaries beside the embedding's gradient."""
        return 0

    @property
    def tied(self) -> bool:
        """True if embedding and head share their table."""
        return False

    def with_table(self, *, on_host: bool) -> LayerPriceCache:
        """Returns the same prices with the token table on the host, or on the device."""
        return self

    def with_states(self, *, on_host: bool) -> Self:
        """Returns the same prices with the states of all layers on the hosts, or on the devices."""
        if on_host == self.offloads_states:
            return self
        others = tuple(each for each in self.offload if each is not Offload.STATES)
        prices = copy(self)  # shares the cache, whose keys say where the states are
        prices.offload = (*others, Offload.STATES) if on_host else others
        return prices

    def within(self, chunking: Chunking) -> Self:
        """Returns the same prices for devices that hold chunks in another way."""
        prices = copy(self)  # shares the cache of layers
        prices.chunking = chunking
        return prices

    @property
    def outside(self) -> Self:
        """Prices of layers outside chunks in a layout with chunks.

        FSDP2 keeps and reduces gradients of fp32 shards in fp32; gradients of chunks may have the
        training's gradient precision.
        """
        if self.training.gradient_precision is Precision.FP32:
            return self

        alike = self._once(("outside", self.offload), self._with_fp32_gradients)
        return alike.with_ends(self.ends)

    def _with_fp32_gradients(self) -> Self:
        prices = copy(self)
        prices.training = replace(self.training, gradient_precision=Precision.FP32)
        prices.once = prices._once = KeyedCache()
        return prices

    def counts_tied(self, mesh: Mesh) -> bool:
        """Returns true when copies of tied parameters are counted: stages are apart."""
        return mesh.pp > 1

    def shards(self, mesh: Mesh) -> int:
        """The number of data-parallel ranks that hold one copy of sharded states together."""
        if self.zero_ranks and mesh.dp % self.zero_ranks == 0 and mesh.ep == 1:
            return self.zero_ranks
        return mesh.dp

    def _state_sharding(self, mesh: Mesh, group: ParameterGroup) -> StateSharding:
        shards, with_tied = self.shards(mesh), self.counts_tied(mesh)
        return StateSharding(group.zero, shards, with_tied, group.offloaded)

    def split_s(self, kind: LayerKey) -> float:
        """Extra host seconds of a layer's backward pass in two parts, where they were measured."""
        added = measured_layout_costs(self.machine, self.training.stack)
        return 0.0 if added is None else added.split_s * self.layer(kind, 1).gradient_launches

    @property
    def offloads_states(self) -> bool:
        return Offload.STATES in self.offload

    @property
    def gradients_on_host(self) -> bool:
        """True if gradients of layers are summed on the host, micro-batch by micro-batch."""
        return bool(self.offload)

    def divided_layer(
        self, kind: LayerKey, micro_batch_size: int, sharding: Sharding
    ) -> LayerClass:
        """The layer with the batch of all ranks on the axes of `sharding`."""
        return self.layer(kind, micro_batch_size * sharding.data)

    def divided_kept_layer(
        self, kind: LayerKey, micro_batch_size: int, sharding: Sharding
    ) -> LayerClass:
        """As `divided_layer`, with the tensors that its operators save on this device."""
        return self.kept_layer(kind, micro_batch_size * sharding.data)

    def _operators(
        self, kind: LayerKey, micro_batch_size: int, sharding: Sharding
    ) -> LayerOperators | HalvedOperators:
        def time_of(operator: Operator) -> OperatorTime:
            way = sharding.splits(operator), sharding.degrees, sharding.ep, sharding.data
            return self._once(
                ("operator", kind, micro_batch_size, operator.name, way),
                lambda: operator_time(operator, sharding, self.machine, self.training),
            )

        def make() -> LayerOperators | HalvedOperators:
            return price_operators(
                self.divided_layer(kind, micro_batch_size, sharding),
                sharding,
                self.machine,
                self.training,
                self.inside(sharding.degrees),
                time_of,
            )

        return self._once(("operators", kind, micro_batch_size, sharding), make)

    def inside(self, degrees: tuple[int, ...]) -> StageAxes:
        """The axes inside a stage, with the prices of their redistributions."""
        return self._once(
            ("inside", degrees), lambda: StageAxes(degrees, self.machine, self.training.stack)
        )

    def layer_time(
        self,
        kind: LayerKey,
        micro_batch_size: int,
        sharding: Sharding,
        level: RecomputedOperators = Recompute.NONE,
    ) -> LayerTime:
        """One micro-batch through one layer of `kind`, without data-parallel communication."""
        return self._once(
            ("time", kind, micro_batch_size, sharding, level),
            lambda: self._operators(kind, micro_batch_size, sharding).time(
                self.recompute_operators(kind, level)
            ),
        )

    def weight_s(self, kind: LayerKey, micro_batch_size: int, sharding: Sharding) -> float:
        """Seconds of the backward pass of one layer of `kind` for the gradients of its weights."""
        return self._once(
            ("weight", kind, micro_batch_size, sharding),
            lambda: self._operators(kind, micro_batch_size, sharding).weight_s,
        )

    def waiting_bytes(self, kind: LayerKey, micro_batch_size: int, sharding: Sharding) -> float:
        """Bytes that a layer holds between the gradients of its input and of its weights.

        They are held besides the stash: the gradients of the outputs of operators with weights, as
        torch.distributed.pipelining stores them.
        """

        def make() -> float:
            layer = self.divided_layer(kind, micro_batch_size, sharding)
            weighty = (op for op in layer.operators if op.parameters)
            return float(
                sum(
                    sharding.local_bytes(out, sharding.place_inside(op, out))
                    for op in weighty
                    for out in op.outputs
                )
            )

        return self._once(("waiting", kind, micro_batch_size, sharding), make)

    def _workspace_bytes(
        self,
        kind: LayerKey,
        layer: LayerClass,
        micro_batch_size: int,
        sharding: Sharding,
        recomputed: tuple[str, ...],
    ) -> int:
        stack = self.training.stack
        widest = self._once(
            ("widest", kind, micro_batch_size, sharding),
            lambda: max(backward_bytes(layer, sharding, stack)),
        )
        whole = self._saved_bytes(kind, micro_batch_size, sharding, ())
        kept = self._saved_bytes(kind, micro_batch_size, sharding, recomputed)
        return workspace_of(whole, kept, widest, stack)

    def _saved_bytes(
        self, kind: LayerKey, micro_batch_size: int, sharding: Sharding, recomputed: tuple[str, ...]
    ) -> int:
        return self._once(
            ("saved", kind, micro_batch_size, sharding, recomputed),
            lambda: saved_bytes(
                self.divided_kept_layer(kind, micro_batch_size, sharding),
                sharding,
                recomputed,
                self.training.stack,
            ),
        )

    def activations(
        self,
        kind: LayerKey,
        micro_batch_size: int,
        sharding: Sharding,
        level: RecomputedOperators = Recompute.NONE,
        on_host: tuple[str, ...] = (),
    ) -> ActivationBytes:
        """Saved and temporary bytes of one layer of `kind` for one micro-batch.

        The host holds the saved tensors of the operators `on_host`; they are back on the device
        while the layer runs backward.
        """

        def make() -> ActivationBytes:
            layer = self.divided_kept_layer(kind, micro_batch_size, sharding)
            recomputed = self.recompute_operators(kind, level)
            ideal = self.ideal_saved_bytes(kind, micro_batch_size, sharding, level, on_host)
            if on_host:
                whole = self.activations(kind, micro_batch_size, sharding, level)
                sent = self.host_bytes(kind, micro_batch_size, sharding, level)
                host = sum(num_bytes for name, num_bytes in sent.items() if name in on_host)
                return ActivationBytes(
                    saved=whole.saved - host,
                    ideal_saved=ideal,
                    workspace=whole.workspace + host,
                    host=host,
                )
            return ActivationBytes(
                saved=self._saved_bytes(kind, micro_batch_size, sharding, recomputed),
                ideal_saved=ideal,
                workspace=self._workspace_bytes(
                    kind, layer, micro_batch_size, sharding, recomputed
                ),
                host=0,
            )

        return self._once(("activations", kind, micro_batch_size, sharding, level, on_host), make)

    def ideal_saved_bytes(
        self,
        kind: LayerKey,
        micro_batch_size: int,
        sharding: Sharding,
        level: RecomputedOperators = Recompute.NONE,
        on_host: tuple[str, ...] = (),
    ) -> float:
        """Saved bytes of one layer and micro-batch without redundancy, outside the host."""
        layer = self.kept_layer(kind, micro_batch_size)
        recomputed = self.recompute_operators(kind, level)
        return self._once(
            ("ideal", kind, micro_batch_size, sharding.tp, recomputed, on_host),
            lambda: ideal_saved_bytes(layer, sharding.tp, recomputed, on_host),
        )

    def host_bytes(
        self, kind: LayerKey, micro_batch_size: int, sharding: Sharding, level: RecomputedOperators
    ) -> dict[str, int]:
        """Bytes that each operator of one layer sends to the host if it is among `on_host`."""

        def make() -> dict[str, int]:
            layer = self.divided_kept_layer(kind, micro_batch_size, sharding)
            recomputed = self.recompute_operators(kind, level)
            return host_bytes_by_operator(layer, sharding, recomputed, self.training.stack)

        return self._once(("sent", kind, micro_batch_size, sharding, level), make)

    def remade_bytes(
        self, kind: LayerKey, micro_batch_size: int, sharding: Sharding, level: RecomputedOperators
    ) -> int:
        """Extra bytes of a layer after a recompute ahead of the gradient.

        They are its saved bytes without recompute, less those with it.
        """
        whole = self.activations(kind, micro_batch_size, sharding, Recompute.NONE)
        kept = self.activations(kind, micro_batch_size, sharding, level)
        return max(0, whole.saved - kept.saved)

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

        The operators of `own_zero` have another stage.
        """
        return self._once(
            ("dp", kind, micro_batch_size, mesh, sharding, zero, own_zero, self.offloads_states),
            lambda: self._data_parallel(
                self.layer_time(kind, micro_batch_size, sharding),
                mesh,
                self.groups(kind, mesh, sharding, zero, own_zero),
            ),
        )

    def host_copy(
        self,
        kind: LayerKey,
        micro_batch_size: int,
        sharding: Sharding,
        level: RecomputedOperators,
        on_host: tuple[str, ...],
        *,
        to_host: bool,
    ) -> Seconds:
        """Seconds to copy a layer's host activations of one micro-batch to the host, or back."""
        host = self.activations(kind, micro_batch_size, sharding, level, on_host).host
        return copy_time(host, self.machine.cluster, to_host=to_host) if host else ZERO

    def hidden_data_parallel(
        self, kind: LayerKey, mesh: Mesh, sharding: Sharding, zero: int, own_zero: OwnZero = ()
    ) -> DataParallelTime:
        """A lower bound of `data_parallel`: endless compute hides all that the stack can hide."""
        return self._once(
            ("hidden dp", kind, mesh, sharding, zero, own_zero, self.offloads_states),
            lambda: self._data_parallel(
                ENDLESS, mesh, self.groups(kind, mesh, sharding, zero, own_zero)
            ),
        )

    def _data_parallel(
        self, time: LayerTime, mesh: Mesh, groups: tuple[ParameterGroup, ...]
    ) -> DataParallelTime:
        def moves(group: ParameterGroup) -> DataParallelMoves:
            parameters, states = group.parameters, self._state_sharding(mesh, group)
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
        layer = self.layer(kind, 1)
        return tuple(
            ParameterGroup(stage, local_parameters(layer, sharding, names), on_host)
            for stage, names in stage_groups(layer, zero, own_zero)
        )

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
        groups = self.groups(kind, mesh, sharding, zero, own_zero)

        def make() -> LayerStates:
            states = StateBytes()
            owned = host = 0
            buffers: list[tuple[int, int]] = []
            for group in groups:
                sharded = self._state_sharding(mesh, group)
                states += held_states(group.parameters.each, sharded, self.training)
                shards = sharded.shards if group.zero else 1
                updated = group.parameters.owned(shards, with_tied=sharded.with_tied)
                owned += updated
                buffer = self._zero_buffer(group.parameters, mesh, sharded)
                if group.offloaded:
                    buffer += COPIED_BYTES * updated
                    host += HOST_STATE_BYTES * updated
                # without ZeRO a copy to the host comes when ZeRO 1 would reduce
                buffers.append((group.zero or int(group.offloaded), buffer))
            whole = self._parameters(kind, Sharding()).owned(with_tied=False)
            return LayerStates(
                states=states,
                ideal=ideal_states(whole, mesh.ranks_per_stage, self.training),
                buffers=tuple(buffers),
                step_copies=step_copy_bytes(owned, self.training),
                host=host,
            )

        return self._once(("states", kind, mesh, groups, self.offloads_states), make)

    def _zero_buffer(self, parameters: LocalParameters, mesh: Mesh, states: StateSharding) -> int:
        local = parameters.owned(with_tied=states.with_tied, of_experts=False)
        of_experts = parameters.owned(of_experts=True)
        holding = max(mesh.dp, 2) if states.offloaded else mesh.dp  # the host counts as a holder
        buffer = zero_buffer_bytes(local, states.zero, holding, self.training)
        if of_experts:
            buffer += zero_buffer_bytes(of_experts, states.zero, mesh.expert_dp, self.training)
        return buffer

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
    ) -> BlockCost:
        """Returns the cost of one layer held in chunks at `location`.

        elements    of its chunks on all data-parallel ranks together; without padding by default
        """
        if elements is None:
            elements = owned_parameters(self.layer(kind, 1), sharding)

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
            )
            return chunk_by_chunk(cost, collectives, time, self.machine, self.training)

        communication = self.chunking.communication
        which = kind, location, micro_batch_size, mesh, sharding, in_parameters, elements
        return self._once(("chunked", communication, *which), make)

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
            priced = self._operators(kind, micro_batch_size, sharding)
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
        crosses_nodes: bool,
        sharing: int,
    ) -> Seconds:
        """Seconds of a micro-batch's tensors across a cut between pipeline ranks (EQUATIONS T4).

        sharing    pipeline ranks that leave a node at once

        Each tensor is a message, unless the stack sends all of them as one. Without sequence
        parallelism each tensor-parallel rank sends the whole tensor. If the stack partitions
        transfers, it sends its part, which the receivers gather (scatter/gather of Narayanan et al.
        2021, section 4.1).
        """

        def make() -> Seconds:
            tensors = self.crossing_tensors(cut_class, micro_batch_size)
            parts = [self._sent_part(tensor, sharding) for tensor in tensors]
            if self.training.stack.paired_exchanges and parts:
                all_gathered = sum((gathered for _, gathered in parts), ZERO)
                parts = [(sum(part_bytes for part_bytes, _ in parts), all_gathered)]
            total = ZERO
            for part_bytes, gathered in parts:
                sent = self.message(part_bytes, crosses_nodes=crosses_nodes, sharing=sharing)
                total += sent + gathered
            return self.machine.corrected("pipeline", total)

        key = ("transfer", cut_class, micro_batch_size, sharding, crosses_nodes, sharing)
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

    def sent_bytes(self, cut_class: int, micro_batch_size: int, sharding: Sharding) -> int:
        """Bytes of the tensors across a cut, zero unless the stack keeps them to the step's end."""
        if not self.training.stack.keeps_sent:
            return 0
        return sum(
            sharding.local_bytes(tensor, sharding.boundary)
            for tensor in self.crossing_tensors(cut_class, micro_batch_size)
        )

    def message(self, num_bytes: int, *, crosses_nodes: bool, sharing: int) -> Seconds:
        """One message between two pipeline ranks; `sharing` of them leave a node at once."""
        # that many bytes take as long on the whole link
        as_slow_bytes = round(num_bytes / self.training.stack.transfer_share)
        return point_to_point_time(
            as_slow_bytes, crosses_nodes=crosses_nodes, sharing=sharing, machine=self.machine
        )
