"""DeepSpeed's partitions of a model into pipeline stages.

The embedding is on the first stage, with the layers of a tower, and the head on the last. The rules
were read in microsoft/DeepSpeed at 00f47f033a1b, deepspeed/runtime/pipe/module.py
(_partition_layers); deepspeed/runtime/utils.py (partition_uniform, partition_balanced):

uniform      equally many layers on each stage, with embedding and head as layers; the first stages
             take the remainder
parameters   the least largest sum of parameters of a stage (a linear partition)
type         a linear partition with weight 1 of blocks and 0 of other layers (`type:transformer`)

Older versions give the remainder of uniform to the last stage. Of several partitions with the same
largest stage the most even one is taken, with the smallest sum of squares; the choice of DeepSpeed
follows from its search.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache
from itertools import accumulate, pairwise

from parplan.costmodels.price_cache import PriceCache
from parplan.profiles.models.operator_graph import LayerClass


class Partition(StrEnum):
    UNIFORM = "uniform"
    PARAMETERS = "parameters"
    TYPE = "type"


def blocks_of_stages(
    method: Partition, num_stages: int, price_cache: PriceCache
) -> tuple[int, ...] | None:
    """Returns the blocks of every stage, or None where a stage would have none."""
    num_layers = price_cache.model.num_layers
    weights = _weights(method, price_cache)
    bounds = (
        _uniform(num_layers + 2, num_stages)
        if method is Partition.UNIFORM
        else balanced(weights, num_stages)
    )
    blocks = [
        sum(0 < layer <= num_layers for layer in range(first, end))
        for first, end in pairwise(bounds)
    ]
    return tuple(blocks) if min(blocks) > 0 else None


def partitions(num_stages: int, price_cache: PriceCache) -> tuple[tuple[int, ...], ...]:
    """Returns the different blocks of the stages that the rules give."""
    every = (blocks_of_stages(method, num_stages, price_cache) for method in Partition)
    return tuple(dict.fromkeys(filter(None, every)))


def _weights(method: Partition, price_cache: PriceCache) -> tuple[int, ...]:
    """Returns the weights of the embedding, every block and the head in a partition."""
    num_layers = price_cache.model.num_layers
    if method is not Partition.PARAMETERS:
        return (0, *(1,) * num_layers, 0)
    graph = price_cache.graph(1)
    layers = [_parameters(run.layer) for run in graph.layers for _ in range(run.count)]
    first = len(layers) - num_layers - 1  # the embedding, and the layers of a tower
    return sum(layers[:first]), *layers[first:]


def _parameters(layer: LayerClass) -> int:
    return sum(
        parameter.num_elements for operator in layer.operators for parameter in operator.parameters
    )


def _uniform(num_items: int, num_parts: int) -> tuple[int, ...]:
    """Returns the first item of every part, and the end."""
    each, left = divmod(num_items, num_parts)
    return tuple(accumulate((each + (part < left) for part in range(num_parts)), initial=0))


@lru_cache(maxsize=256)
def balanced(weights: Sequence[int], num_parts: int) -> tuple[int, ...]:
    """Returns bounds of non-empty runs with the least largest sum, then least sum of squares."""
    sums = (0, *accumulate(weights))
    best: list[tuple[tuple[int, int], tuple[int, ...]] | None] = [
        ((0, 0), (0,)),
        *(None for _ in weights),
    ]
    for _ in range(num_parts):
        best = [_extended(best[:end], sums, end) for end in range(len(sums))]
    whole = best[-1]
    assert whole is not None, f"{len(weights)} layers in {num_parts} parts"
    return whole[1]


def _extended(
    best: Sequence[tuple[tuple[int, int], tuple[int, ...]] | None], sums: Sequence[int], end: int
) -> tuple[tuple[int, int], tuple[int, ...]] | None:
    """Returns the best partition that ends at `end`: one of `best` with one more part."""
    partitions = (
        ((max(known[0][0], part), known[0][1] + part * part), (*known[1], end))
        for start, known in enumerate(best)
        if known is not None
        for part in (sums[end] - sums[start],)
    )
    return min(partitions, default=None)
