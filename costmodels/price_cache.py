"""The price cache: every layer of one model on one machine, priced once per way of running it."""

from __future__ import annotations

from dataclasses import replace
from enum import IntEnum
from functools import cached_property
from typing import Self

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.host.host_embedding import HostEmbedding, host_embedding_of, without_table
from parplan.costmodels.host.offload import COPIED_BYTES, Offload, copy_time
from parplan.costmodels.layers.chunked_layer import Chunking
from parplan.costmodels.layers.data_parallel import DataParallelTime, has_tied_head
from parplan.costmodels.layers.halved_layer import (
    HalvedOperators,
    halved_workspace_bytes,
    price_halves,
)
from parplan.costmodels.layers.layer_price import LayerOperators
from parplan.costmodels.layers.layer_price_cache import (
    LayerPriceCache,
    LayerStates,
    ParameterGroup,
)
from parplan.costmodels.layers.model_layers import ParameterSharing
from parplan.costmodels.layers.model_states import OwnZero, frozen_bytes, local_parameters
from parplan.costmodels.layers.narrow_products import with_kept_casts
from parplan.costmodels.layers.recompute import RecomputedOperators, recompute_operators
from parplan.costmodels.layers.sub_pipeline import HALVES
from parplan.costmodels.operators.sharding import (
    ALL_TOKENS,
    SCATTERED,
    Sharding,
    TokenPart,
    of_tower,
)
from parplan.profiles.machines.shipped_profiles import Machine
from parplan.profiles.models.operator_graph import (
    LayerClass,
    LayerKey,
    LayerKind,
    ModelGraph,
    ModelPart,
    Operator,
    Tensor,
)
from parplan.profiles.models.spec import ModelSpec, TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.provenance import ZERO, Seconds
from parplan.profiles.stack import TowerDivision

TOKENS = "tokens"  # what a sharding divides where a table is whole over divided tokens


class Cut(IntEnum):
    """The classes of cuts: inside a tower, before a block that attends to it, and all others."""

    ANYWHERE = 0
    IN_TOWER = 1
    ATTENDING = 2


