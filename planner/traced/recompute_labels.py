"""Undominated choices of recomputed shards of a range, in time and in memory.

A label is (t seconds added, a bytes saved, x temporaries). Temporaries are the largest workspace w
of a shard. Shards are added at the front, with k bytes saved, or k' bytes and r seconds when
recomputed:

    saved        (t,     a + k,  max(x, w))
    recomputed   (t + r, a + k', max(x, w'))

Ranges with equal sequences of shards share their labels, which are computed once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from parplan.planner.traced.range_tables import ByShard
from parplan.planner.traced.shard_flow import Array

MOST_LABELS = 384  # labels of one range; beyond that, evenly spread ones are selected


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """The labels of one range, by increasing seconds.

    recomputed  true if the first shard is recomputed
    behind      index of the label of the range behind the first shard
    """

    added_s: Array
    kept: Array
    temporaries: Array
    recomputed: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
    behind: np.ndarray[tuple[int, ...], np.dtype[np.int64]]


_NOTHING = Labels(
    added_s=np.zeros(1),
    kept=np.zeros(1),
    temporaries=np.full(1, -np.inf),
    recomputed=np.zeros(1, np.bool_),
    behind=np.zeros(1, np.int64),
)


class LabelTable:
    """The labels of ranges of shards for one micro-batch size.

    `levels` are the allowed ones of saved (0) and recomputed (1).
    """

    def __init__(self, by_shard: ByShard, levels: tuple[int, ...]) -> None:
        self.levels = levels
        items = zip(by_shard.recompute_s, *by_shard.saved, *by_shard.workspace, strict=True)
        known: dict[tuple[float, ...], int] = {}
        self.of = tuple(known.setdefault(tuple(map(float, item)), len(known)) for item in items)
        self.items = tuple(known)
        self._known: dict[tuple[int, ...], Labels] = {(): _NOTHING}

    def of_range(self, first: int, end: int) -> Labels:
        """Returns the labels of shards [first, end)."""
        for start in range(end - 1, first - 1, -1):
            if self.of[start:end] not in self._known:
                self._known[self.of[start:end]] = self._extended(
                    self.items[self.of[start]], self._known[self.of[start + 1 : end]]
                )
        return self._known[self.of[first:end]]

    def recomputed(self, first: int, end: int, label: int) -> tuple[int, ...]:
        """Returns the shards of a range that are recomputed under one of its labels."""
        shards = []
        for shard in range(first, end):
            labels = self.of_range(shard, end)
            if labels.recomputed[label]:
                shards.append(shard)
            label = int(labels.behind[label])
        return tuple(shards)

    def _extended(self, item: tuple[float, ...], behind: Labels) -> Labels:
        recompute_s, *kept_and_work = item
        kept, work = kept_and_work[:2], kept_and_work[2:]
        count = len(behind.kept)
        added_s = np.concatenate([behind.added_s + recompute_s * level for level in self.levels])
        bytes_kept = np.concatenate([behind.kept + kept[level] for level in self.levels])
        most = np.concatenate(
            [np.maximum(behind.temporaries, work[level]) for level in self.levels]
        )
        recomputed = np.repeat(np.array(self.levels, np.bool_), count)
        rows = _unbeaten(added_s, bytes_kept, most)
        return Labels(
            added_s=added_s[rows],
            kept=bytes_kept[rows],
            temporaries=most[rows],
            recomputed=recomputed[rows],
            behind=np.tile(np.arange(count), len(self.levels))[rows],
        )


def _unbeaten(
    added_s: Array, kept: Array, most: Array
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Returns the labels that no other label matches or beats in all three values, by seconds."""
    order = np.lexsort((most, kept, added_s))
    held, peak = kept[order], most[order]
    # labels earlier in the order take no longer
    beats = np.triu((held[:, None] <= held[None, :]) & (peak[:, None] <= peak[None, :]), 1)
    order_kept = order[~beats.any(axis=0)]
    if len(order_kept) <= MOST_LABELS:
        return order_kept
    spread = np.unique(np.linspace(0, len(order_kept) - 1, MOST_LABELS).round().astype(np.int64))
    return np.asarray(order_kept[spread])
