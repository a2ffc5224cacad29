"""What the operators of a traced model hand to each other, and at which places it may be cut.

The places of a model are those of its operators; *place p as a cut* means that operator p is the
first behind it. A cut is legal where nothing is alive but one value of the main stream, besides
values that are handed on:

    skip connection   a value that is read later, when another is alive: what reads it belongs to
                      the shard that made it
    handed on         a value that several later units read (encoder output, position bias): stages
                      pass it from one to the next
    in place          an operator that writes into a value belongs to the shard that made it, since
                      another stage has a copy
    constant          what depends on the batch alone is made by every stage that needs it, and is
                      never handed on
    no gradient       a value without one cannot be handed on, since its gradient would have to come
                      back: its readers belong to its shard
    buffer            operators that read or write a buffer in which the module counts belong
                      together: a stage has a copy of its own

A view has the name, and so the life, of what it views (profiles/models/traced_model.py); where that
is handed on, each stage makes its own view. Merak's auto-sharding rules: arXiv 2206.04959, section
3.1 (EQUATIONS G1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from parplan.profiles.models.operator_graph import Tensor
from parplan.profiles.models.traced_model import TracedModel

# units that read a value, besides the one that made it and the one behind that, from which on it is
# handed on
SEVERAL = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """What operator `maker` left in memory, and the places of the operators that read it; `writers`
    write into it again.

    gradient: whether it has one, perhaps only since a writer gave it one
    """

    tensor: Tensor
    maker: int
    readers: tuple[int, ...] = ()
    writers: tuple[int, ...] = ()
    gradient: bool = True

    @property
    def last(self) -> int:
        """The place of its last reader; its own where nobody reads it."""
        return max(self.readers, default=self.maker)

    def crosses(self, place: int) -> bool:
        """Whether it is made before `place` and read there or later."""
        return self.maker < place <= self.last


class Values:
    """The values of a traced model by name, without constants and the batch. `units[place]`: which
    part of the model a place is in.
    """

    def __init__(self, model: TracedModel, units: Sequence[object]) -> None:
        self.model, self.units = model, units
        self.by_name, self.constants, self._roots = _values_of(model)

    def root(self, name: str) -> str:
        """The name of the memory that a tensor is in: its own, or that of what it is a view of, or
        is written into.
        """
        return self._roots.get(name, name)

    @cached_property
    def handed_on(self) -> frozenset[str]:
        """The names of values that several later units read."""
        return frozenset(name for name, value in self.by_name.items() if self._is_handed_on(value))

    def _is_handed_on(self, value: Value) -> bool:
        """Of the units that read it, the one that follows does not count where the value is what
        the making unit leaves.
        """
        own = self.units[value.maker]
        far = {self.units[reader] for reader in value.readers} - {own}
        following = self.units[value.maker + 1] if value.maker + 1 < len(self.units) else own
        return len(far - {following}) >= SEVERAL

    def alive(self, place: int) -> tuple[tuple[str, Tensor], ...]:
        """What a cut at `place` hands on, by name, in the order in which it was made."""
        return tuple(
            (name, value.tensor) for name, value in self.by_name.items() if value.crosses(place)
        )

    @cached_property
    def alive_bytes(self) -> tuple[int, ...]:
        """Bytes of what a cut at each place hands on, for the micro-batch that was traced."""
        return self._counted({name: value.tensor.num_bytes for name, value in self.by_name.items()})

    def _counted(self, weights: Mapping[str, int]) -> tuple[int, ...]:
        """By place, the sum of the weights of the values that cross it."""
        changes = [0] * (len(self.model.operators) + 2)
        for name, weight in weights.items():
            value = self.by_name[name]
            changes[value.maker + 1] += weight
            changes[value.last + 1] -= weight
        return tuple(accumulate(changes))[: len(self.model.operators) + 1]

    def legal_cuts(self, *, cross_skips: bool = False) -> tuple[int, ...]:
        """The places at which the model may be cut, ascending; `cross_skips`: skip connections are
        handed on as well.
        """
        held = self._counted({name: 1 for name in self.by_name if name not in self.handed_on})
        barred = self._barred()
        first = next(
            (place for place, traced in enumerate(self.model.operators) if not traced.constant), 0
        )
        return tuple(
            place
            for place in range(first + 1, len(self.model.operators))
            if not self.model.operators[place].constant
            and (cross_skips or held[place] <= 1)
            and not barred[place]
        )

    def _barred(self) -> tuple[bool, ...]:
        """The places inside what belongs together: a value and what writes into it, or reads it
        where it has no gradient; what counts.
        """
        together = [
            (value.maker, max(value.writers)) for value in self.by_name.values() if value.writers
        ]
        together += [
            (value.maker, value.last) for value in self.by_name.values() if not value.gradient
        ]
        together += [(min(places), max(places)) for places in self._counting().values()]
        changes = [0] * (len(self.model.operators) + 2)
        for first, last in together:
            changes[first + 1] += 1
            changes[last + 1] -= 1
        return tuple(count > 0 for count in accumulate(changes))

    def _counting(self) -> dict[str, list[int]]:
        """By buffer that is written, the places of the operators that read or write it."""
        found: dict[str, list[int]] = {}
        for place, traced in enumerate(self.model.operators):
            for name in traced.counts:
                found.setdefault(name, []).append(place)
        return found


def _values_of(model: TracedModel) -> tuple[dict[str, Value], frozenset[str], dict[str, str]]:
    """The values by name, the names of constants and of the batch, and whose memory views are
    in.
    """
    constants = {tensor.name for tensor in model.inputs}
    values: dict[str, Value] = {}
    root: dict[str, str] = {}
    for place, traced in enumerate(model.operators):
        reads, gives = traced.operator.inputs, traced.operator.outputs
        if traced.constant:
            constants.update(tensor.name for tensor in gives)
            continue
        for name in dict.fromkeys(root.get(tensor.name, tensor.name) for tensor in reads):
            if name in values:
                values[name] = replace(values[name], readers=(*values[name].readers, place))
        if (traced.view or traced.in_place) and reads:
            base = root.get(reads[0].name, reads[0].name)
            root |= {tensor.name: base for tensor in gives}
            if base in values:
                if traced.in_place:
                    written = values[base]
                    values[base] = replace(
                        written,
                        writers=(*written.writers, place),
                        gradient=written.gradient or traced.operator.gradient,
                    )
                continue
        for tensor in gives:
            if tensor.name not in values:
                root.pop(tensor.name, None)
                values[tensor.name] = Value(
                    tensor=tensor, maker=place, gradient=tensor.name not in traced.detached
                )
    return values, frozenset(constants), root
