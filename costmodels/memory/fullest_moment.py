"""The bytes of one device by class at the moment at which it is fullest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass

from parplan.costmodels.memory.rank_memory import RankMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryClasses:
    """Bytes of one device by class at its fullest moment; they add up to the total."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    temporaries: float
    reserve: float

    @property
    def values(self) -> tuple[float, ...]:
        """The bytes in the order of the fields."""
        return astuple(self)


def at_fullest(memory: RankMemory) -> MemoryClasses:
    """Returns the bytes by class at the fullest moment.

    Bytes that are not there at that moment (`memory.apart`) are gradients that do not exist yet,
    then activations that are freed by then, and then temporaries of layers that are gathered and
    reduced at different times.
    """
    gradients, activations, temporaries = _without(
        memory.apart, memory.states.gradients, memory.activations, memory.temporaries
    )
    return MemoryClasses(
        parameters=memory.states.parameters,
        gradients=gradients,
        optimizer=memory.states.optimizer,
        activations=activations,
        temporaries=temporaries,
        reserve=memory.reserve,
    )


def _without(apart: float, *classes: float) -> Iterator[float]:
    """Yields the classes less `apart` bytes in total, taken from the first class on."""
    for size in classes:
        taken = min(apart, size)
        yield size - taken
        apart -= taken
