"""The shards of a traced model as layer classes; equal shards are one class and priced once."""

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

_NUMBER = re.compile(r"_\d+$")  # suffix of the function's name in a call


@dataclass(frozen=True, slots=True)
class ShardKey:
    """A class of shards by its number.

    elsewhere  numbers of its parameters that another shard of the stage holds
    outside    names of the class's tensors that count once a stage (planner/traced/shard_flow.py)
    role       whether it is the first shard, before all repeated blocks, the last one, behind them,
               or another one
    shares     another shard of the model holds some of its parameters
    in_chunks  it is no end, and has parameters that no other shard holds
    """

    number: int
    elsewhere: tuple[int, ...] = ()
    outside: frozenset[str] = frozenset()
    role: LayerKind = LayerKind.BLOCK
    shares: bool = False
    in_chunks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Traced names of a shard's tensors and parameters, by their number in the shard's class."""

    tensors: tuple[str, ...]
    parameters: tuple[str, ...]


class ShardClasses:
    """The distinct classes of the shards of `sharded`, in the order of their first shard.

    Operators of a class are those that run in the pass of a shard: constants are made apart, views
    cost nothing. Their tensors and parameters have numbers for names, equal for one memory.
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
        """The first shard of each class."""
        return tuple(self.of.index(number) for number in range(len(self)))

    def layer(self, key: ShardKey, micro_batch_size: int) -> LayerClass:
        """Returns the class for a micro-batch size.

        Parameters that are elsewhere, or a second time in the shard, are marked tied.
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
            key.role,
            tuple(_marked(traced.operator, held) for traced in operators),
            key.outside,
        )

    def places(self, shard: int) -> tuple[int, ...]:
        """Returns the places in a shard of the operators of its class."""
        return tuple(place for place, _ in _in_pass(self.sharded, self.sharded.shards[shard]))

    def shares(self, shard: int) -> bool:
        """Returns whether another shard holds some of the parameters of a shard."""
        return any(shard in shards for _, _, shards in self.sharded.shared)

    def role(self, shard: int) -> LayerKind:
        """Returns the role of a shard: at an end of the model outside repeated blocks, or not."""
        blocks, (here, *_) = self.sharded.blocks, self.sharded.shards[shard:]
        if blocks and shard == 0 and here.end <= blocks[0].first:
            return LayerKind.EMBEDDING
        if blocks and shard == len(self.of) - 1 and here.first >= blocks[-1].end:
            return LayerKind.HEAD
        return LayerKind.BLOCK

    def key(self, shard: int, first: int) -> ShardKey:
        """Returns the key of a shard in a stage that begins with shard `first`.

        Parameters that an earlier shard of the stage holds are elsewhere.
        """
        return self._keys[shard][bisect_left(self.changes[shard], first)]

    @cached_property
    def changes(self) -> tuple[tuple[int, ...], ...]:
        """Last first shards of stages with equal keys, by shard, ascending up to the shard."""
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
        """Returns the numbers of a shard's shared parameters, each with its last earlier holder."""
        holders = {
            name: [earlier for earlier in shards if earlier < shard]
            for name, _, shards in self.sharded.shared
            if shard in shards
        }
        return [
            (number, max(holders[name]))
            for number, name in enumerate(self.names[shard].parameters)
            if holders.get(name)
        ]


def _numbered(sharded: Sharded, shard: Shard) -> tuple[tuple[TracedOperator, ...], Names]:
    """Returns the operators of a shard with numbers for names, and the names."""
    tensors, parameters = _NameNumbers(sharded.values.root), _NameNumbers(lambda name: name)
    used: set[str] = set()
    operators = tuple(
        TracedOperator(
            path="", line="", operator=_renamed(traced.operator, used, tensors, parameters)
        )
        for _, traced in _in_pass(sharded, shard)
    )
    return operators, Names(tensors=tuple(tensors.known), parameters=tuple(parameters.known))


def _in_pass(sharded: Sharded, shard: Shard) -> Iterator[tuple[int, TracedOperator]]:
    """Yields the operators that run in the pass of a shard, with their places in it."""
    for place, traced in enumerate(sharded.model.operators[shard.first : shard.end]):
        if not traced.constant and not traced.view:
            yield place, traced


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
    """Returns the operator with numbers for the names of its tensors and parameters.

    Its name is the function that it computes, which some prices depend on, with a number when it
    repeats.
    """
    base = _NUMBER.sub("", operator.name.rsplit(".", 1)[-1]) or "operator"
    name = f"{base}#{len(used)}" if base in used else base
    used.add(name)

    def numbered(named: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(replace(tensor, name=tensors(tensor.name)) for tensor in named)

    return replace(
        operator,
        name=name,
        inputs=numbered(operator.inputs),
        outputs=numbered(operator.outputs),
        saved=numbered(operator.saved),
        parameters=tuple(
            replace(parameter, name=parameters(parameter.name)) for parameter in operator.parameters
        ),
    )


def _marked(operator: Operator, held: set[str]) -> Operator:
    """Marks the operator's parameters in `held` as tied, and adds its parameters to `held`."""
    marked = tuple(_marks(operator.parameters, held))
    return replace(operator, parameters=marked) if marked != operator.parameters else operator


def _marks(parameters: tuple[Parameter, ...], held: set[str]) -> Iterator[Parameter]:
    for parameter in parameters:
        yield replace(parameter, tied=True) if parameter.name in held else parameter
        held.add(parameter.name)
