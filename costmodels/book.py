"""The price book: every layer of one model on one machine, priced once per way of running it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from costmodels.chunks.home import Home
from costmodels.chunks.price import BlockCost, Chunking, block_cost
from costmodels.collectives import Collective, collective_time, point_to_point_time
from costmodels.halved import HalvedOperators, halved_workspace_bytes, price_halves
from costmodels.layer import (
    ENDLESS,
    DataParallelTime,
    LayerOperators,
    LayerTime,
    data_parallel_time,
    has_tied_head,
    price_operators,
    tied_reduction,
)
from costmodels.lookup import Lookup, lookup_of, without_table
from costmodels.memory import StateBytes, ideal_states, layer_states, owned_parameters, step_copy_bytes, zero_buffer_bytes
from costmodels.mesh import Axis, Mesh, place
from costmodels.offload import COPIED_BYTES, HOST_STATE_BYTES, Offload, copy_time
from costmodels.pace import layouts_of
from costmodels.recompute import Again, Recompute, ideal_saved_bytes, recompute_operators, saved_bytes, workspace_bytes
from costmodels.sharding import Sharding
from costmodels.sub_pipeline import HALVES
from profiles.hardware import CPU
from profiles.measured import Machine
from profiles.model import LayerClass, LayerKind, ModelGraph
from profiles.provenance import ZERO, Seconds
from profiles.spec import ModelSpec, Precision, TrainingSpec
from profiles.transformer import build_graph

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationBytes:
    """Bytes of one layer and one micro-batch on one rank: kept for the backward pass, ideally kept, temporary, kept by the host."""

    saved: int
    ideal_saved: float
    workspace: int
    host: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStates:
    """Bytes of the states of one layer on one rank, without redundancy, ZeRO's buffers, and fp32 copies for the optimizer's step.

    host: what the host keeps of them for this rank; `states`, and `ideal`, are the device's then
    """

    states: StateBytes
    ideal: tuple[float, float, float]
    zero_buffer: int
    step_copies: int
    host: int = 0


class LayerBook(ABC, Generic[K]):
    """Prices of layers of the kinds `K`, trained as `training` on `machine`, each made once.

    zero_ranks: neighbours that hold one copy of sharded states together, on meshes whose dp it divides; None for all of dp
    offload: what the host keeps of the states of every layer
    """

    def __init__(
        self, training: TrainingSpec, machine: Machine, *, zero_ranks: int | None = None, offload: tuple[Offload, ...] = (),
    ) -> None:
        self.training = training
        self.machine = machine
        self.zero_ranks = zero_ranks
        self.offload = offload
        self._known: dict[Hashable, Any] = {}

    @abstractmethod
    def layer(self, kind: K, micro_batch_size: int) -> LayerClass:
        """The operators of a layer of `kind`."""

    def kept_layer(self, kind: K, micro_batch_size: int) -> LayerClass:
        """The same with what the operators keep on this device."""
        return self.layer(kind, micro_batch_size)

    @abstractmethod
    def recompute_operators(self, kind: K, level: Again) -> tuple[str, ...]:
        """The operators that `level` recomputes in a layer of `kind`."""

    def counts_tied(self, mesh: Mesh) -> bool:
        """Whether copies of parameters that other layers hold are counted: where stages are apart."""
        return mesh.pp > 1

    def _once(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self._known:
            self._known[key] = make()
        found: T = self._known[key]
        return found

    def shards(self, mesh: Mesh) -> int:
        """How many data-parallel ranks hold one copy of sharded states together."""
        return self.zero_ranks if self.zero_ranks and mesh.dp % self.zero_ranks == 0 and mesh.ep == 1 else mesh.dp

    def split_s(self, kind: K) -> float:
        """Seconds that the host takes more for the backward pass of a layer in two parts, where that was measured."""
        added = layouts_of(self.machine, self.training.stack)
        return 0.0 if added is None else added.split_s * self.layer(kind, 1).gradient_launches

    @property
    def offloads_states(self) -> bool:
        return Offload.STATES in self.offload

    def _operators(self, kind: K, micro_batch_size: int, sharding: Sharding) -> LayerOperators | HalvedOperators:
        def make() -> LayerOperators | HalvedOperators:
            return price_operators(self.layer(kind, micro_batch_size), sharding, self.machine, self.training)

        return self._once(("operators", kind, micro_batch_size, sharding), make)

    def layer_time(self, kind: K, micro_batch_size: int, sharding: Sharding, level: Again = Recompute.NONE) -> LayerTime:
        """One micro-batch through one layer of `kind`, without data-parallel communication."""
        return self._once(
            ("time", kind, micro_batch_size, sharding, level),
            lambda: self._operators(kind, micro_batch_size, sharding).time(self.recompute_operators(kind, level)))

    def weight_s(self, kind: K, micro_batch_size: int, sharding: Sharding) -> float:
        """Of the backward pass of one layer of `kind`, the seconds of the gradients of its weights."""
        return self._once(
            ("weight", kind, micro_batch_size, sharding), lambda: self._operators(kind, micro_batch_size, sharding).weight_s)

    def waiting_bytes(self, kind: K, micro_batch_size: int, sharding: Sharding) -> float:
        """What one layer of `kind` holds of a micro-batch between the gradients of its input and of its weights, besides the stash:
        the gradients of the outputs of operators with weights, as torch.distributed.pipelining keeps them."""

        def make() -> float:
            weighty = (op for op in self.layer(kind, micro_batch_size).operators if op.parameters)
            return float(sum(sharding.local_bytes(out, sharding.place_inside(op, out)) for op in weighty for out in op.outputs))

        return self._once(("waiting", kind, micro_batch_size, sharding), make)

    def _workspace_bytes(self, kind: K, layer: LayerClass, micro_batch_size: int, sharding: Sharding, again: tuple[str, ...]) -> int:
        return workspace_bytes(layer, sharding, again, self.training.stack)

    def activations(
        self, kind: K, micro_batch_size: int, sharding: Sharding, level: Again = Recompute.NONE, on_host: tuple[str, ...] = (),
    ) -> ActivationBytes:
        """Saved and temporary bytes of one layer of `kind` for one micro-batch, of which the host keeps those of the operators `on_host`.

        They are back on the device while the layer runs backward.
        """

        def make() -> ActivationBytes:
            layer, again, stack = self.kept_layer(kind, micro_batch_size), self.recompute_operators(kind, level), self.training.stack
            saved = saved_bytes(layer, sharding, again, stack, on_host)
            host = saved_bytes(layer, sharding, again, stack) - saved if on_host else 0
            workspace = self._workspace_bytes(kind, layer, micro_batch_size, sharding, again)
            return ActivationBytes(
                saved=saved, ideal_saved=ideal_saved_bytes(layer, sharding.tp, again, on_host), workspace=workspace + host, host=host)

        return self._once(("activations", kind, micro_batch_size, sharding, level, on_host), make)

    def remade_bytes(self, kind: K, micro_batch_size: int, sharding: Sharding, level: Again) -> int:
        """What a recompute ahead of the gradient adds to what one layer keeps of a micro-batch: what it would keep without, less that."""
        whole, kept = (self.activations(kind, micro_batch_size, sharding, again) for again in (Recompute.NONE, level))
        return max(0, whole.saved - kept.saved)

    def data_parallel(self, kind: K, micro_batch_size: int, mesh: Mesh, sharding: Sharding, zero: int) -> DataParallelTime:
        """Gradient reduction, gathers and the optimizer step of one layer of `kind` at ZeRO stage `zero`."""

        def make() -> DataParallelTime:
            return data_parallel_time(
                self.layer(kind, micro_batch_size), self.layer_time(kind, micro_batch_size, sharding),
                mesh=mesh, sharding=sharding, zero=zero, machine=self.machine, training=self.training, with_tied=self.counts_tied(mesh),
                shards=self.shards(mesh), offloaded=self.offloads_states)

        return self._once(("dp", kind, micro_batch_size, mesh, sharding, zero), make)

    def host_copy(
        self, kind: K, micro_batch_size: int, sharding: Sharding, level: Again, on_host: tuple[str, ...], *, to_host: bool,
    ) -> Seconds:
        """What the activations of one layer and micro-batch that the host keeps take to get there, or to come back."""
        host = self.activations(kind, micro_batch_size, sharding, level, on_host).host
        return copy_time(host, self.machine.cluster, to_host=to_host) if host else ZERO

    def hidden_data_parallel(self, kind: K, mesh: Mesh, sharding: Sharding, zero: int) -> DataParallelTime:
        """The same under endless compute, which hides all that the stack can hide: no layer of `kind` pays less."""

        def make() -> DataParallelTime:
            return data_parallel_time(
                self.layer(kind, 1), ENDLESS, mesh=mesh, sharding=sharding, zero=zero, machine=self.machine,
                training=self.training, with_tied=self.counts_tied(mesh), shards=self.shards(mesh), offloaded=self.offloads_states)

        return self._once(("hidden dp", kind, mesh, sharding, zero), make)

    def states(self, kind: K, mesh: Mesh, sharding: Sharding, zero: int) -> LayerStates:
        """State bytes of one layer of `kind`; a tied head holds its own copy only when stages are apart."""

        def make() -> LayerStates:
            layer, with_tied, shards = self.layer(kind, 1), self.counts_tied(mesh), self.shards(mesh)
            offloaded = self.offloads_states
            owned = owned_parameters(layer, sharding, shards if zero else 1, with_tied=with_tied)
            local = owned_parameters(layer, sharding, with_tied=with_tied, of_experts=False)
            of_experts = owned_parameters(layer, sharding, of_experts=True)
            buffer = zero_buffer_bytes(local, zero, max(mesh.dp, 1 + offloaded), self.training) + COPIED_BYTES * owned * offloaded
            if of_experts:
                buffer += zero_buffer_bytes(of_experts, zero, mesh.expert_dp, self.training)
            whole = owned_parameters(layer, Sharding(), with_tied=False)
            return LayerStates(
                states=layer_states(layer, sharding, zero, shards, self.training, with_tied=with_tied, offloaded=offloaded),
                ideal=(0.0, 0.0, 0.0) if offloaded else ideal_states(whole, mesh.ranks_per_stage, self.training),
                zero_buffer=buffer,
                step_copies=step_copy_bytes(layer, sharding, zero, shards, self.training, with_tied=with_tied),
                host=HOST_STATE_BYTES * owned * offloaded)

        return self._once(("states", kind, mesh, sharding, zero), make)

    def message(self, num_bytes: int, *, crosses_nodes: bool, sharing: int) -> Seconds:
        """One message between two pipeline ranks; `sharing` of them leave a node at once."""
        as_slow_bytes = round(num_bytes / self.training.stack.transfer_share)  # as many take as long on the whole link
        return point_to_point_time(as_slow_bytes, crosses_nodes=crosses_nodes, sharing=sharing, machine=self.machine)


class PriceBook(LayerBook[LayerKind]):
    """Prices of the layers of `model`; the head's recompute is always none.

    chunking: how a device holds chunks, of frames whose blocks are held in chunks; it does not change any other price
    """

    def __init__(
        self, model: ModelSpec, training: TrainingSpec, machine: Machine, *, zero_ranks: int | None = None,
        offload: tuple[Offload, ...] = (), chunking: Chunking | None = None,
    ) -> None:
        super().__init__(training, machine, zero_ranks=zero_ranks, offload=offload)
        self.model = model
        self.chunking = chunking or Chunking()

    def within(self, chunking: Chunking) -> PriceBook:
        """The same prices for devices that hold chunks in another way."""
        found = copy(self)  # what is known of layers is shared
        found.chunking = chunking
        return found

    def graph(self, micro_batch_size: int) -> ModelGraph:
        return self._once(("graph", micro_batch_size), lambda: build_graph(self.model, self.training, micro_batch_size))

    def layer(self, kind: LayerKind, micro_batch_size: int) -> LayerClass:
        return self._on_device(self.graph(micro_batch_size).layer_class(kind), ("layer", micro_batch_size))

    def kept_layer(self, kind: LayerKind, micro_batch_size: int) -> LayerClass:
        return self._on_device(self.kept_graph(micro_batch_size).layer_class(kind), ("kept layer", micro_batch_size))

    def _on_device(self, layer: LayerClass, key: tuple[str, int]) -> LayerClass:
        """The layer, without the token table where the host looks it up."""
        if not self.looks_up(layer.kind):
            return layer
        return self._once(key, lambda: without_table(layer))

    @property
    def outside(self) -> PriceBook:
        """Prices of embedding and head where blocks are in chunks: FSDP2 keeps and reduces gradients of fp32 shards in fp32, of which
        precision those of the chunks may be."""
        if self.training.gradient_precision is Precision.FP32:
            return self
        return self._once("outside", lambda: PriceBook(
            self.model, replace(self.training, gradient_precision=Precision.FP32), self.machine, zero_ranks=self.zero_ranks,
            offload=self.offload, chunking=self.chunking))

    def looks_up(self, kind: LayerKind) -> bool:
        """Whether the host has the table of a layer of `kind`."""
        return kind is LayerKind.EMBEDDING and Offload.LOOKUP in self.offload

    def lookup(self, micro_batch_size: int, mesh: Mesh) -> Lookup:
        """What the host's look-up costs (call only where it does so)."""
        return self._once(
            ("lookup", micro_batch_size, mesh), lambda: lookup_of(self.graph(micro_batch_size).embedding, mesh, self.machine))

    def data_parallel(self, kind: LayerKind, micro_batch_size: int, mesh: Mesh, sharding: Sharding, zero: int) -> DataParallelTime:
        """As of any layer; of the embedding with the host's look-up, the exchange of what it gives, and the update of the table."""
        plain = super().data_parallel(kind, micro_batch_size, mesh, sharding, zero)
        if not self.looks_up(kind):
            return plain
        own = self.lookup(micro_batch_size, mesh)
        return replace(
            plain, forward=plain.forward + own.forward + own.tokens + own.exchange,
            backward=plain.backward + own.backward + own.exchange, optimizer=plain.optimizer + own.update,
            host=plain.host + own.forward + own.backward)

    def states(self, kind: LayerKind, mesh: Mesh, sharding: Sharding, zero: int) -> LayerStates:
        """As of any layer, with the table that the host has."""
        plain = super().states(kind, mesh, sharding, zero)
        return replace(plain, host=plain.host + self.lookup(1, mesh).host_bytes) if self.looks_up(kind) else plain

    @property
    def plain_dropout(self) -> bool:
        """Whether dropout is that of torch on a CPU, no fused kernel. Of memory alone: what an operator takes is the price of GPUs."""
        return self.training.stack.plain_dropout_on_cpu and self.machine.cluster.device.name == CPU and self.model.dropout > 0

    def kept_graph(self, micro_batch_size: int) -> ModelGraph:
        """The graph with what the operators keep on this device."""
        if not self.plain_dropout:
            return self.graph(micro_batch_size)
        return self._once(
            ("kept graph", micro_batch_size), lambda: build_graph(self.model, self.training, micro_batch_size, plain_dropout=True))

    @property
    def tied(self) -> bool:
        return has_tied_head(self.graph(1).head)

    def recompute_operators(self, kind: LayerKind, level: Again) -> tuple[str, ...]:
        """The operators that `level` recomputes in a layer of `kind`: only blocks recompute."""
        return recompute_operators(self.kept_graph(1).layer_class(kind), level) if kind is LayerKind.BLOCK else ()

    def _operators(self, kind: LayerKind, micro_batch_size: int, sharding: Sharding) -> LayerOperators | HalvedOperators:
        """Those of blocks that run as two halves of the micro-batch are priced as such."""
        if not (kind is LayerKind.BLOCK and sharding.overlap):
            return super()._operators(kind, micro_batch_size, sharding)

        def make() -> HalvedOperators:
            half, whole = (self.layer(kind, size) for size in (micro_batch_size // HALVES, micro_batch_size))
            return price_halves(half, whole, sharding, self.machine, self.training)

        return self._once(("operators", kind, micro_batch_size, sharding), make)

    def chunked(
        self, home: Home, micro_batch_size: int, mesh: Mesh, sharding: Sharding, *, in_parameters: bool, elements: int | None = None,
    ) -> BlockCost:
        """One block held in chunks at `home`. elements: of its chunks on all data-parallel ranks together, without padding by default."""
        own = owned_parameters(self.layer(LayerKind.BLOCK, 1), sharding) if elements is None else elements

        def make() -> BlockCost:
            time = self.layer_time(LayerKind.BLOCK, micro_batch_size, sharding)
            return block_cost(
                home, own, time, mesh=mesh, in_parameters=in_parameters, machine=self.machine, training=self.training)

        return self._once(("chunked", home, micro_batch_size, mesh, sharding, in_parameters, own), make)

    def row_edges(self, micro_batch_size: int, sharding: Sharding) -> tuple[Seconds, Seconds]:
        """What the blocks of a stage pay forward and backward beside `layer_time`: the ends of a row of halves, at level 3 alone."""

        def make() -> tuple[Seconds, Seconds]:
            operators = self._operators(LayerKind.BLOCK, micro_batch_size, sharding)
            return operators.edges() if isinstance(operators, HalvedOperators) else (ZERO, ZERO)

        return self._once(("edges", micro_batch_size, sharding), make)

    def _workspace_bytes(
        self, kind: LayerKind, layer: LayerClass, micro_batch_size: int, sharding: Sharding, again: tuple[str, ...],
    ) -> int:
        if not (kind is LayerKind.BLOCK and sharding.overlap):
            return super()._workspace_bytes(kind, layer, micro_batch_size, sharding, again)
        half = self.kept_layer(kind, micro_batch_size // HALVES)
        return halved_workspace_bytes(half, layer, sharding, again, self.training.stack)

    def transfer(self, micro_batch_size: int, sharding: Sharding, *, crosses_nodes: bool, sharing: int) -> Seconds:
        """One micro-batch's boundary activation from one pipeline rank to another; `sharing` of them leave a node at once.

        Without sequence parallelism each tensor-parallel rank sends the whole tensor, or its part, which the receivers
        gather (scatter/gather of Narayanan et al. 2021, section 4.1), where the stack does so.
        """

        def make() -> Seconds:
            boundary, machine = self.graph(micro_batch_size).block.input, self.machine
            assert boundary is not None
            n_bytes = sharding.local_bytes(boundary, sharding.boundary)
            parted = self.training.stack.partitioned_transfers and sharding.tp > 1 and n_bytes == boundary.num_bytes
            part_bytes = -(-n_bytes // sharding.tp) if parted else n_bytes
            sent = self.message(part_bytes, crosses_nodes=crosses_nodes, sharing=sharing)
            if parted:
                ranks = place(Mesh(pp=1, dp=1, tp=sharding.tp), Axis.TP, machine.cluster.gpus_per_node)
                sent += collective_time(Collective.ALL_GATHER, n_bytes, ranks, machine)
            return machine.corrected("pipeline", sent)

        return self._once(("transfer", micro_batch_size, sharding, crosses_nodes, sharing), make)

    def sent_bytes(self, micro_batch_size: int, sharding: Sharding) -> int:
        """What a stage sends of a micro-batch each way, where the stack keeps it until the end of the step."""
        boundary = self.graph(micro_batch_size).block.input
        assert boundary is not None
        return sharding.local_bytes(boundary, sharding.boundary) if self.training.stack.keeps_sent else 0

    def table_workspace_bytes(self, mesh: Mesh, sharding: Sharding) -> int:
        """Beside the embedding's gradient: the sum with the head's of a shared table, or before that, where tensor parallelism divides
        the table and the stack makes its gradient whole before it is cut, the whole one."""
        embedding = self.graph(1).embedding.operators[0]
        whole = sum(parameter.num_elements for parameter in embedding.parameters)
        made = self.training.stack.whole_table_gradients and sharding.parameter_elements(embedding) < whole
        return max(self.shared_table_bytes(mesh, sharding), whole * self.training.precision.num_bytes if made else 0)

    def shared_table_bytes(self, mesh: Mesh, sharding: Sharding) -> int:
        """The gradient of the token table as autograd makes it, where head and embedding are one parameter.

        It holds the head's until it has the embedding's, and makes a third of both. Counted where the stack frees gradients.
        """
        if not self.tied or mesh.pp > 1 or not self.training.stack.frees_gradients:
            return 0
        head = self.graph(1).head
        own = owned_parameters(head, sharding) - owned_parameters(head, sharding, with_tied=False)
        return self.training.precision.num_bytes * own

    def tied_reduction(self, mesh: Mesh, sharding: Sharding) -> Seconds:
        """The once-a-step reduction of a tied embedding's two gradients (call only when `tied` and pp > 1)."""
        return self._once(("tied", mesh, sharding), lambda: tied_reduction(
            self.graph(1).embedding, mesh=mesh, sharding=sharding, machine=self.machine, training=self.training))
