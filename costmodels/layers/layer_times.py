"""Seconds and saved bytes of one layer and micro-batch, each priced once per way of running it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.host.offload import copy_time
from parplan.costmodels.layers.document_waits import replica_share, wait_of
from parplan.costmodels.layers.halved_layer import HalvedOperators
from parplan.costmodels.layers.layer_price import (
    LayerOperators,
    LayerTime,
    PricedBase,
    StageAxes,
    price_operators,
)
from parplan.costmodels.layers.model_layers import ModelLayers
from parplan.costmodels.layers.recompute import (
    Recompute,
    RecomputedOperators,
    backward_bytes,
    gradient_bytes,
    host_bytes_by_operator,
    ideal_saved_bytes,
    saved_bytes,
    workspace_of,
)
from parplan.costmodels.layers.tensor_flow import tensor_flows_of
from parplan.costmodels.operators.compute import FREE, OperatorTime, operator_time
from parplan.costmodels.operators.micro_batches import numbers_of_tensors, of_all_sizes
from parplan.costmodels.operators.sharding import Sharding, without_experts
from parplan.profiles.models.operator_graph import LayerClass, LayerKey, Operator
from parplan.profiles.provenance import ZERO, Seconds


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


class LayerTimes(ModelLayers):
    """Seconds and saved bytes of one layer and micro-batch, without data parallelism.

    sizes    micro-batch sizes that are priced at once
    """

    sizes: tuple[int, ...] = ()

    def divided_layer(
        self, kind: LayerKey, micro_batch_size: int, sharding: Sharding
    ) -> LayerClass:
        """The layer with the batch of all ranks on the axes of `sharding`, and a rank's tokens."""
        return self.layer(kind, micro_batch_size * sharding.data, sharding.part)

    def divided_kept_layer(
        self, kind: LayerKey, micro_batch_size: int, sharding: Sharding
    ) -> LayerClass:
        """The layer of `divided_layer` with the tensors that its operators save on this device."""
        return self.kept_layer(kind, micro_batch_size * sharding.data, sharding.part)

    def _alike(self, kind: LayerKey, micro_batch_size: int, sharding: Sharding) -> tuple[int, ...]:
        """Returns the micro-batch sizes that are priced with a size, whose layers are alike."""
        if micro_batch_size not in self.sizes or sharding.data > 1 or sharding.overlap:
            return (micro_batch_size,)

        def tensors(size: int) -> tuple[tuple[int, ...], ...]:
            return self._once(
                ("tensors", kind, size, sharding.part),
                lambda: numbers_of_tensors(self.layer(kind, size, sharding.part)),
            )

        mine = tensors(micro_batch_size)
        return self._once(
            ("alike", kind, sharding.part, mine),
            lambda: tuple(size for size in self.sizes if tensors(size) == mine),
        )

    def _layer_of_sizes(
        self, kind: LayerKey, sizes: tuple[int, ...], sharding: Sharding
    ) -> LayerClass:
        if len(sizes) == 1:
            return self.divided_layer(kind, sizes[0], sharding)
        return self._once(
            ("of sizes", kind, sizes, sharding.part),
            lambda: of_all_sizes([self.layer(kind, size, sharding.part) for size in sizes]),
        )

    def _operators(
        self, kind: LayerKey, sizes: tuple[int, ...], sharding: Sharding
    ) -> LayerOperators | HalvedOperators:
        """Returns the prices of the operators, which are arrays if there are several sizes."""

        def make() -> LayerOperators | HalvedOperators:
            return price_operators(
                self._layer_of_sizes(kind, sizes, sharding),
                sharding,
                self.machine,
                self.training,
                self.inside(sharding.degrees),
                lambda operator: self._operator_time(operator, kind, sizes, sharding),
                self._base(kind, sizes, sharding),
            )

        return self._once(("operators", kind, sizes, sharding), make)

    def _base(
        self, kind: LayerKey, sizes: tuple[int, ...], sharding: Sharding
    ) -> PricedBase | None:
        """Returns the operators with the base of a sharding, None for a base."""
        if sharding.base is sharding:
            return None
        operators = self._operators(kind, sizes, sharding.base)
        assert isinstance(operators, LayerOperators), "blocks in halves have no experts"
        flows = self._once(
            ("flows", kind, sizes, sharding.base),
            lambda: tensor_flows_of(self._layer_of_sizes(kind, sizes, sharding), sharding.base),
        )
        return PricedBase(flows, operators)

    def apart(self, kind: LayerKey, sharding: Sharding) -> Sharding:
        """Returns the sharding, without the ranks of experts where a layer has no experts."""
        if sharding.ep == sharding.etp == 1 or self.layer(kind, 1).has_experts:
            return sharding
        return without_experts(sharding)

    def _operator_time(
        self, operator: Operator, kind: LayerKey, sizes: tuple[int, ...], sharding: Sharding
    ) -> OperatorTime:
        experts = sharding.experts if operator.in_mixture or operator.on_copies else None
        way = sharding.splits(operator), sharding.degrees, experts, sharding.cp
        return self._once(
            ("operator", kind, sizes, operator.name, way),
            lambda: operator_time(operator, sharding, self.machine, self.training),
        )

    def replica_wait(
        self, kind: LayerKey, micro_batch_size: int, mesh: Mesh, sharding: Sharding, repeats: int
    ) -> OperatorTime:
        """Seconds that a layer waits for the replica with the longest documents (EQUATIONS K7).

        repeats     micro-batches after which the replicas meet
        The seconds are of one micro-batch.
        """
        wait = FREE
        if self.training.documents is None or mesh.dp == 1:
            return wait
        for operator in self.divided_layer(kind, micro_batch_size, sharding).operators:
            share = replica_share(operator, mesh.dp, repeats * micro_batch_size)
            if share:
                alone = self._operator_time(operator, kind, (micro_batch_size,), sharding)
                wait = wait.plus(wait_of(alone, share))
        return wait

    def inside(self, degrees: tuple[int, ...]) -> StageAxes:
        """The axes inside a stage, with the prices of their redistributions."""
        return self._once(
            ("inside", degrees), lambda: StageAxes(degrees, self.machine, self.training)
        )

    def layer_time(
        self,
        kind: LayerKey,
        micro_batch_size: int,
        sharding: Sharding,
        level: RecomputedOperators = Recompute.NONE,
    ) -> LayerTime:
        """One micro-batch through one layer of `kind`, without data-parallel communication."""
        sharding = self.apart(kind, sharding)
        return self._once(
            ("time", kind, micro_batch_size, sharding, level),
            lambda: self._layer_time(kind, micro_batch_size, sharding, level),
        )

    def _layer_time(
        self, kind: LayerKey, micro_batch_size: int, sharding: Sharding, level: RecomputedOperators
    ) -> LayerTime:
        sizes = self._alike(kind, micro_batch_size, sharding)
        times = self._once(
            ("times", kind, sizes, sharding, level),
            lambda: self._layer_times(kind, sizes, sharding, level),
        )
        return times[sizes.index(micro_batch_size)]

    def _layer_times(
        self, kind: LayerKey, sizes: tuple[int, ...], sharding: Sharding, level: RecomputedOperators
    ) -> tuple[LayerTime, ...]:
        """Returns the time of each micro-batch size."""
        operators = self._operators(kind, sizes, sharding)
        names = self.recompute_operators(kind, level)
        if level == Recompute.NONE or isinstance(operators, HalvedOperators):
            return operators.time(names).of_sizes(len(sizes))
        repeated, tp_repeated = (each.of_sizes(len(sizes)) for each in operators.again(names))
        return tuple(
            replace(
                self.layer_time(kind, size, sharding),
                recompute=repeated[number],
                tp_recompute=tp_repeated[number],
            )
            for number, size in enumerate(sizes)
        )

    def weight_s(self, kind: LayerKey, micro_batch_size: int, sharding: Sharding) -> float:
        """Seconds of the backward pass of one layer of `kind` for the gradients of its weights."""
        sizes = self._alike(kind, micro_batch_size, sharding)
        weights = self._once(
            ("weight", kind, sizes, sharding),
            lambda: self._operators(kind, sizes, sharding).weight_time.of_sizes(len(sizes)),
        )
        return weights[sizes.index(micro_batch_size)].value_s

    def waiting_bytes(self, kind: LayerKey, micro_batch_size: int, sharding: Sharding) -> float:
        """Bytes that a layer holds between the gradients of its input and of its weights.

        They are held besides the stash: the gradients of the outputs of operators with trained
        weights, as torch.distributed.pipelining stores them.
        """

        def make() -> float:
            layer = self.divided_layer(kind, micro_batch_size, sharding)
            weighty = (op for op in layer.operators if op.trained)
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
            lambda: max(self._backward_bytes(kind, layer, micro_batch_size, sharding)),
        )
        whole = self._saved_bytes(kind, micro_batch_size, sharding, ())
        kept = self._saved_bytes(kind, micro_batch_size, sharding, recomputed)
        return workspace_of(whole, kept, widest, stack)

    def _backward_bytes(
        self, kind: LayerKey, layer: LayerClass, micro_batch_size: int, sharding: Sharding
    ) -> tuple[int, ...]:
        """Bytes that the backward pass of each operator adds to the saved bytes, the last first.

        With another number of ranks for the experts only what depends on it is counted again.
        """
        stack, base = self.training.stack, sharding.base
        if base is sharding:
            return tuple(backward_bytes(layer, sharding, stack))
        added = self._once(
            ("backward bytes", kind, micro_batch_size, base),
            lambda: self._backward_bytes(kind, layer, micro_batch_size, base),
        )
        return tuple(
            num_bytes
            if operator.name not in layer.of_form
            else num_bytes
            + gradient_bytes(operator, sharding, stack)
            - gradient_bytes(operator, base, stack)
            for operator, num_bytes in zip(reversed(layer.operators), added, strict=True)
        )

    def saved_bytes(
        self, kind: LayerKey, micro_batch_size: int, sharding: Sharding, level: RecomputedOperators
    ) -> int:
        """Bytes of `activations` that are held for the backward pass."""
        recomputed = self.recompute_operators(kind, level)
        sharding = self.apart(kind, sharding)
        return self._saved_bytes(kind, micro_batch_size, sharding, recomputed)

    def _saved_bytes(
        self, kind: LayerKey, micro_batch_size: int, sharding: Sharding, recomputed: tuple[str, ...]
    ) -> int:
        sharding = sharding.base
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
        sharding = self.apart(kind, sharding)

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
        layer = self.kept_layer(kind, micro_batch_size, sharding.part)
        recomputed = self.recompute_operators(kind, level)
        return self._once(
            ("ideal", kind, micro_batch_size, sharding.part, sharding.tp, recomputed, on_host),
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
