"""The fullest moment of a rank whose gradients come and go: its actions one after the other, each backward pass layer by layer.

`rank_memory` adds up classes, each at its most. Where gradients are freed after every update, the first backward pass makes
them while it frees activations, and with all forward passes before it there is no moment that has both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from costmodels.actions import Work
from costmodels.strategy import LayerChoice, Strategy
from profiles.model import LayerKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes of one layer on one rank: kept of a micro-batch, temporary in its passes, of its gradients, and of ZeRO.

    gathered   parameters, of this layer and the one that is gathered ahead
    reduced    whole gradients of one micro-batch: there at the end of the layer's backward pass, and as what is reduced until
               the next layer's are
    remade     what a recompute ahead of the gradient adds to what is kept of the micro-batch
    alone      temporary in a backward pass after that
    """

    saved: float
    workspace: float
    gradients: float
    gathered: float = 0.0
    reduced: float = 0.0
    remade: float = 0.0
    alone: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughout:
    """Bytes of a rank that no layer's pass frees.

    sent          of what a stage hands on, or back, of a micro-batch: kept until the step is over
    shared_table  the head's gradient of a token table that the embedding shares: held until the embedding's is there
    gathered      parameters that stay gathered through the passes, because their layer begins and ends them
    reduced       the largest buffer of a reduction after the last backward pass
    """

    sent: float = 0.0
    shared_table: float = 0.0
    gathered: float = 0.0
    reduced: float = 0.0


def fullest_bytes(strategy: Strategy, rank: int, layers: Mapping[LayerChoice, Held], throughout: Throughout) -> float:
    """The most of activations, temporaries and gradients at once on a device of pipeline rank `rank`."""
    return max(_levels(strategy, rank, layers, throughout))


def _levels(strategy: Strategy, rank: int, layers: Mapping[LayerChoice, Held], throughout: Throughout) -> Iterator[float]:
    """What is held while each layer runs backward, through the rank's actions in their order, and while gradients are reduced."""
    chunks, level, made, reducing = strategy.chunks(rank), throughout.gathered, set[int](), 0.0
    ahead = set[tuple[int, int]]()
    waits = {LayerKind.HEAD: throughout.shared_table, LayerKind.EMBEDDING: -throughout.shared_table}
    for action in strategy.frame.orders()[rank]:
        chunk = chunks[action.chunk]
        if action.work is Work.FORWARD:
            level += sum(layers[choice].saved for choice in chunk) + throughout.sent * (chunk[-1].kind is not LayerKind.HEAD)
            yield level + reducing
            continue
        if action.work is Work.RECOMPUTE:
            level += sum(layers[choice].remade for choice in chunk)
            ahead.add((action.chunk, action.micro_batch))
            yield level + reducing + max(layers[choice].gathered for choice in chunk)
            continue
        after = (action.chunk, action.micro_batch) in ahead
        for choice in reversed(chunk):
            held, waiting = layers[choice], waits.get(choice.kind, 0.0)
            yield level + held.gathered + max(held.alone if after else held.workspace, held.reduced) + reducing
            reducing = held.reduced or reducing
            level += waiting - held.saved - after * held.remade + (0.0 if action.chunk in made else held.gradients)
        level += throughout.sent * (chunk[0].kind is not LayerKind.EMBEDDING)
        made.add(action.chunk)
    yield level - throughout.gathered + throughout.reduced
