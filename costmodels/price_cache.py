"""The price book: every layer of one described model on one machine, priced once per way of running
it.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace

from parplan.costmodels.communication.collectives import Collective, collective_time
from parplan.costmodels.communication.mesh import Axis, Mesh, place
from parplan.costmodels.host.host_embedding import HostEmbedding, host_embedding_of, without_table
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.host.state_location import StateLocation
from parplan.costmodels.layers.chunked_layer import BlockCost, Chunking, block_cost
from parplan.costmodels.layers.data_parallel import DataParallelTime, has_tied_head, tied_reduction
from parplan.costmodels.layers.halved_layer import (
    HalvedOperators,
    halved_workspace_bytes,
    price_halves,
)
from parplan.costmodels.layers.layer_price import LayerOperators
from parplan.costmodels.layers.layer_price_cache import LayerPriceCache, LayerStates
from parplan.costmodels.layers.model_states import owned_parameters
from parplan.costmodels.layers.recompute import RecomputedOperators, recompute_operators
from parplan.costmodels.layers.sub_pipeline import HALVES
from parplan.costmodels.operators.sharding import Sharding
from parplan.profiles.machines.shipped_profiles import Machine
from parplan.profiles.models.operator_graph import LayerClass, LayerKind, ModelGraph
from parplan.profiles.models.spec import ModelSpec, Precision, TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.provenance import ZERO, Seconds


class PriceCache(LayerPriceCache[LayerKind]):
    """Prices of the layers of `model`; the head's recompute is always none.

    chunking: how a device holds chunks, of layouts whose blocks are held in chunks; it does not
    change any other price
    """

    def __init__(
        self,
        model: ModelSpec,
        training: TrainingSpec,
        machine: Machine,
        *,
        zero_ranks: int | None = None,
        offload: tuple[Offload, ...] = (),
        chunking: Chunking | None = None,
    ) -> None:
        super().__init__(training, machine, zero_ranks=zero_ranks, offload=offload)
        self.model = model
        self.chunking = chunking or Chunking()

    def within(self, chunking: Chunking) -> PriceCache:
        """The same prices for devices that hold chunks in another way."""
        found = copy(self)  # what is known of layers is shared
        found.chunking = chunking
        return found

    def graph(self, micro_batch_size: int) -> ModelGraph:
        return self._once(
            ("graph", micro_batch_size),
            lambda: build_graph(self.model, self.training, micro_batch_size),
        )

    def layer(self, kind: LayerKind, micro_batch_size: int) -> LayerClass:
        return self._on_device(
            self.graph(micro_batch_size).layer_class(kind), ("layer", micro_batch_size)
        )

    def kept_layer(self, kind: LayerKind, micro_batch_size: int) -> LayerClass:
        return self._on_device(
            self.kept_graph(micro_batch_size).layer_class(kind), ("kept layer", micro_batch_size)
        )

    def _on_device(self, layer: LayerClass, key: tuple[str, int]) -> LayerClass:
        """The layer, without the token table where the host looks it up."""
        if not self.looks_up(layer.kind):
            return layer
        return self._once(key, lambda: without_table(layer))

    @property
    def outside(self) -> PriceCache:
        """Prices of embedding and head where blocks are in chunks: FSDP2 keeps and reduces
        gradients of fp32 shards in fp32, of which precision those of the chunks may be.
        """
        if self.training.gradient_precision is Precision.FP32:
            return self
        return self._once(
            "outside",
            lambda: PriceCache(
                self.model,
                replace(self.training, gradient_precision=Precision.FP32),
                self.machine,
                zero_ranks=self.zero_ranks,
                offload=self.offload,
                chunking=self.chunking,
            ),
        )

    def with_table(self, *, on_host: bool) -> PriceCache:
        """The same with the token table on the host, or on the device."""
        if self.looks_up(LayerKind.EMBEDDING) == on_host:
            return self
        offload = (
            *(what for what in self.offload if what is not Offload.LOOKUP),
            *((Offload.LOOKUP,) if on_host else ()),
        )
        other = self._once(
            "other table",
            lambda: PriceCache(
                self.model, self.training, self.machine, zero_ranks=self.zero_ranks, offload=offload
            ),
        )
        return self._once(("other table", self.chunking), lambda: other.within(self.chunking))

    def looks_up(self, kind: LayerKind) -> bool:
        """Whether the host has the table of a layer of `kind`."""
        return kind is LayerKind.EMBEDDING and Offload.LOOKUP in self.offload

    def lookup(self, micro_batch_size: int, mesh: Mesh) -> HostEmbedding:
        """What the host's look-up costs (call only where it does so)."""
        return self._once(
            ("lookup", micro_batch_size, mesh),
            lambda: host_embedding_of(self.graph(micro_batch_size).embedding, mesh, self.machine),
        )

    def data_parallel(
        self, kind: LayerKind, micro_batch_size: int, mesh: Mesh, sharding: Sharding, zero: int
    ) -> DataParallelTime:
        """As of any layer; of the embedding with the host's look-up, the exchange of what it gives,
        and the update of the table.
        """
        plain = super().data_parallel(kind, micro_batch_size, mesh, sharding, zero)
        if not self.looks_up(kind):
            return plain
        own = self.lookup(micro_batch_size, mesh)
        return replace(
            plain,
            forward=plain.forward + own.forward + own.tokens + own.exchange,
            backward=plain.backward + own.backward + own.exchange,
            optimizer=plain.optimizer + own.update,
            host=plain.host + own.forward + own.backward,
        )

    def states(self, kind: LayerKind, mesh: Mesh, sharding: Sharding, zero: int) -> LayerStates:
        """As of any layer, with the table that the host has, of which one copy counts wherever it
        lies.
        """
        plain = super().states(kind, mesh, sharding, zero)
        if not self.looks_up(kind):
            return plain
        whole = self.with_table(on_host=False).states(kind, mesh, sharding, zero)
        return replace(plain, host=plain.host + self.lookup(1, mesh).host_bytes, ideal=whole.ideal)

    @property
    def plain_dropout(self) -> bool:
        """Whether dropout is that of torch on a CPU, no fused kernel. Of memory alone: what an
        operator takes is the price of GPUs.
        """
        return (
            self.training.stack.plain_dropout_on_cpu
            and self.machine.cluster.device.is_host
            and self.model.dropout > 0
        )

    def kept_graph(self, micro_batch_size: int) -> ModelGraph:
        """The graph with what the operators keep on this device."""
        if not self.plain_dropout:
            return self.graph(micro_batch_size)
        return self._once(
            ("kept graph", micro_batch_size),
            lambda: build_graph(self.model, self.training, micro_batch_size, plain_dropout=True),
        )

    @property
    def tied(self) -> bool:
        return has_tied_head(self.graph(1).head)

    def recompute_operators(self, kind: LayerKind, level: RecomputedOperators) -> tuple[str, ...]:
        """The operators that `level` recomputes in a layer of `kind`: only blocks recompute."""
        return (
            recompute_operators(self.kept_graph(1).layer_class(kind), level)
            if kind is LayerKind.BLOCK
            else ()
        )

    def _operators(
        self, kind: LayerKind, micro_batch_size: int, sharding: Sharding
    ) -> LayerOperators | HalvedOperators:
        """Those of blocks that run as two halves of the micro-batch are priced as such."""
        if not (kind is LayerKind.BLOCK and sharding.overlap):
            return super()._operators(kind, micro_batch_size, sharding)

        def make() -> HalvedOperators:
            half, whole = (
                self.layer(kind, size) for size in (micro_batch_size // HALVES, micro_batch_size)
            )
            return price_halves(half, whole, sharding, self.machine, self.training)

        return self._once(("operators", kind, micro_batch_size, sharding), make)

    def chunked(
        self,
        home: StateLocation,
        micro_batch_size: int,
        mesh: Mesh,
        sharding: Sharding,
        *,
        in_parameters: bool,
        elements: int | None = None,
    ) -> BlockCost:
        """One block held in chunks at `home`. elements: of its chunks on all data-parallel ranks
        together, without padding by default.
        """
        own = (
            owned_parameters(self.layer(LayerKind.BLOCK, 1), sharding)
            if elements is None
            else elements
        )

        def make() -> BlockCost:
            time = self.layer_time(LayerKind.BLOCK, micro_batch_size, sharding)
            return block_cost(
                home,
                own,
                time,
                mesh=mesh,
                in_parameters=in_parameters,
                machine=self.machine,
                training=self.training,
            )

        return self._once(
            ("chunked", home, micro_batch_size, mesh, sharding, in_parameters, own), make
        )

    def row_edges(self, micro_batch_size: int, sharding: Sharding) -> tuple[Seconds, Seconds]:
        """What the blocks of a stage pay forward and backward beside `layer_time`: the ends of a
        row of halves, at level 3 alone.
        """

        def make() -> tuple[Seconds, Seconds]:
            operators = self._operators(LayerKind.BLOCK, micro_batch_size, sharding)
            return operators.edges() if isinstance(operators, HalvedOperators) else (ZERO, ZERO)

        return self._once(("edges", micro_batch_size, sharding), make)

    def _workspace_bytes(
        self,
        kind: LayerKind,
        layer: LayerClass,
        micro_batch_size: int,
        sharding: Sharding,
        again: tuple[str, ...],
    ) -> int:
        if not (kind is LayerKind.BLOCK and sharding.overlap):
            return super()._workspace_bytes(kind, layer, micro_batch_size, sharding, again)
        half = self.kept_layer(kind, micro_batch_size // HALVES)
        return halved_workspace_bytes(half, layer, sharding, again, self.training.stack)

    def transfer(
        self, micro_batch_size: int, sharding: Sharding, *, crosses_nodes: bool, sharing: int
    ) -> Seconds:
        """One micro-batch's boundary activation from one pipeline rank to another; `sharing` of
        them leave a node at once (EQUATIONS T4).

        Without sequence parallelism each tensor-parallel rank sends the whole tensor, or its part,
        which the receivers gather (scatter/gather of Narayanan et al. 2021, section 4.1), where the
        stack does so.
        """

        def make() -> Seconds:
            boundary, machine = self.graph(micro_batch_size).block.input, self.machine
            assert boundary is not None
            n_bytes = sharding.local_bytes(boundary, sharding.boundary)
            parted = (
                self.training.stack.partitioned_transfers
                and sharding.tp > 1
                and n_bytes == boundary.num_bytes
            )
            part_bytes = -(-n_bytes // sharding.tp) if parted else n_bytes
            sent = self.message(part_bytes, crosses_nodes=crosses_nodes, sharing=sharing)
            if parted:
                ranks = place(
                    Mesh(pp=1, dp=1, tp=sharding.tp), Axis.TP, machine.cluster.gpus_per_node
                )
                sent += collective_time(Collective.ALL_GATHER, n_bytes, ranks, machine)
            return machine.corrected("pipeline", sent)

        return self._once(("transfer", micro_batch_size, sharding, crosses_nodes, sharing), make)

    def sent_bytes(self, micro_batch_size: int, sharding: Sharding) -> int:
        """What a stage sends of a micro-batch each way, where the stack keeps it until the end of
        the step.
        """
        boundary = self.graph(micro_batch_size).block.input
        assert boundary is not None
        return (
            sharding.local_bytes(boundary, sharding.boundary)
            if self.training.stack.keeps_sent
            else 0
        )

    def table_workspace_bytes(self, mesh: Mesh, sharding: Sharding) -> int:
        """Beside the embedding's gradient: the sum with the head's of a shared table, or before
        that, where tensor parallelism divides the table and the stack makes its gradient whole
        before it is cut, the whole one.
        """
        embedding = self.graph(1).embedding.operators[0]
        whole = sum(parameter.num_elements for parameter in embedding.parameters)
        made = (
            self.training.stack.whole_table_gradients
            and sharding.parameter_elements(embedding) < whole
        )
        return max(
            self.shared_table_bytes(mesh, sharding),
            whole * self.training.precision.num_bytes if made else 0,
        )

    def shared_table_bytes(self, mesh: Mesh, sharding: Sharding) -> int:
        """The gradient of the token table as autograd makes it, where head and embedding are one
        parameter.

        It holds the head's until it has the embedding's, and makes a third of both. Counted where
        the stack frees gradients.
        """
        if not self.tied or mesh.pp > 1 or not self.training.stack.frees_gradients:
            return 0
        head = self.graph(1).head
        own = owned_parameters(head, sharding) - owned_parameters(head, sharding, with_tied=False)
        return self.training.precision.num_bytes * own

    def tied_reduction(self, mesh: Mesh, sharding: Sharding) -> Seconds:
        """The once-a-step reduction of a tied embedding's two gradients (call only when `tied` and
        pp > 1).
        """
        return self._once(
            ("tied", mesh, sharding),
            lambda: tied_reduction(
                self.graph(1).embedding,
                mesh=mesh,
                sharding=sharding,
                machine=self.machine,
                training=self.training,
            ),
        )
