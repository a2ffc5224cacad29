"""A moment of a pipeline rank that bounds its peak from below."""

from __future__ import annotations

from dataclasses import dataclass, replace

from parplan.costmodels.memory.peak_memory import passes_of
from parplan.costmodels.memory.rank_memory import stashes
from parplan.costmodels.strategy import ParallelLayout
from parplan.profiles.models.operator_graph import LayerKind

ENOUGH = 4  # micro-batches per rank from which on more have no fuller moment


@dataclass(frozen=True, slots=True)
class RankMoment:
    """Bytes that a rank holds at its peak or at another moment, in shares of those of its parts.

    stashes    micro-batches by chunk; where the fullest chunk counts for all, their mean
    sent       share of the messages that it has sent
    made       the gradients of all chunks exist
    """

    stashes: tuple[float, ...]
    sent: float
    made: bool


def fullest_moment(layout: ParallelLayout, rank: int, *, frees: bool) -> RankMoment:
    """Returns a moment of a rank at which it holds no more than at its peak.

    frees    gradients come and go, so that the peak is that of one moment
    """
    held, chunks = stashes(LayerKind.BLOCK, rank, layout), layout.virtual_stages
    if chunks == 1 or not frees:
        return RankMoment((held / chunks,) * chunks, 1.0, made=not frees)
    repeats = min(layout.num_micro_batches, ENOUGH * layout.mesh.pp)
    passes, sent = passes_of(replace(layout, num_micro_batches=repeats), rank)
    backward = (each for each in passes if each.backward)
    fullest = max(backward, key=lambda each: (sum(each.stashes), each.sent))
    made = len(fullest.made) == chunks
    # more micro-batches before the last such moment change only the messages sent by then
    later = (sent - fullest.sent) * repeats / max(1, sent)
    return RankMoment(fullest.stashes, 1 - later / layout.num_micro_batches, made)
