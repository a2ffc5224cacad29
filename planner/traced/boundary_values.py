"""Values that pass between the operators of a traced model, and the places of legal cuts.

The places of a model are those of its operators; *place p as a cut* means that operator p is the
first behind it. A cut is legal if one value of the main stream is alive there, besides values that
are handed on:

    skip connection   a value that is read later, when another is alive: its readers belong to the
                      shard that made it
    handed on         a value that several later units read (encoder output, position bias): stages
                      pass it from one to the next
    in place          an operator that writes into a value belongs to the shard that made it, since
                      another stage has a copy
    constant          a value that depends on the batch alone is made by every stage that needs it,
                      and is never handed on
    no gradient       a value without one cannot be handed on, since its gradient would have to come
                      back: its readers belong to its shard
    buffer            operators that read or write a buffer in which the module counts belong
                      together: a stage has a copy of its own

A view has the name, and so the life, of its base (profiles/models/traced_model.py); if the base is
handed on, each stage makes its own view. Merak's auto-sharding rules: arXiv 2206.04959, section 3.1
(EQUATIONS G1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from parplan.profiles.models.operator_graph import Tensor
from parplan.profiles.models.traced_model import TracedModel

# A value is handed on when this many units read it, besides its maker's unit and the following one.
SEVERAL = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A value in memory, by the places of its operators.

    maker     operator that made it
    readers   operators that read it
    writers   operators that write into it later
    gradient  true if it has a gradient, perhaps from a writer
    """

    tensor: Tensor
    maker: int
    readers: tuple[int, ...] = ()
    writers: tuple[int, ...] = ()
    gradient: bool = True

    @property
    def last(self) -> int:
        """The place of its last reader, or of its maker without readers."""
        return max(self.readers, default=self.maker)

    def crosses(self, place: int) -> bool:
        """True if it is made before `place` and read there or later."""
        return self.maker < place <= self.last


class Values:
    """The values of a traced model by name, without constants and the batch.

    `units[place]` is the part of the model that a place is in.
    """

    def __init__(self, model: TracedModel, units: Sequence[object]) -> None:
        self.model, self.units = model, units
        self.by_name, self.constants, self._roots = _values_of(model)

    def root(self, name: str) -> str:
        """Names the memory of a tensor: itself, or the base of a view or of an in-place result."""
        return self._roots.get(name, name)

    @cached_property
    def handed_on(self) -> frozenset[str]:
        """Names of values that several later units read."""
        return frozenset(name for name, value in self.by_name.items() if self._is_handed_on(value))

    def _is_handed_on(self, value: Value) -> bool:
        """True if several later units read the value, the following unit not counted."""
        unit = self.units[value.maker]
        far = {self.units[reader] for reader in value.readers} - {unit}
        following = self.units[value.maker + 1] if value.maker + 1 < len(self.units) else unit
        return len(far - {following}) >= SEVERAL

    def alive(self, place: int) -> tuple[tuple[str, Tensor], ...]:
        """Returns the values that a cut at `place` hands on, by name, in the makers' order."""
        return tuple(
            (name, value.tensor) for name, value in self.by_name.items() if value.crosses(place)
        )

    @cached_property
    def alive_bytes(self) -> tuple[int, ...]:
        """Bytes that a cut at each place hands on, for the traced micro-batch."""
        return self._counted({name: value.tensor.num_bytes for name, value in self.by_name.items()})

    def _counted(self, weights: Mapping[str, int]) -> tuple[int, ...]:
        """Returns by place the sum of the weights of the values that cross it."""
        changes = [0] * (len(self.model.operators) + 2)
        for name, weight in weights.items():
            value = self.by_name[name]
            changes[value.maker + 1] += weight
            changes[value.last + 1] -= weight
        return tuple(accumulate(changes))[: len(self.model.operators) + 1]

    def legal_cuts(self, *, cross_skips: bool = False) -> tuple[int, ...]:
        """Returns the places of legal cuts, ascending; `cross_skips` hands on skip connections."""
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
        """Marks the places inside operators that belong together.

        They are a value's maker and writers, the readers of a value without a gradient, and the
        operators on one counting buffer.
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
        """Returns by written buffer the places of the operators that read or write it."""
        places: dict[str, list[int]] = {}
        for place, traced in enumerate(self.model.operators):
            for name in traced.counts:
                places.setdefault(name, []).append(place)
        return places


def _values_of(model: TracedModel) -> tuple[dict[str, Value], frozenset[str], dict[str, str]]:
    """Returns the values by name, the names of constants and of the batch, and bases of views."""
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
