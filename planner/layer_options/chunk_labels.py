"""The front of the options of the layers of several chunks of one rank.

Chunks hold different numbers of micro-batches at a time, so a label has the saved bytes of each
chunk apart. A label is dropped if another equals or beats it in its seconds, in the saved bytes of
every chunk and in its workspace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt

import numpy as np

from parplan.planner.dominance import Array, Ints
from parplan.planner.layer_options.recompute_labels import Labels, nearest

MOST_JOINED = 256  # labels of two fronts joined; of more, those nearest to the hull stay


@dataclass(frozen=True, slots=True)
class ChunkLabels:
    """The labels of some chunks, by increasing seconds.

    values     seconds, workspace and the saved bytes of each chunk, by label
    options    by label and layer the number of the layer's option
    prices     prices of a saved byte along the hull of any layer
    exact      no label was left out that is on the front
    """

    values: Array
    options: Ints
    prices: Array
    exact: bool


def of_chunk(labels: Labels, options: Ints) -> ChunkLabels:
    """Returns the labels of one chunk."""
    values = np.stack([labels.time_s, labels.workspace, labels.kept], axis=1)
    return ChunkLabels(values, options, labels.prices, labels.exact)


def of_chunks(chunks: Sequence[ChunkLabels]) -> ChunkLabels:
    """Returns the labels of all chunks together."""
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined = _joined(joined, chunk)
    return joined


def _joined(left: ChunkLabels, right: ChunkLabels) -> ChunkLabels:
    if len(left.values) * len(right.values) > MOST_JOINED:
        right = _nearest(right, max(isqrt(MOST_JOINED), MOST_JOINED // len(left.values)))
        left = _nearest(left, MOST_JOINED // len(right.values))
    a = np.repeat(np.arange(len(left.values)), len(right.values))
    b = np.tile(np.arange(len(right.values)), len(left.values))
    values = np.concatenate(
        [
            left.values[a, :1] + right.values[b, :1],
            np.maximum(left.values[a, 1:2], right.values[b, 1:2]),
            left.values[a, 2:],
            right.values[b, 2:],
        ],
        axis=1,
    )
    front = _front(values)
    return ChunkLabels(
        values[front],
        np.concatenate([left.options[a[front]], right.options[b[front]]], axis=1),
        np.union1d(left.prices, right.prices),
        left.exact and right.exact,
    )


def _front(values: Array) -> Ints:
    """Returns the rows that no other equals or beats in all values, by increasing seconds."""
    order = np.lexsort(values.T[::-1])  # rows earlier in the order take no longer
    beats = np.ones((len(order), len(order)), bool)
    for column in values[order, 1:].T:
        beats &= column[:, None] <= column[None, :]
    return np.asarray(order[~np.triu(beats, 1).any(axis=0)])


def _nearest(labels: ChunkLabels, most: int) -> ChunkLabels:
    """Returns the labels that are nearest to the hull of time and saved bytes of all chunks."""
    values = labels.values
    if len(values) <= most:
        return labels
    rows = nearest(values[:, 0], values[:, 2:].sum(axis=1), values[:, 1], labels.prices, most)
    return ChunkLabels(values[rows], labels.options[rows], labels.prices, exact=False)
