"""Which shards of a range run again: every choice that no other beats in time and in memory.

A label is (seconds added, bytes kept, temporaries): temporaries are the most that a backward pass
adds to what is kept, of a shard less what the shards behind it kept. Shards are added at the front,
where both follow from the label behind:

    once    (t,     a + k,  max(x, w  - a))
    again   (t + r, a + k', max(x, w' - a))

Ranges whose shards are alike one after the other have the same labels, which are made once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from parplan.planner.traced.range_tables import ByShard
from parplan.planner.traced.shard_flow import Array

MOST_LABELS = 384  # of one range; beyond that those are left out that are closest to another


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """The labels of one range, by increasing seconds; `again` of the first shard, and `behind` the
    label of the range behind it.
    """

    added_s: Array
    kept: Array
    temporaries: Array
    again: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
    behind: np.ndarray[tuple[int, ...], np.dtype[np.int64]]


_NOTHING = Labels(
    added_s=np.zeros(1),
    kept=np.zeros(1),
    temporaries=np.full(1, -np.inf),
    again=np.zeros(1, np.bool_),
    behind=np.zeros(1, np.int64),
)


class LabelTable:
    """The labels of ranges of shards for one micro-batch size; `levels`: which of once (0) and
    again (1) a shard may run.
    """

    def __init__(self, own: ByShard, levels: tuple[int, ...]) -> None:
        self.levels = levels
        items = zip(own.again_s, *own.saved, *own.workspace, strict=True)
        known: dict[tuple[float, ...], int] = {}
        self.of = tuple(known.setdefault(tuple(map(float, item)), len(known)) for item in items)
        self.items = tuple(known)
        self._known: dict[tuple[int, ...], Labels] = {(): _NOTHING}

    def of_range(self, first: int, end: int) -> Labels:
        """The labels of shards [first, end)."""
        for start in range(end - 1, first - 1, -1):
            if self.of[start:end] not in self._known:
                self._known[self.of[start:end]] = self._extended(
                    self.items[self.of[start]], self._known[self.of[start + 1 : end]]
                )
        return self._known[self.of[first:end]]

    def again(self, first: int, end: int, label: int) -> tuple[int, ...]:
        """The shards of a range that run again under one of its labels."""
        found = []
        for shard in range(first, end):
            labels = self.of_range(shard, end)
            if labels.again[label]:
                found.append(shard)
            label = int(labels.behind[label])
        return tuple(found)

    def _extended(self, item: tuple[float, ...], behind: Labels) -> Labels:
        again_s, *kept_and_work = item
        kept, work = kept_and_work[:2], kept_and_work[2:]
        count = len(behind.kept)
        added_s = np.concatenate([behind.added_s + again_s * level for level in self.levels])
        bytes_kept = np.concatenate([behind.kept + kept[level] for level in self.levels])
        most = np.concatenate(
            [np.maximum(behind.temporaries, work[level] - behind.kept) for level in self.levels]
        )
        again = np.repeat(np.array(self.levels, np.bool_), count)
        rows = _unbeaten(added_s, bytes_kept, most)
        return Labels(
            added_s=added_s[rows],
            kept=bytes_kept[rows],
            temporaries=most[rows],
            again=again[rows],
            behind=np.tile(np.arange(count), len(self.levels))[rows],
        )


def _unbeaten(
    added_s: Array, kept: Array, most: Array
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """The labels that no other beats or equals in all three, by seconds."""
    order = np.lexsort((most, kept, added_s))
    held, peak = kept[order], most[order]
    beats = np.triu(
        (held[:, None] <= held[None, :]) & (peak[:, None] <= peak[None, :]), 1
    )  # those before take no longer
    found = order[~beats.any(axis=0)]
    if len(found) <= MOST_LABELS:
        return found
    spread = np.unique(np.linspace(0, len(found) - 1, MOST_LABELS).round().astype(np.int64))
    return np.asarray(found[spread])
