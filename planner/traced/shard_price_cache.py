"""Prices of the shards of a traced model, like layers, with those of cuts and constants.

The prices of layers are in costmodels/layers/layer_price_cache.py.
"""

from __future__ import annotations

from parplan.costmodels.communication.collectives import Collective, collective_time
from parplan.costmodels.communication.mesh import Axis, Mesh, place
from parplan.costmodels.layers.layer_price import contention
from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
from parplan.costmodels.layers.recompute import Recompute, RecomputedOperators, recompute_operators
from parplan.costmodels.operators.compute import operator_time
from parplan.costmodels.operators.host_launch import launch_s
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.traced.shard_classes import ShardClasses, ShardKey
from parplan.planner.traced.shard_flow import Flow
from parplan.planner.traced.shards import Sharded
from parplan.profiles.machines.shipped_profiles import Machine
from parplan.profiles.models.operator_graph import LayerClass
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.models.traced_model import TracedModel
from parplan.profiles.provenance import ZERO, Seconds

ONE = Sharding()  # a traced module is not divided inside a stage


class ShardPriceCache(LayerPriceCache[ShardKey]):
    """Prices of the shards of `sharded`, trained as `training` on `machine`.

    flow  bytes that shards hand on and save
    """

    def __init__(
        self,
        sharded: Sharded,
        training: TrainingSpec,
        machine: Machine,
        *,
        zero_ranks: int | None = None,
    ) -> None:
        super().__init__(training, machine, zero_ranks=zero_ranks)
        self.sharded = sharded
        self.classes = ShardClasses(sharded)
        self.flow = Flow(self.classes)

    @property
    def num_shards(self) -> int:
        return len(self.sharded.shards)

    def layer(self, kind: ShardKey, micro_batch_size: int) -> LayerClass:
        return self._once(
            ("layer", kind, micro_batch_size), lambda: self.classes.layer(kind, micro_batch_size)
        )

    def recompute_operators(self, kind: ShardKey, level: RecomputedOperators) -> tuple[str, ...]:
        return recompute_operators(self.layer(kind, self.sharded.model.micro_batch_size), level)

    def counts_tied(self, mesh: Mesh) -> bool:
        """Returns False: `ShardKey.elsewhere` counts a parameter at the first shard of a stage."""
        return False

    def saved_bytes(self, shard: int, level: Recompute, micro_batch_size: int) -> int:
        """Bytes that a shard saves of a micro-batch, without those counted once a stage.

        planner/traced/shard_flow.py counts the latter.
        """
        key = ShardKey(self.classes.of[shard])
        return self.activations(key, micro_batch_size, ONE, level).saved - self.flow.not_own(
            shard, level, micro_batch_size
        )

    def sent(
        self, shard: int, micro_batch_size: int, *, crosses_nodes: bool, sharing: int
    ) -> Seconds:
        """Seconds to receive one micro-batch at the stage that begins with `shard`.

        Each value is a message. Its gradient takes as long.
        """

        def make() -> Seconds:
            total = ZERO
            for num_bytes in self.flow.handed_on(shard, micro_batch_size).values():
                total += self.message(num_bytes, crosses_nodes=crosses_nodes, sharing=sharing)
            return self.machine.corrected("pipeline", total)

        return self._once(("sent", shard, micro_batch_size, crosses_nodes, sharing), make)

    def constants(self, micro_batch_size: int) -> dict[int, Seconds]:
        """Seconds of each constant by place; a stage makes its constants once a micro-batch."""

        def make() -> dict[int, Seconds]:
            model = self.sharded.model
            places = [
                place
                for place, traced in enumerate(model.operators)
                if traced.constant and not traced.view
            ]
            part = TracedModel(
                name=model.name,
                source=model.source,
                unit=model.unit,
                micro_batch_size=model.micro_batch_size,
                inputs=(),
                operators=tuple(model.operators[place] for place in places),
            )
            launched_s, _ = launch_s(self.machine, self.training.stack)
            times = (
                operator_time(traced.operator, ONE, self.machine, self.training).forward
                for traced in part.scaled(micro_batch_size).operators
            )
            return {
                place: time + Seconds(max(0.0, launched_s - time.value_s), time.kind)
                for place, time in zip(places, times, strict=True)
            }

        return self._once(("constants", micro_batch_size), make)

    def shared_reduction(self, elements: int, holders: int, mesh: Mesh) -> Seconds:
        """Seconds a step to sum the gradients of a parameter that `holders` pipeline ranks hold."""

        def make() -> Seconds:
            gpus_per_node = self.machine.cluster.gpus_per_node
            crosses = mesh.num_ranks > gpus_per_node
            ends = Mesh(pp=min(holders, mesh.pp), dp=gpus_per_node if crosses else 1, tp=1)
            return self.machine.corrected(
                "data",
                collective_time(
                    Collective.ALL_REDUCE,
                    self.training.gradient_precision.num_bytes * elements,
                    place(ends, Axis.PP, gpus_per_node),
                    self.machine,
                ),
            )

        return self._once(("shared", elements, holders, mesh), make)


def link(
    here: int, there: int, layout: ParallelLayout, price_cache: ShardPriceCache
) -> tuple[bool, int]:
    """Returns true if two pipeline ranks are on different nodes, and transfers sharing a node."""
    gpus_per_node, stride = price_cache.machine.cluster.gpus_per_node, layout.mesh.stride(Axis.PP)
    return here * stride // gpus_per_node != there * stride // gpus_per_node, min(
        stride, gpus_per_node
    )


def exposed_time(layout: ParallelLayout, price_cache: ShardPriceCache) -> float:
    """Share of transfers that delays a stage: all, unless the stack hides interleaved ones."""
    hidden = layout.virtual_stages > 1 and price_cache.training.stack.overlap_transfers
    return contention(price_cache.machine) if hidden else 1.0


def transfer_between(
    here: int, there: int, shard: int, layout: ParallelLayout, price_cache: ShardPriceCache
) -> Seconds:
    """Seconds to hand on values between ranks to the stage that begins with `shard`.

    A transfer from a rank to itself takes no time.
    """
    if here == there:
        return ZERO
    crosses, sharing = link(here, there, layout, price_cache)
    return price_cache.sent(
        shard, layout.micro_batch_size, crosses_nodes=crosses, sharing=sharing
    ).scaled(exposed_time(layout, price_cache))
