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
    """Bytes of one layer on one rank: kept of a micro-batch, temporary in its passes, and of its gradients."""

    saved: float
    workspace: float
    gradients: float


def fullest_bytes(strategy: Strategy, rank: int, layers: Mapping[LayerChoice, Held], *, shares_table: bool) -> float:
    """The most of activations, temporaries and gradients at once on a device of pipeline rank `rank`.

    shares_table: the head's product makes the gradient of the token table, to which the embedding adds
    """
    return max(_levels(strategy, rank, layers, shares_table), default=0.0)


def _levels(strategy: Strategy, rank: int, layers: Mapping[LayerChoice, Held], shares_table: bool) -> Iterator[float]:
    """What is held while each layer runs backward, through the rank's actions in their order."""
    chunks, level, made = strategy.chunks(rank), 0.0, set[int]()
    for action in strategy.frame.orders()[rank]:
        chunk = chunks[action.chunk]
        if action.work is Work.FORWARD:
            level += sum(layers[choice].saved for choice in chunk)
            continue
        for choice in reversed(chunk):
            yield level + layers[choice].workspace
            level += 0.0 if action.chunk in made else _made(choice, chunk, layers, shares_table)
            level -= layers[choice].saved
        made.add(action.chunk)


def _made(choice: LayerChoice, chunk: tuple[LayerChoice, ...], layers: Mapping[LayerChoice, Held], shares_table: bool) -> float:
    """Gradients that the first backward pass of a layer makes."""
    if not shares_table or choice.kind is LayerKind.BLOCK:
        return layers[choice].gradients
    ends = (other for other in chunk if other.kind is not LayerKind.BLOCK)
    return sum(layers[other].gradients for other in ends) if choice.kind is LayerKind.HEAD else 0.0
