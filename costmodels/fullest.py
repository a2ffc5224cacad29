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


def fullest_bytes(strategy: Strategy, rank: int, layers: Mapping[LayerChoice, Held], *, output: float, shared_table: float) -> float:
    """The most of activations, temporaries and gradients at once on a device of pipeline rank `rank`.

    output: of a stage that another follows, kept of a micro-batch until its backward pass
    shared_table: gradient of the token table, where head and embedding share it: autograd holds the head's until it has the
        embedding's, and makes a third of both
    """
    return max(_levels(strategy, rank, layers, output, shared_table), default=0.0)


def _levels(
    strategy: Strategy, rank: int, layers: Mapping[LayerChoice, Held], output: float, shared_table: float,
) -> Iterator[float]:
    """What is held while each layer runs backward, through the rank's actions in their order."""
    chunks, level, made = strategy.chunks(rank), 0.0, set[int]()
    for action in strategy.frame.orders()[rank]:
        chunk = chunks[action.chunk]
        sent = 0.0 if chunk[-1].kind is LayerKind.HEAD else output
        if action.work is Work.FORWARD:
            level += sum(layers[choice].saved for choice in chunk) + sent
            yield level
            continue
        for choice in reversed(chunk):
            waits = {LayerKind.HEAD: shared_table, LayerKind.EMBEDDING: -shared_table}.get(choice.kind, 0.0)
            yield level + layers[choice].workspace + max(0.0, -waits)
            level += waits - layers[choice].saved + (0.0 if action.chunk in made else layers[choice].gradients)
        level -= sent
        made.add(action.chunk)