class PriceCache(LayerPriceCache):
    """Prices of the layers of `model`; the head's recompute is always none.

    sizes    micro-batch sizes that are priced at once, as soon as one of them is
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
        sizes: tuple[int, ...] = (),
    ) -> None:
        super().__init__(
            training, machine, zero_ranks=zero_ranks, offload=offload, chunking=chunking
        )
        self.model = model
        self.sizes = sizes

    def on(self, machine: Machine, training: TrainingSpec | None = None) -> Self:
        return type(self)(
            self.model,
            training or self.training,
            machine,
            zero_ranks=self.zero_ranks,
            offload=self.offload,
            chunking=self.chunking,
        )

    def graph(self, micro_batch_size: int, of: TokenPart = ALL_TOKENS) -> ModelGraph:
        """Returns the operator graph of a part of the tokens of a micro-batch."""
        if micro_batch_size == 1 and of is ALL_TOKENS:
            return self._unit_graph
        return self._once(
            ("graph", micro_batch_size, of),
            lambda: self._graph(micro_batch_size, of, plain_dropout=False),
        )

    @cached_property
    def _unit_graph(self) -> ModelGraph:
        """The operator graph of one sequence."""
        return self._once(
            ("graph", 1, ALL_TOKENS), lambda: self._graph(1, ALL_TOKENS, plain_dropout=False)
        )

    def _graph(self, micro_batch_size: int, of: TokenPart, *, plain_dropout: bool) -> ModelGraph:
        return build_graph(
            self.model,
            self.training,
            micro_batch_size,
            plain_dropout=plain_dropout,
            cp=of.cp,
            exchanged=of.exchanged,
        )

    counts_small_tensors = False

    @property
    def num_layers(self) -> int:
        return self.model.num_blocks + 2

    def key(self, layer: int, first: int) -> LayerKey:
        return self.graph(1).key(layer)

    def cut_class(self, cut: int) -> int:
        tower = self.model.tower
        if tower is None:
            return Cut.ANYWHERE
        part = self.graph(1).part_behind(cut)
        if part in (ModelPart.TOWER, ModelPart.PROJECTOR):
            return Cut.IN_TOWER
        return Cut.ATTENDING if tower.attended and part is ModelPart.LANGUAGE else Cut.ANYWHERE

    def crossing_tensors(
        self, cut_class: int, micro_batch_size: int, of: TokenPart = ALL_TOKENS
    ) -> tuple[Tensor, ...]:
        """Returns the tensors that a pipeline stage receives at a cut of a class.

        Inside a tower the output of the embedding travels with the tensor between two layers, and
        behind it the output of a tower that all blocks attend to. Pixels come from the batch, on
        any stage.
        """
        graph = self.graph(micro_batch_size, of)
        if cut_class == Cut.IN_TOWER:
            return graph.tower_boundary, graph.boundary
        attended = (graph.attended,) if cut_class == Cut.ATTENDING else ()
        return (graph.boundary, *attended)

    def besides_bytes(self, first: int, end: int, micro_batch_size: int) -> float:
        """Bytes of the output of a tower, once for all blocks of a stage that attend to it.

        Sequence parallelism, which divides it, is left out.
        """
        tower = self.model.tower
        if tower is None or not tower.attended:
            return 0.0
        graph = self.graph(micro_batch_size)
        attends = any(graph.part_behind(layer) is ModelPart.LANGUAGE for layer in range(first, end))
        return float(graph.attended.num_bytes) if attends else 0.0

    @property
    def num_parameters(self) -> int:
        return self.graph(1).num_parameters

    @property
    def num_trained_parameters(self) -> int:
        return self.graph(1).num_trained_parameters

    @property
    def frozen_bytes(self) -> int:
        graph = self.graph(1)
        return sum(
            frozen_bytes(p.num_elements, self.training, quantised=p.quantised) * run.count
            for run in graph.layers
            for operator in run.layer.operators
            for p in operator.parameters
            if not (p.trained or p.tied)
        )

    @property
    def flops_per_sequence(self) -> int:
        return self.graph(1).model_flops

    @property
    def shared_parameters(self) -> tuple[ParameterSharing, ...]:
        if not self.tied:
            return ()
        table = sum(
            parameter.num_elements
            for operator in self.graph(1).embedding.operators
            for parameter in operator.parameters
            if operator.parallel_dim == "vocab"
        )
        return (ParameterSharing((0, self.model.num_blocks + 1), table),)

    def shared_reduction(self, shared: ParameterSharing, mesh: Mesh, sharding: Sharding) -> Seconds:
        """Seconds a step to sum the gradients of both copies of a tied table.

        Gradients on the host are copied to the devices for it, and back. A frozen table has none.
        """
        if not self._trains_table:
            return ZERO
        reduced = super().shared_reduction(shared, mesh, sharding)
        if not self.table_on_host:
            return reduced
        copied, cluster = (
            COPIED_BYTES * self._shared_elements(shared, sharding),
            self.machine.cluster,
        )
        return reduced + copy_time(copied, cluster) + copy_time(copied, cluster, to_host=True)

    def _shared_elements(self, shared: ParameterSharing, sharding: Sharding) -> int:
        return sharding.parameter_elements(self._table(sharding))

    @property
    def _trains_table(self) -> bool:
        return table_of(self.graph(1).embedding).trained

    def _table(self, sharding: Sharding) -> Operator:
        """Returns the token table of the layer, embedding or head, that has `sharding`."""
        tables = table_of(self.graph(1).embedding), table_of(self.graph(1).head)
        named = {name for name, _ in sharding.own}
        return next((table for table in tables if table.name in named), tables[0])

    def table_division(self, kind: LayerKey, sharding: Sharding) -> tuple[str | None, ...]:
        if not self.tied:
            return ()
        return table_division(self.layer(kind, 1), self.own_sharding(kind, sharding))

    def own_sharding(self, kind: LayerKey, sharding: Sharding) -> Sharding:
        own = super().own_sharding(kind, sharding)
        if self.tower is TowerDivision.TENSOR or sharding.tp == 1:
            return own
        return of_tower(own, self.layer(kind, 1).part, self.tower)

    def layer(
        self, kind: LayerKey, micro_batch_size: int, of: TokenPart = ALL_TOKENS
    ) -> LayerClass:
        return self._on_device(
            self.graph(micro_batch_size, of).layer_class(kind), ("layer", micro_batch_size, of)
        )

    def whole_layer(self, kind: LayerKey) -> LayerClass:
        return self.graph(1).layer_class(kind)

    def kept_layer(
        self, kind: LayerKey, micro_batch_size: int, of: TokenPart = ALL_TOKENS
    ) -> LayerClass:
        layer = self._on_device(
            self.kept_graph(micro_batch_size, of).layer_class(kind),
            ("kept layer", micro_batch_size, of),
        )
        if self.training.products is None:
            return layer
        return self._once(
            ("kept casts", kind, micro_batch_size, of),
            lambda: with_kept_casts(
                layer, self.training, self.machine.cluster.device.compute_capability
            ),
        )

    def _on_device(self, layer: LayerClass, key: tuple[str, int, TokenPart]) -> LayerClass:
        """Returns the layer, without the token table if the host looks it up."""
        if not self.looks_up(layer.kind):
            return layer
        return self._once(key, lambda: without_table(layer))

    def with_table(self, *, on_host: bool) -> PriceCache:
        """Returns the same prices with the token table on the host, or on the device."""
        if self.table_on_host == on_host:
            return self
        offload = (
            *(offloaded for offloaded in self.offload if offloaded is not Offload.LOOKUP),
            *((Offload.LOOKUP,) if on_host else ()),
        )
        moved = self._once(
            ("other table", self.offload),
            lambda: PriceCache(
                self.model,
                self.training,
                self.machine,
                zero_ranks=self.zero_ranks,
                offload=offload,
                sizes=self.sizes,
            ),
        )
        return self._once(
            ("other table", self.offload, self.chunking, self.ends),
            lambda: moved.within(self.chunking).with_ends(self.ends),
        )

    def stays_gathered(self, kind: LayerKey, mesh: Mesh) -> bool:
        return self.tied and mesh.pp == 1

    @property
    def table_on_host(self) -> bool:
        """True if the host holds the states of the token table."""
        return Offload.LOOKUP in self.offload

    @property
    def gradients_on_host(self) -> bool:
        """True if gradients of layers are summed on the host; a tied table's are on the device."""
        return self.offloads_states or (self.table_on_host and not self.tied)

    def looks_up(self, kind: LayerKey) -> bool:
        return kind is LayerKind.EMBEDDING and self.table_on_host and not self.tied

    def groups(
        self, kind: LayerKey, mesh: Mesh, sharding: Sharding, zero: int, own_zero: OwnZero = ()
    ) -> tuple[ParameterGroup, ...]:
        """Returns the groups of the parameters of a layer.

        A tied table on the host is one of embedding or head, beside their other parameters. On one
        rank it is at stage 0, as they are.
        """
        groups = super().groups(kind, mesh, sharding, zero, own_zero)
        ends = kind in (LayerKind.EMBEDDING, LayerKind.HEAD)
        if not (ends and self.tied and self.table_on_host) or self.offloads_states:
            return groups
        layer = self.layer(kind, 1)
        name, stage = table_of(layer).name, zero if self.shards(mesh) > 1 else 0
        others = frozenset(op.name for op in layer.operators if op.name != name)
        return (
            ParameterGroup(stage, local_parameters(layer, sharding, frozenset((name,))), True),
            ParameterGroup(stage, local_parameters(layer, sharding, others)),
        )

    def lookup(self, micro_batch_size: int, mesh: Mesh) -> HostEmbedding:
        """Returns the cost of the host's look-up (call only if the host holds the table)."""
        return self._once(
            ("lookup", micro_batch_size, mesh),
            lambda: host_embedding_of(self.graph(micro_batch_size).embedding, mesh, self.machine),
        )

    def data_parallel(
        self,
        kind: LayerKey,
        micro_batch_size: int,
        mesh: Mesh,
        sharding: Sharding,
        zero: int,
        own_zero: OwnZero = (),
    ) -> DataParallelTime:
        """Returns the data-parallel time of a layer.

        An embedding on the host adds its look-up, the exchange of activations and the update of the
        table.
        """
        plain = super().data_parallel(kind, micro_batch_size, mesh, sharding, zero, own_zero)
        if not self.looks_up(kind):
            return plain
        lookup = self.lookup(micro_batch_size, mesh)
        return replace(
            plain,
            forward=plain.forward + lookup.forward + lookup.tokens + lookup.exchange,
            backward=plain.backward + lookup.backward + lookup.exchange,
            optimizer=plain.optimizer + lookup.update,
            host=plain.host + lookup.forward + lookup.backward,
        )

    def states(
        self,
        kind: LayerKey,
        mesh: Mesh,
        sharding: Sharding,
        zero: int,
        own_zero: OwnZero = (),
    ) -> LayerStates:
        """Returns the states of a layer, with a token table on the host.

        One copy of that table is ideal at any location.
        """
        plain = super().states(kind, mesh, sharding, zero, own_zero)
        if not self.looks_up(kind):
            return plain
        whole = self.with_table(on_host=False).states(kind, mesh, sharding, zero)
        return replace(plain, host=plain.host + self.lookup(1, mesh).host_bytes, ideal=whole.ideal)

    @property
    def plain_dropout(self) -> bool:
        """True if dropout is that of torch on a CPU, not a fused kernel.

        It changes memory alone: the seconds of an operator are those of GPUs.
        """
        return (
            self.training.stack.plain_dropout_on_cpu
            and self.machine.cluster.device.is_host
            and self.model.dropout > 0
        )

    def kept_graph(self, micro_batch_size: int, of: TokenPart = ALL_TOKENS) -> ModelGraph:
        """Returns the graph with the saved tensors of this device."""
        if not self.plain_dropout:
            return self.graph(micro_batch_size, of)
        return self._once(
            ("kept graph", micro_batch_size, of),
            lambda: self._graph(micro_batch_size, of, plain_dropout=True),
        )

    @property
    def tied(self) -> bool:
        return has_tied_head(self.graph(1).head)

    def recompute_operators(self, kind: LayerKey, level: RecomputedOperators) -> tuple[str, ...]:
        """Returns the operators that `level` recomputes in a layer.

        Only blocks recompute, and those without a backward pass have nothing to recompute.
        """
        layer = self.kept_graph(1).layer_class(kind)
        if kind.role is not LayerKind.BLOCK or not layer.gradient:
            return ()
        return recompute_operators(layer, level)

    def _operators(
        self, kind: LayerKey, sizes: tuple[int, ...], sharding: Sharding
    ) -> LayerOperators | HalvedOperators:
        """Prices operators; blocks with overlap run as two halves of the micro-batch."""
        if not (kind.role is LayerKind.BLOCK and sharding.overlap):
            return super()._operators(kind, sizes, sharding)
        (micro_batch_size,) = sizes

        def make() -> HalvedOperators:
            half = self.layer(kind, micro_batch_size // HALVES, sharding.part)
            whole = self.layer(kind, micro_batch_size, sharding.part)
            return price_halves(half, whole, sharding, self.machine, self.training)

        return self._once(("operators", kind, sizes, sharding), make)

    def row_edges(self, micro_batch_size: int, sharding: Sharding) -> tuple[Seconds, Seconds]:
        """Returns the seconds that blocks of a stage pay beside `layer_time`, forward and backward.

        They are the ends of a row of halves, at level 3 alone.
        """
        if not sharding.overlap:
            return ZERO, ZERO

        def make() -> tuple[Seconds, Seconds]:
            operators = self._operators(LayerKind.BLOCK, (micro_batch_size,), sharding)
            assert isinstance(operators, HalvedOperators)  # blocks with overlap are halved
            return operators.edges()

        return self._once(("edges", micro_batch_size, sharding), make)

    def _workspace_bytes(
        self,
        kind: LayerKey,
        layer: LayerClass,
        micro_batch_size: int,
        sharding: Sharding,
        recomputed: tuple[str, ...],
    ) -> int:
        if not (kind.role is LayerKind.BLOCK and sharding.overlap):
            return super()._workspace_bytes(kind, layer, micro_batch_size, sharding, recomputed)
        half = self.kept_layer(kind, micro_batch_size // HALVES, sharding.part)
        return halved_workspace_bytes(half, layer, sharding, recomputed, self.training.stack)

    def table_workspace_bytes(self, mesh: Mesh, sharding: Sharding) -> int:
        """Bytes of temporaries beside the gradient of an embedding with `sharding`.

        They are the sum with the head's gradient of a shared table, or the whole gradient of a
        divided table, if the stack makes that before it is cut. The larger counts.
        """
        embedding = table_of(self.graph(1).embedding)
        whole = embedding.num_parameters
        made = (
            self.training.stack.whole_table_gradients
            and embedding.trained
            and sharding.parameter_elements(embedding) < whole
        )
        return max(
            self.shared_table_bytes(mesh, sharding),
            whole * self.training.precision.num_bytes if made else 0,
        )

    def shared_table_bytes(self, mesh: Mesh, sharding: Sharding) -> int:
        """Bytes of the token table's gradient in autograd, if head and embedding are one parameter.

        sharding    that of the embedding, or of the head

        Autograd holds the head's gradient until the embedding's exists, and allocates a third
        tensor for their sum. Zero unless the stack frees gradients.
        """
        keeps = self.training.stack.frees_gradients and self._trains_table
        if not self.tied or mesh.pp > 1 or not keeps:
            return 0
        elements = sharding.parameter_elements(self._table(sharding))
        return self.training.precision.num_bytes * elements


def table_of(layer: LayerClass) -> Operator:
    """Returns the operator of embedding or head whose matrix is the token table."""
    return next(op for op in layer.operators if op.parameters and op.parallel_dim == "vocab")


def table_division(layer: LayerClass, sharding: Sharding) -> tuple[str | None, ...]:
    """Returns by axis the division of the token table in embedding or head.

    It is the dim of the table, TOKENS where the ranks hold all of it and parts of its gradient, or
    None. Gradients of two copies can be added as they are where both have the same.
    """
    splits = sharding.splits(table_of(layer))
    return tuple(TOKENS if split.dim in SCATTERED else split.dim for split in splits)


def described_prices(price_cache: LayerPriceCache) -> PriceCache:
    """Returns the prices of a described model."""
    assert isinstance(price_cache, PriceCache), "the model is described"
    return price_cache
