"""The strategies of every operator of a layer on one mesh, each with its price, and the rejected ones with their reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from costmodels.book import PriceBook
from costmodels.layer import Inside
from costmodels.operator import OperatorPrice, operator_price
from costmodels.sharding import Rejected, Splits, operator_splits
from costmodels.strategy import Frame
from planner.layer_problem import may_recompute
from profiles.errors import unknown_name_error
from profiles.model import LayerKind, Operator


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedStrategy:
    """One legal way to divide an operator."""

    splits: Splits
    price: OperatorPrice


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorStrategies:
    """All strategies of one operator; `recomputable`: each can also run again in the backward pass."""

    layer: LayerKind
    operator: Operator
    legal: tuple[PricedStrategy, ...]
    rejected: tuple[Rejected, ...]
    recomputable: bool


def operator_strategies(frame: Frame, zero: int, book: PriceBook, only: str | None = None) -> Iterator[OperatorStrategies]:
    """The strategies on the tensor-parallel axis of `frame`, states at ZeRO stage `zero`; of operator `only` if named.

    Raises ConfigError when the model has no operator of that name.
    """
    graph = book.graph(frame.micro_batch_size)
    names = [operator.name for layer in graph for operator in layer.operators]
    if only is not None and only not in names:
        raise unknown_name_error("operator", only, names)
    inside = Inside(frame.sharding.degrees, book.machine, book.training.stack)
    for layer in graph:
        for operator in layer.operators:
            if only in (None, operator.name):
                legal, rejected = operator_splits(operator, inside.degrees)
                priced = (
                    PricedStrategy(splits=s, price=operator_price(operator, s, inside, book.training, zero=zero, dp=frame.mesh.dp))
                    for s in legal)
                yield OperatorStrategies(
                    layer=layer.kind, operator=operator, legal=tuple(priced), rejected=rejected,
                    recomputable=layer.kind is LayerKind.BLOCK and may_recompute(operator))
