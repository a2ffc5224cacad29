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
from parplan.planner.layer_options.recompute_labels import Labels

MOST_JOINED = 1024  # labels of two fronts joined; beyond that, evenly spread ones are selected


@dataclass(frozen=True, slots=True)
class ChunkLabels:
    """The labels of some chunks, by increasing seconds.

    values     seconds, workspace and the saved bytes of each chunk, by label
    options    by label and layer the number of the layer's option
    exact      no label was left out that is on the front
    """

    values: Array
    options: Ints
    exact: bool


def of_chunk(labels: Labels, options: Ints) -> ChunkLabels:
    """Returns the labels of one chunk."""
    values = np.stack([labels.time_s, labels.workspace, labels.kept], axis=1)
    return ChunkLabels(values, options, labels.exact)


def of_chunks(chunks: Sequence[ChunkLabels]) -> ChunkLabels:
    """Returns the labels of all chunks together."""
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined = _joined(joined, chunk)
    return joined


def _joined(left: ChunkLabels, right: ChunkLabels) -> ChunkLabels:
    if len(left.values) * len(right.values) > MOST_JOINED:
        right = _spread(right, max(isqrt(MOST_JOINED), MOST_JOINED // len(left.values)))
        left = _spread(left, MOST_JOINED // len(right.values))
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
    order = np.lexsort(values.T[::-1])
    values = values[order]
    # labels earlier in the order take no longer
    beats = np.ones((len(values), len(values)), bool)
    for column in values[:, 1:].T:
        beats &= column[:, None] <= column[None, :]
    front = np.flatnonzero(~np.triu(beats, 1).any(axis=0))
    options = np.concatenate(
        [left.options[a[order[front]]], right.options[b[order[front]]]], axis=1
    )
    return ChunkLabels(values[front], options, left.exact and right.exact)


def _spread(labels: ChunkLabels, most: int) -> ChunkLabels:
    if len(labels.values) <= most:
        return labels
    rows = np.unique(np.linspace(0, len(labels.values) - 1, most).round().astype(np.int64))
    return ChunkLabels(labels.values[rows], labels.options[rows], exact=False)
