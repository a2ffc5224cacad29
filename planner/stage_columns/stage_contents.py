"""The layers of one pipeline rank of a model with several layer classes."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
from parplan.costmodels.layers.model_layers import ParameterSharing
from parplan.costmodels.stage_costs import time_between
from parplan.costmodels.strategy import ParallelLayout
from parplan.profiles.models.operator_graph import LayerKey, LayerKind

Range = tuple[int, int]  # layers [first, end) of the model


@dataclass(frozen=True, slots=True)
class StageContents:
    """The virtual stages of one pipeline rank, with the range of layers of each."""

    stages: tuple[int, ...]
    ranges: tuple[Range, ...]

    def layers_of(self, stage: int) -> Range:
        """Returns the layers [first, end) of one of its virtual stages."""
        return self.ranges[self.stages.index(stage)]

    def keys(self, price_cache: LayerPriceCache) -> list[list[LayerKey]]:
        """Returns the classes of the layers of each chunk."""
        return [price_cache.keys(first, end) for first, end in self.ranges]

    def body(self, price_cache: LayerPriceCache) -> list[list[LayerKey]]:
        """Returns the classes of each chunk without embedding and head."""
        return [
            [key for key in chunk if key.role is LayerKind.BLOCK]
            for chunk in self.keys(price_cache)
        ]

    def ends(self, price_cache: LayerPriceCache) -> tuple[LayerKey, ...]:
        """Returns the classes of embedding and head, as far as the rank has them."""
        return tuple(
            key
            for chunk in self.keys(price_cache)
            for key in chunk
            if key.role is not LayerKind.BLOCK
        )

    def received_s(self, layout: ParallelLayout, price_cache: LayerPriceCache) -> float:
        """Seconds that all its chunks wait for transfers in one micro-batch."""
        total_s = 0.0
        for stage, (first, end) in zip(self.stages, self.ranges, strict=True):
            here = layout.rank_of(stage)
            for neighbour, cut in ((stage - 1, first), (stage + 1, end)):
                if 0 <= neighbour < layout.num_virtual_stages:
                    there = layout.rank_of(neighbour)
                    cut_class = price_cache.cut_class(cut)
                    total_s += time_between(there, here, layout, price_cache, cut_class).value_s
        return total_s

    def made_s(self, micro_batch_size: int, price_cache: LayerPriceCache) -> float:
        """Seconds of the values of a micro-batch that every stage makes for itself."""
        return sum(
            price_cache.constants(*layers, micro_batch_size).value_s for layers in self.ranges
        )

    def besides_bytes(self, micro_batch_size: int, price_cache: LayerPriceCache) -> float:
        """Most bytes that a chunk saves of a micro-batch besides its layers."""
        return max(price_cache.besides_bytes(*layers, micro_batch_size) for layers in self.ranges)

    def shared(self, price_cache: LayerPriceCache) -> tuple[ParameterSharing, ...]:
        """Returns the parameters of its layers that layers of other ranks hold too."""
        return tuple(
            shared
            for shared in price_cache.shared_parameters
            if 0 < sum(self._has(layer) for layer in shared.layers) < len(shared.layers)
        )

    def _has(self, layer: int) -> int:
        return sum(first <= layer < end for first, end in self.ranges)

    def signature(self, price_cache: LayerPriceCache) -> Hashable:
        """Returns a value that is equal for contents with equal prices at the same place."""

        def crossing(cut: int) -> tuple[int, ...]:
            tensors = price_cache.crossing_tensors(price_cache.cut_class(cut), 1)
            return tuple(tensor.num_bytes for tensor in tensors)

        return tuple(
            (
                tuple(keys),
                crossing(first),
                crossing(end),
                price_cache.besides_bytes(first, end, 1),
                price_cache.constants(first, end, 1).value_s,
            )
            for keys, (first, end) in zip(self.keys(price_cache), self.ranges, strict=True)
        ), tuple(sum(map(self._has, shared.layers)) for shared in price_cache.shared_parameters)
