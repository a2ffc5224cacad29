"""Which operators of a block send what they keep to the host (costmodels/copies.py)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from costmodels.book import PriceBook
from costmodels.recompute import Again, host_bytes_by_operator
from costmodels.sharding import Sharding
from costmodels.strategy import Strategy
from profiles.errors import unknown_name_error
from profiles.model import LayerKind

ALL = "all"


def named_operators(names: Collection[str], level: Again, book: PriceBook) -> tuple[str, ...]:
    """Those of `names` that keep anything in a block with recompute `level`, in their order; `all` is every one.

    Raises ConfigError for a name that no operator of a block has.
    """
    kept = _kept_bytes(1, Sharding(), level, book)
    for name in names:
        if name != ALL and name not in kept:
            raise unknown_name_error("operator", name, (*kept, ALL))
    return tuple(name for name, n_bytes in kept.items() if n_bytes and (name in names or ALL in names))


def _kept_bytes(micro_batch_size: int, sharding: Sharding, level: Again, book: PriceBook) -> dict[str, int]:
    layer, again = book.kept_layer(LayerKind.BLOCK, micro_batch_size), book.recompute_operators(LayerKind.BLOCK, level)
    return host_bytes_by_operator(layer, sharding, again, book.training.stack)


def with_kept_on_host(strategy: Strategy, operators: tuple[str, ...]) -> Strategy:
    """The same strategy whose blocks send to the host what `operators` keep."""
    return replace(strategy, stages=tuple(
        tuple(replace(choice, on_host=operators) if choice.kind is LayerKind.BLOCK else choice for choice in stage)
        for stage in strategy.stages))
