"""The shards of a traced model as layer classes: those that are alike are one class, priced
once.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from parplan.planner.traced.shards import Shard, Sharded
from parplan.profiles.models.operator_graph import (
    LayerClass,
    LayerKind,
    Operator,
    Parameter,
    Tensor,
    layer_class,
)
from parplan.profiles.models.traced_model import TracedModel, TracedOperator

_NUMBER = re.compile(r"_\d+$")  # behind the function that a call is of


@dataclass(frozen=True, slots=True)
class ShardKey:
    """A class of shards by its number; `elsewhere`: those of its parameters, by their number, that
    another shard of the stage holds.
    """

    number: int
    elsewhere: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What the tensors and the parameters of a shard are called in the trace, by their number in
    the shard's class.
    """

    tensors: tuple[str, ...]
    parameters: tuple[str, ...]


class ShardClasses:
    """The distinct classes of the shards of `sharded`, in the order of their first shard.

    Operators of a class are those that run in the pass of a shard: constants are made apart, views
    cost nothing. Their tensors and parameters are called by number, those of one memory alike.
    """

    def __init__(self, sharded: Sharded) -> None:
        self.sharded = sharded
        known: dict[tuple[TracedOperator, ...], int] = {}
        self.of: list[int] = []
        self.names: list[Names] = []
        for shard in sharded.shards:
            operators, names = _numbered(sharded, shard)
            self.of.append(known.setdefault(operators, len(known)))
            self.names.append(names)
        self._operators = tuple(known)

    def __len__(self) -> int:
        return len(self._operators)

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """By class, its first shard."""
        return tuple(self.of.index(number) for number in range(len(self)))

    def layer(self, key: ShardKey, micro_batch_size: int) -> LayerClass:
        """The class for another micro-batch size; parameters that are elsewhere, or a second time
        in the shard, are marked tied.
        """
        model = self.sharded.model
        operators = self._operators[key.number]
        if micro_batch_size != model.micro_batch_size:
            part = TracedModel(
                name=model.name,
                source=model.source,
                unit=model.unit,
                micro_batch_size=model.micro_batch_size,
                inputs=(),
                operators=operators,
            )
            operators = part.scaled(micro_batch_size).operators
        held = {str(number) for number in key.elsewhere}
        return layer_class(
            LayerKind.BLOCK,
            self.of.count(key.number),
            tuple(_marked(traced.operator, held) for traced in operators),
        )

    def key(self, shard: int, first: int) -> ShardKey:
        """Of a shard in a stage that begins with shard `first`: without the parameters that an
        earlier shard of the stage holds.
        """
        return self._keys[shard][bisect_left(self.changes[shard], first)]

    @cached_property
    def changes(self) -> tuple[tuple[int, ...], ...]:
        """By shard, the last first shards of stages before each of which it holds its parameters
        alike: ascending, the last is itself.
        """
        return tuple(
            tuple(sorted({before for _, before in self._before(shard)} | {shard}))
            for shard in range(len(self.of))
        )

    @cached_property
    def _keys(self) -> tuple[tuple[ShardKey, ...], ...]:
        return tuple(
            tuple(
                ShardKey(
                    self.of[shard],
                    tuple(
                        number
                        for number, before in self._before(shard)
                        if before >= change and change < shard
                    ),
                )
                for change in self.changes[shard]
            )
            for shard in range(len(self.of))
        )

    def _before(self, shard: int) -> list[tuple[int, int]]:
        """The shared parameters of a shard by number, and the last shard before it that holds
        each.
        """
        holders = {
            name: [other for other in shards if other < shard]
            for name, _, shards in self.sharded.shared
            if shard in shards
        }
        return [
            (number, max(holders[name]))
            for number, name in enumerate(self.names[shard].parameters)
            if holders.get(name)
        ]


def _numbered(sharded: Sharded, shard: Shard) -> tuple[tuple[TracedOperator, ...], Names]:
    """The operators of a shard with numbers for names, and the names."""
    tensors, parameters = _NameNumbers(sharded.values.root), _NameNumbers(lambda name: name)
    chosen = [
        traced
        for traced in sharded.model.operators[shard.first : shard.end]
        if not traced.constant and not traced.view
    ]
    used: set[str] = set()
    operators = tuple(
        TracedOperator(
            path="", line="", operator=_renamed(traced.operator, used, tensors, parameters)
        )
        for traced in chosen
    )
    return operators, Names(tensors=tuple(tensors.known), parameters=tuple(parameters.known))


class _NameNumbers:
    """Numbers for names, in the order in which they come."""

    def __init__(self, root: Callable[[str], str]) -> None:
        self.root = root
        self.known: dict[str, int] = {}

    def __call__(self, name: str) -> str:
        return str(self.known.setdefault(self.root(name), len(self.known)))


def _renamed(
    operator: Operator, used: set[str], tensors: _NameNumbers, parameters: _NameNumbers
) -> Operator:
    """The operator with numbers for names; its own is that of what it computes, by which some
    prices go, and a number the second time.
    """
    base = _NUMBER.sub("", operator.name.rsplit(".", 1)[-1]) or "operator"
    name = f"{base}#{len(used)}" if base in used else base
    used.add(name)

    def own(found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(replace(tensor, name=tensors(tensor.name)) for tensor in found)

    return replace(
        operator,
        name=name,
        inputs=own(operator.inputs),
        outputs=own(operator.outputs),
        saved=own(operator.saved),
        parameters=tuple(
            replace(found, name=parameters(found.name)) for found in operator.parameters
        ),
    )


def _marked(operator: Operator, held: set[str]) -> Operator:
    """The operator with the parameters in `held` marked tied; its own join them."""
    marked = tuple(_marks(operator.parameters, held))
    return replace(operator, parameters=marked) if marked != operator.parameters else operator


def _marks(parameters: tuple[Parameter, ...], held: set[str]) -> Iterator[Parameter]:
    for parameter in parameters:
        yield replace(parameter, tied=True) if parameter.name in held else parameter
        held.add(parameter.name)
