"""What no other beats in two values: the front that the catalogue, the mixes and the columns are
reduced to.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def new_lows(values: Array) -> npt.NDArray[np.bool_]:
    """Which of `values` are below all that come before them; the first always is."""
    return np.concatenate(
        (np.full(min(1, len(values)), True), values[1:] < np.minimum.accumulate(values)[:-1])
    )


def undominated_rows(first: Array, second: Array, third: Array | None = None) -> Ints:
    """The indices that no other beats or equals in both, by increasing `first`; of equals the one
    with the least `third`.
    """
    order = np.lexsort((second, first) if third is None else (third, second, first))
    found: Ints = order[new_lows(second[order])]
    return found
