"""The front of two values, to which the catalogue, the mixes and the columns are reduced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def distinct(values: npt.ArrayLike) -> Array:
    """Returns the distinct values, ascending.

    `np.unique` imports the masked arrays of NumPy, which takes as long as many a price.
    """
    ordered: Array = np.sort(np.asarray(values, np.float64))
    return ordered[np.diff(ordered, prepend=-np.inf) > 0]


def new_lows(values: Array) -> Mask:
    """Returns a mask of the values that are below all values before them; the first always is."""
    return np.concatenate(
        (np.full(min(1, len(values)), True), values[1:] < np.minimum.accumulate(values)[:-1])
    )


def undominated_rows(first: Array, second: Array, third: Array | None = None) -> Ints:
    """Returns the indices that no other equals or beats in both values, by increasing `first`.

    Of equal rows the one with the least `third` stays.
    """
    order = np.lexsort((second, first) if third is None else (third, second, first))
    front: Ints = order[new_lows(second[order])]
    return front


def lower_hull(points: Iterable[tuple[float, float, int]]) -> list[int]:
    """Returns indices on the falling lower hull, by increasing x (Andrew's monotone chain)."""
    chain: list[tuple[float, float, int]] = []
    for x, y, index in sorted(points):
        if chain and y >= chain[-1][1]:
            continue
        while len(chain) > 1:
            (x0, y0, _), (x1, y1, _) = chain[-2:]
            if (x1 - x0) * (y - y0) > (y1 - y0) * (x - x0):
                break
            chain.pop()
        chain.append((x, y, index))
    return [index for _, _, index in chain]


def hull_prices(seconds: Sequence[float], saved: Sequence[float]) -> list[float]:
    """Returns the seconds a byte along each side of the lower hull of options, ascending."""
    points = zip(seconds, saved, range(len(saved)), strict=True)
    return [
        (seconds[j] - seconds[i]) / (saved[i] - saved[j]) for i, j in pairwise(lower_hull(points))
    ]
