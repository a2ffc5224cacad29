"""The labels of a row of layers are its front; of too many those near the hull stay."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from parplan.planner.layer_options.recompute_labels import MOST_LABELS, Item, Labels, LabelTable


def row_of(items: list[Item]) -> tuple[Labels, np.ndarray]:
    table = LabelTable()
    row = tuple(table.number(item) for item in items)
    return table.of(row), table.options(row)


def drawn(rng: np.random.Generator, count: int) -> Item:
    """Options whose seconds grow while their saved bytes shrink, with any workspace."""
    seconds = 1.0 + np.cumsum(rng.random(count))
    saved = 10.0 + np.cumsum(rng.random(count))[::-1]
    workspace = rng.integers(0, 3, count).astype(float)
    values = np.stack([seconds, saved, workspace], axis=1)
    return tuple((float(t), float(a), float(w)) for t, a, w in values)


@pytest.mark.parametrize("seed", range(10))
def test_labels_are_the_choices_that_no_other_beats(seed):
    rng = np.random.default_rng(seed)
    items = [drawn(rng, 3) for _ in range(5)]
    every = set()
    for chosen in product(*items):
        seconds, saved, workspace = np.array(chosen).T
        every.add((round(seconds.sum(), 9), round(saved.sum(), 9), workspace.max()))
    front = {a for a in every if not any(b != a and all(np.array(b) <= np.array(a)) for b in every)}

    labels, options = row_of(items)

    found = zip(labels.time_s.round(9), labels.kept.round(9), labels.workspace, strict=True)
    assert set(found) == front
    assert labels.exact
    for label, chosen in enumerate(options):
        picked = [item[option] for item, option in zip(items, chosen, strict=True)]
        assert sum(saved for _, saved, _ in picked) == pytest.approx(labels.kept[label])


@pytest.mark.parametrize("seed", range(5))
def test_a_long_row_has_the_least_at_every_price_and_all_mixes_along_a_side_of_the_hull(seed):
    rng = np.random.default_rng(seed)
    number, item = 40, drawn(rng, 8)
    one = np.array(item)

    labels, _ = row_of([item] * number)

    assert len(labels.time_s) <= MOST_LABELS
    assert not labels.exact
    on_hull = np.zeros(len(labels.time_s), np.bool_)
    for price in np.geomspace(0.01, 100.0, 200):
        values = labels.time_s + price * labels.kept
        least = number * (one[:, 0] + price * one[:, 1]).min()
        assert values.min() == pytest.approx(least, rel=1e-12)
    for price in labels.prices:
        values = labels.time_s + price * labels.kept
        on_hull |= np.isclose(values, values.min(), rtol=1e-12)
    assert on_hull.sum() >= number * len(labels.prices)
