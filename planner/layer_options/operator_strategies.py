"""The priced strategies of every operator of a layer on one mesh, and the rejected ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from parplan.costmodels.host.offload import copy_time
from parplan.costmodels.layers.operator_price import OperatorPrice, operator_price
from parplan.costmodels.layers.recompute import host_bytes_by_operator
from parplan.costmodels.operators.legal_splits import Rejected, operator_splits
from parplan.costmodels.operators.sharding import Sharding, Splits
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.layer_options.layer_problem import may_recompute
from parplan.profiles.errors import unknown_name_error
from parplan.profiles.models.operator_graph import LayerKey, LayerKind, Operator


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedStrategy:
    """One legal way to divide an operator."""

    splits: Splits
    price: OperatorPrice


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorStrategies:
    """All strategies of one operator, and the reasons of the rejected ones.

    recomputable   whether each strategy can also be recomputed in the backward pass
    kept_bytes     bytes of a micro-batch that the host may hold where the layer has Megatron's
                   sharding
    copy_s         seconds to copy these bytes to the host
    """

    layer: LayerKey
    operator: Operator
    legal: tuple[PricedStrategy, ...]
    rejected: tuple[Rejected, ...]
    recomputable: bool
    kept_bytes: int = 0
    copy_s: float = 0.0


def _ways(operator: Operator, over: Sharding) -> tuple[tuple[Splits, ...], tuple[Rejected, ...]]:
    """Returns the legal and the rejected ways to divide an operator; a grid has one."""
    if over.rows > 1:
        return (over.splits(operator),), ()
    return operator_splits(operator, over.degrees, over_data=over.data > 1, etp=over.etp)


def operator_strategies(
    layout: ParallelLayout, zero: int, price_cache: PriceCache, only: str | None = None
) -> Iterator[OperatorStrategies]:
    """Yields the strategies of every operator on the tensor-parallel axis of `layout`.

    Where the layout divides weights over data, they are those of a block on both axes. A grid of
    tensor-parallel ranks has one for each operator.
    `zero` is the ZeRO stage of the states. With `only` it yields the operator of that name. Raises
    ConfigError when the model has no operator of that name.
    """
    over = layout.of_blocks
    graph = [
        layer
        for layer in price_cache.graph(layout.micro_batch_size * over.data, over.part)
        if over.data == 1 or layer.kind is LayerKind.BLOCK
    ]
    names = [operator.name for layer in graph for operator in layer.operators]
    if only is not None and only not in names:
        raise unknown_name_error("operator", only, names)
    inside = price_cache.inside(over.degrees)
    for layer in graph:
        kept = host_bytes_by_operator(
            price_cache.kept_layer(layer.key, layout.micro_batch_size, over.part),
            layout.sharding,
            (),
            price_cache.training.stack,
        )
        for operator in layer.operators:
            if only in (None, operator.name):
                legal, rejected = _ways(operator, over)
                priced = (
                    PricedStrategy(
                        splits=s,
                        price=operator_price(
                            operator,
                            s,
                            inside,
                            price_cache.training,
                            zero=zero,
                            dp=layout.mesh.replicas,
                            over_data=over.data > 1,
                            like=over,
                        ),
                    )
                    for s in legal
                )
                n_bytes = kept[operator.name] if layer.kind is LayerKind.BLOCK else 0
                yield OperatorStrategies(
                    layer=layer.key,
                    operator=operator,
                    legal=tuple(priced),
                    rejected=rejected,
                    recomputable=layer.kind is LayerKind.BLOCK and may_recompute(operator),
                    kept_bytes=n_bytes,
                    copy_s=copy_time(n_bytes, price_cache.machine.cluster, to_host=True).value_s,
                )
