"""Prices of the shards of a traced model, like layers, with those of cuts and constants.

The prices of layers are in costmodels/layers/layer_price_cache.py.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cached_property
from typing import Self

import numpy as np

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
from parplan.costmodels.layers.model_layers import ParameterSharing
from parplan.costmodels.layers.recompute import RecomputedOperators, recompute_operators
from parplan.costmodels.operators.compute import operator_time
from parplan.costmodels.operators.host_launch import launch_s
from parplan.costmodels.operators.sharding import ALL_TOKENS, Sharding, TokenPart
from parplan.planner.layer_options.traced_shardings import (
    divisible_dims,
    ruled_but_whole,
    traced_shardings,
)
from parplan.planner.traced.shard_classes import ShardClasses, ShardKey
from parplan.planner.traced.shard_flow import Array, Flow
from parplan.planner.traced.shards import Sharded
from parplan.profiles.machines.shipped_profiles import Machine
from parplan.profiles.models.operator_graph import LayerClass, LayerKey, LayerKind, Tensor
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.models.traced_model import TracedModel
from parplan.profiles.provenance import Kind, Seconds

ONE = Sharding()  # values of the batch alone are whole on every rank


class ShardPriceCache(LayerPriceCache):
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

    def on(self, machine: Machine, training: TrainingSpec | None = None) -> Self:
        return type(self)(
            self.sharded, training or self.training, machine, zero_ranks=self.zero_ranks
        )

    @property
    def num_layers(self) -> int:
        return len(self.sharded.shards)

    @property
    def num_parameters(self) -> int:
        return self.sharded.model.num_parameters

    @property
    def flops_per_sequence(self) -> int:
        return self.sharded.model.model_flops // self.sharded.model.micro_batch_size

    def key(self, layer: int, first: int) -> ShardKey:
        key = self.classes.key(layer, first)

        def make() -> ShardKey:
            role, shares = self.classes.role(layer), self.classes.shares(layer)
            alone = role is LayerKind.BLOCK and not shares
            return replace(
                key,
                outside=self.flow.outside(layer),
                role=role,
                shares=shares,
                in_chunks=alone and self.sharded.shards[layer].parameters > 0,
            )

        return self._once(("key", layer, key), make)

    def layer(
        self, kind: LayerKey, micro_batch_size: int, of: TokenPart = ALL_TOKENS
    ) -> LayerClass:
        assert isinstance(kind, ShardKey)
        assert of.cp == 1, "a trace does not name the dim of its tokens"
        return self._once(
            ("layer", kind, micro_batch_size), lambda: self.classes.layer(kind, micro_batch_size)
        )

    def recompute_operators(self, kind: LayerKey, level: RecomputedOperators) -> tuple[str, ...]:
        return recompute_operators(self.layer(kind, self.sharded.model.micro_batch_size), level)

    def places_of(self, shard: int, operators: Collection[str]) -> tuple[int, ...]:
        """Returns the places in a shard of operators of its class, by name."""
        layer = self.layer(self.key(shard, shard), self.sharded.model.micro_batch_size)
        return tuple(
            place
            for place, operator in zip(self.classes.places(shard), layer.operators, strict=True)
            if operator.name in operators
        )

    def operators_at(self, shard: int, places: Collection[int]) -> tuple[str, ...]:
        """Returns the names, in a shard's class, of the operators at places in the shard."""
        layer = self.layer(self.key(shard, shard), self.sharded.model.micro_batch_size)
        return tuple(
            operator.name
            for place, operator in zip(self.classes.places(shard), layer.operators, strict=True)
            if place in places
        )

    def counts_tied(self, mesh: Mesh) -> bool:
        """Returns False: `ShardKey.elsewhere` counts a parameter at the first shard of a stage."""
        return False

    @cached_property
    def batch_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.sharded.model.scaled(1).inputs)

    def stays_gathered(self, kind: LayerKey, mesh: Mesh) -> bool:
        """True for shards with shared parameters: those of a stage are one unit."""
        assert isinstance(kind, ShardKey)
        return kind.shares

    def cut_class(self, cut: int) -> int:
        return cut

    def crossing_tensors(
        self, cut_class: int, micro_batch_size: int, of: TokenPart = ALL_TOKENS
    ) -> tuple[Tensor, ...]:
        return self._once(
            ("crossing", cut_class, micro_batch_size),
            lambda: self.flow.crossing_tensors(cut_class, micro_batch_size),
        )

    @cached_property
    def shared_parameters(self) -> tuple[ParameterSharing, ...]:
        return tuple(
            ParameterSharing(shards, elements, in_ideal=True)
            for _, elements, shards in self.sharded.shared
        )

    def own_sharding(self, kind: LayerKey, sharding: Sharding) -> Sharding:
        """Returns the division of a shard that divides most of its operators."""
        if sharding.tp == 1:
            return sharding
        traced = self.sharded.model.micro_batch_size
        return self._once(
            ("own", kind, sharding),
            lambda: traced_shardings(self.layer(kind, traced), sharding.tp)[0],
        )

    def illegal_tp(self, tp: int) -> str | None:
        """Returns why `tp` ranks cannot divide the model, or None."""
        model = self.sharded.model
        if tp == 1:
            return None
        if not self._divides(tp):
            return f"tp {tp} divides no operator of the module"
        rules = model.tp_rules
        return None if rules is None else ruled_but_whole(model.operators, rules, tp)

    def _divides(self, tp: int) -> bool:
        """True if `tp` ranks divide some operator of the model."""
        traced = self.sharded.model.micro_batch_size
        keys = dict.fromkeys(self.key(layer, layer) for layer in range(self.num_layers))
        return any(divisible_dims(self.layer(key, traced), tp) for key in keys)

    def besides_bytes(self, first: int, end: int, micro_batch_size: int) -> float:
        besides = self._once(
            ("besides", micro_batch_size), lambda: self.flow.besides(micro_batch_size)
        )
        return float(besides[first, end])

    def constants(self, first: int, end: int, micro_batch_size: int) -> Seconds:
        seconds = self._once(
            ("constants by range", micro_batch_size),
            lambda: self._constants_by_range(micro_batch_size),
        )
        return Seconds(float(seconds[first, end]), Kind.ANALYTIC)

    def _constants_by_range(self, micro_batch_size: int) -> Array:
        """Seconds [first, end] of the constants that a stage needs, each once."""
        total = np.zeros((self.num_layers, self.num_layers + 1))
        made = self.constant_times(micro_batch_size)
        for place, shards in self.flow.needed_constants.items():
            before = -1
            for shard in sorted(shards) if place in made else ():
                total[before + 1 : shard + 1, shard + 1 :] += made[place].value_s
                before = shard
        return total

    def constant_times(self, micro_batch_size: int) -> dict[int, Seconds]:
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
