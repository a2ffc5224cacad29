"""The bytes of one device by class at the moment at which it is fullest."""

from __future__ import annotations

from collections.abc import Iterator

from parplan.costmodels.memory.rank_memory import RankMemory


def at_fullest(memory: RankMemory) -> dict[str, float]:
    """Returns the bytes by class at the fullest moment, which add up to the total.

    Bytes that are not there at that moment (`memory.apart`) are gradients that do not exist yet,
    then activations that are freed by then, and then temporaries of layers that are gathered and
    reduced at different times.
    """
    gradients, activations, temporaries = _without(
        memory.apart, memory.states.gradients, memory.activations, memory.temporaries
    )
    return {
        "parameters": memory.states.parameters,
        "gradients": gradients,
        "optimizer": memory.states.optimizer,
        "activations": activations,
        "temporaries": temporaries,
        "reserve": memory.reserve,
    }


def _without(apart: float, *classes: float) -> Iterator[float]:
    """Yields the classes less `apart` bytes in total, taken from the first class on."""
    for size in classes:
        taken = min(apart, size)
        yield size - taken
        apart -= taken
