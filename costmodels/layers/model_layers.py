"""The layers of a model of any kind, as far as their prices need to know.

The kinds are parts of a described model or shards of a traced one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from dataclasses import dataclass, replace
from typing import Self

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.keyed_cache import KeyedCache
from parplan.costmodels.layers.chunked_layer import (
    Chunking,
)
from parplan.costmodels.layers.data_parallel import (
    shared_reduction,
)
from parplan.costmodels.layers.model_states import ideal_states
from parplan.costmodels.layers.recompute import (
    RecomputedOperators,
)
from parplan.costmodels.operators.host_launch import measured_layout_costs
from parplan.costmodels.operators.kernels import fused_kernel_of
from parplan.costmodels.operators.sharding import ALL_TOKENS, Sharding, TokenPart
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.shipped_profiles import Machine
from parplan.profiles.models.operator_graph import LayerClass, LayerKey, Tensor
from parplan.profiles.models.spec import Precision, TrainingSpec
from parplan.profiles.provenance import ZERO, Seconds
from parplan.profiles.stack import AttentionKernel, TowerDivision

Ends = tuple[tuple[LayerKey, Sharding], ...]  # embedding and head with their shardings
IDS_BYTES = 16  # id and target of a token, as int64


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


class ModelLayers(ABC):
    """The layers of a model, trained as `training` on `machine`, and what their prices depend on.

    zero_ranks  neighbours that hold one copy of sharded states together, on meshes whose dp x cp
                it divides; None for all of them
    offload     parts of every layer that the host holds
    chunking    how a device holds chunks in layouts with chunks; no other price depends on it
    ends        the shardings of embedding and head where they are not those of a layout
    tower       the way in which the tensor-parallel ranks of a layout run a tower

    Raises ConfigError where the stack has no kernel for the chosen attention, or the host would
    hold states of a model that is fine-tuned.
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
        _require_states_on_device(training, offload)
        self.training = training
        self.machine = machine
        self.zero_ranks = zero_ranks
        self.offload = offload
        self.chunking = chunking or Chunking()
        self.ends: Ends = ()
        self.tower = TowerDivision.TENSOR
        self.once = self._once = KeyedCache()

    @abstractmethod
    def layer(
        self, kind: LayerKey, micro_batch_size: int, of: TokenPart = ALL_TOKENS
    ) -> LayerClass:
        """The operators of a layer of `kind`, for a part of the tokens."""

    def whole_layer(self, kind: LayerKey) -> LayerClass:
        """The operators of a layer with those that the host runs, for one sequence."""
        return self.layer(kind, 1)

    def kept_layer(
        self, kind: LayerKey, micro_batch_size: int, of: TokenPart = ALL_TOKENS
    ) -> LayerClass:
        """The layer with the tensors that its operators save on this device."""
        return self.layer(kind, micro_batch_size, of)

    @abstractmethod
    def recompute_operators(self, kind: LayerKey, level: RecomputedOperators) -> tuple[str, ...]:
        """The operators that `level` recomputes in a layer of `kind`."""

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
    def crossing_tensors(
        self, cut_class: int, micro_batch_size: int, of: TokenPart = ALL_TOKENS
    ) -> tuple[Tensor, ...]:
        """Returns the tensors that a pipeline stage receives at a cut of a class."""

    @property
    @abstractmethod
    def num_parameters(self) -> int:
        """Parameters of the model, each counted once."""

    @property
    def num_trained_parameters(self) -> int:
        """Parameters that have gradients."""
        return self.num_parameters

    @property
    def frozen_bytes(self) -> int:
        """Bytes of one copy of the frozen parameters."""
        return 0

    def ideal_states(self, ranks: int) -> tuple[float, float, float]:
        """Parameter, gradient and optimizer bytes of one copy of the model over `ranks` ranks."""
        return ideal_states(
            self.num_trained_parameters, ranks, self.training, frozen=self.frozen_bytes
        )

    @property
    @abstractmethod
    def flops_per_sequence(self) -> int:
        """Forward and backward model FLOPs of a sequence, without recompute (EQUATIONS K4)."""

    def own_sharding(self, kind: LayerKey, sharding: Sharding) -> Sharding:
        """Returns the sharding of a layer in a layout with `sharding`."""
        return next((own for end, own in self.ends if end is kind), sharding)

    def with_ends(self, ends: Ends) -> Self:
        """Returns the same prices for layouts whose embedding and head have these shardings."""
        prices = copy(self)  # shares the cache of layers
        prices.ends = ends
        return prices

    def with_tower(self, way: TowerDivision) -> Self:
        """Returns the same prices for layouts whose tower the tensor-parallel ranks run so."""
        if way is self.tower:
            return self
        prices = copy(self)  # shares the cache of layers
        prices.tower = way
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

    def shared_bytes(self, shared: ParameterSharing, sharding: Sharding) -> int:
        """Bytes of the gradients of shared parameters that one tensor-parallel rank holds."""
        return self.training.gradient_precision.num_bytes * self._shared_elements(shared, sharding)

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
        """The number of replicas that hold one copy of sharded states together."""
        if self.zero_ranks and mesh.replicas % self.zero_ranks == 0 and mesh.ep == 1:
            return self.zero_ranks
        return mesh.replicas

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


def _require_states_on_device(training: TrainingSpec, offload: tuple[Offload, ...]) -> None:
    """Raises ConfigError where the host would hold states of a model that is fine-tuned."""
    states = [str(each) for each in offload if each is not Offload.ACTIVATIONS]
    if training.fine_tuning is not None and states:
        raise ConfigError(
            f"--offload {','.join(states)}: states stay on the device where a model is fine-tuned",
            hint="leave it out, or allow activations alone",
        )
