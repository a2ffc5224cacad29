"""DeepSpeed's ways to cut a model into pipeline stages: blocks of every stage, with the embedding
on the first and the head on the last.

Read in microsoft/DeepSpeed at 00f47f033a1b, deepspeed/runtime/pipe/module.py (_partition_layers);
deepspeed/runtime/utils.py (partition_uniform, partition_balanced):

    uniform       as many layers for each stage; embedding and head are layers, and the first stages
                  take what is left over
    parameters    the largest sum of parameters of a stage as small as it can be (a linear
                  partition)
    type          the same with a weight of 1 for blocks and 0 for all others (`type:transformer`)

Older versions give what uniform leaves over to the last stage. Of several partitions with the same
largest stage the one with the smallest sum of squares is taken, the most even one; which of them
DeepSpeed takes follows from how it searches.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache
from itertools import accumulate, pairwise

from parplan.costmodels.price_cache import PriceCache
from parplan.profiles.models.operator_graph import LayerClass, LayerKind


class Partition(StrEnum):
    UNIFORM = "uniform"
    PARAMETERS = "parameters"
    TYPE = "type"


def blocks_of_stages(
    method: Partition, num_stages: int, price_cache: PriceCache
) -> tuple[int, ...] | None:
    """Blocks on every stage, or None where a stage would have none, or the ends would not be on the
    first and the last stage.
    """
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


def _weights(method: Partition, price_cache: PriceCache) -> tuple[int, ...]:
    """Of the embedding, every block and the head what a partition weighs."""
    embedding, block, head = (
        _parameters(price_cache.graph(1).layer_class(kind))
        if method is Partition.PARAMETERS
        else int(kind is LayerKind.BLOCK)
        for kind in (LayerKind.EMBEDDING, LayerKind.BLOCK, LayerKind.HEAD)
    )
    return (embedding, *(block,) * price_cache.model.num_layers, head)


def _parameters(layer: LayerClass) -> int:
    return sum(
        parameter.num_elements for operator in layer.operators for parameter in operator.parameters
    )


def _uniform(num_items: int, num_parts: int) -> tuple[int, ...]:
    """The first item of every part, and the end."""
    each, left = divmod(num_items, num_parts)
    return tuple(accumulate((each + (part < left) for part in range(num_parts)), initial=0))


@lru_cache(maxsize=256)
def balanced(weights: Sequence[int], num_parts: int) -> tuple[int, ...]:
    """Bounds of `num_parts` runs of `weights`, none empty: the largest sum least, then the sum of
    squares least.
    """
    sums = (0, *accumulate(weights))
    best: list[tuple[tuple[int, int], tuple[int, ...]] | None] = [
        ((0, 0), (0,)),
        *(None for _ in weights),
    ]
    for _ in range(num_parts):
        best = [_extended(best[:end], sums, end) for end in range(len(sums))]
    found = best[-1]
    assert found is not None, f"{len(weights)} layers in {num_parts} parts"
    return found[1]


def _extended(
    best: Sequence[tuple[tuple[int, int], tuple[int, ...]] | None],
    sums: Sequence[int],
    end: int,
) -> tuple[tuple[int, int], tuple[int, ...]] | None:
    """The best partition that ends at `end`, of one more part than those in `best`, by where these
    end.
    """
    found = (
        ((max(known[0][0], part), known[0][1] + part * part), (*known[1], end))
        for start, known in enumerate(best)
        if known is not None
        for part in (sums[end] - sums[start],)
    )
    return min(found, default=None)
