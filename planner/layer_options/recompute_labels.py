"""The front of the options of a row of layers, in time and in memory.

A label is (t seconds, a bytes saved, w workspace), the workspace being the largest of a layer. The
layers are added at the front. The option of a layer with t' seconds, a' bytes and w' workspace
makes of a label

    (t + t', a + a', max(w, w'))

and a label that another equals or beats in all three is dropped. Of more than `MOST_LABELS` those
nearest to the lower convex hull of time and saved bytes stay. The hull of a row is the sum of the
hulls of its layers, so that the labels on it are never lost to a limit on the row behind. Rows with
equal ends share the labels of these ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from parplan.planner.dominance import Array, Ints, hull_prices, new_lows

MOST_LABELS = 384  # labels of one row of layers
MOST_PRICES = 32  # prices of a saved byte at which the distance to the hull is measured

Item = tuple[tuple[float, float, float], ...]  # seconds, saved bytes and workspace by option


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """The labels of a row of layers, by increasing seconds.

    option    option of the first layer
    behind    number of the label of the row behind the first layer
    prices    prices of a saved byte along the hull of any layer
    exact     no label was left out that is on the front
    """

    time_s: Array
    kept: Array
    workspace: Array
    option: Ints
    behind: Ints
    prices: Array
    exact: bool = True


_NOTHING = Labels(
    time_s=np.zeros(1),
    kept=np.zeros(1),
    workspace=np.full(1, -np.inf),
    option=np.zeros(1, np.int64),
    behind=np.zeros(1, np.int64),
    prices=np.zeros(0),
)


class LabelTable:
    """The labels of rows of layers, each made once."""

    def __init__(self) -> None:
        self._numbers: dict[Item, int] = {}
        self._items: list[Item] = []
        self._known: dict[tuple[int, ...], Labels] = {(): _NOTHING}

    def number(self, item: Item) -> int:
        """Returns the number of a layer with these options; equal layers have one number."""
        number = self._numbers.setdefault(item, len(self._items))
        if number == len(self._items):
            self._items.append(item)
        return number

    def of(self, row: tuple[int, ...]) -> Labels:
        """Returns the labels of a row of layers, given by their numbers."""
        for start in reversed(range(len(row))):
            if row[start:] not in self._known:
                behind = self._known[row[start + 1 :]]
                self._known[row[start:]] = _extended(self._items[row[start]], behind)
        return self._known[row]

    def options(self, row: tuple[int, ...]) -> Ints:
        """Returns by label and layer the number of the layer's option."""
        labels = self.of(row)
        chosen = np.zeros((len(labels.time_s), len(row)), np.int64)
        label = np.arange(len(labels.time_s))
        for place in range(len(row)):
            labels = self.of(row[place:])
            chosen[:, place] = labels.option[label]
            label = labels.behind[label]
        return chosen


def _extended(item: Item, behind: Labels) -> Labels:
    count = len(behind.kept)
    time_s = np.concatenate([behind.time_s + seconds for seconds, _, _ in item])
    kept = np.concatenate([behind.kept + saved for _, saved, _ in item])
    workspace = np.concatenate([np.maximum(behind.workspace, work) for _, _, work in item])
    rows = _unbeaten(time_s, kept, workspace)
    own = hull_prices([seconds for seconds, _, _ in item], [saved for _, saved, _ in item])
    prices = np.union1d(behind.prices, own)
    exact = len(rows) <= MOST_LABELS
    if not exact:
        rows = rows[nearest(time_s[rows], kept[rows], workspace[rows], prices)]
    return Labels(
        time_s=time_s[rows],
        kept=kept[rows],
        workspace=workspace[rows],
        option=np.repeat(np.arange(len(item)), count)[rows],
        behind=np.tile(np.arange(count), len(item))[rows],
        prices=prices,
        exact=exact and behind.exact,
    )


def _unbeaten(time_s: Array, kept: Array, workspace: Array) -> Ints:
    """Returns the labels on the front of all three values, by increasing seconds."""
    order = np.lexsort((workspace, kept, time_s))  # labels earlier in the order take no longer
    held, widest = kept[order], workspace[order]
    on_front = np.zeros(len(order), np.bool_)
    for limit in np.unique(widest):
        # the labels within this workspace that save less than all before them
        within = np.flatnonzero(widest <= limit)
        lows = within[new_lows(held[within])]
        on_front[lows[widest[lows] == limit]] = True
    return np.asarray(order[on_front])


def nearest(
    time_s: Array, kept: Array, workspace: Array, prices: Array, most: int = MOST_LABELS
) -> Ints:
    """Returns the `most` labels that are nearest to the hull of those with no more workspace.

    Labels on the hull are spread evenly if there are too many.
    """
    if len(prices) > MOST_PRICES:
        prices = prices[np.linspace(0, len(prices) - 1, MOST_PRICES).round().astype(np.int64)]
    order = np.argsort(workspace, kind="stable")
    last = np.searchsorted(workspace[order], workspace, side="right") - 1
    beyond_s = np.full(len(kept), np.inf)
    for price in (0.0, *prices):
        value_s = time_s + price * kept
        least_s = np.minimum.accumulate(value_s[order])[last]
        beyond_s = np.minimum(beyond_s, value_s - least_s)
    beyond_s[beyond_s < 1e-9 * time_s] = 0.0
    chosen = np.argsort(beyond_s, kind="stable")
    on_hull = np.flatnonzero(beyond_s == 0.0)
    if len(on_hull) > most:
        chosen = on_hull[np.linspace(0, len(on_hull) - 1, most).round().astype(np.int64)]
    return np.sort(chosen[:most])
