"""Bands by traits are as wide as runs of the kind ask for, also of runs they have not seen."""

from __future__ import annotations

import numpy as np
import pytest

from parplan.planner.plan.conformal import BAND_SHARE, ConformalBands, Deviating

PRIOR_ROWS = 5.0
WIDE, NARROW = ("stack loose", "chip new"), ("stack tight", "chip new")


def runs(seed, experiments=12, rows=80):
    """Runs of two stacks; the deviations of the first are normal with 0.2, of the second 0.02."""
    draw = np.random.default_rng(seed)
    return [
        Deviating(f"run-{row}", f"{traits[0]}-{experiment}", traits, draw.normal(0, spread))
        for traits, spread in ((WIDE, 0.2), (NARROW, 0.02))
        for experiment in range(experiments)
        for row in range(rows)
    ]


@pytest.fixture(scope="module")
def bands():
    return ConformalBands(runs(1), PRIOR_ROWS)


def test_a_band_holds_eight_in_ten_of_runs_that_it_has_not_seen(bands):
    within = {
        traits: np.mean(
            [abs(r.deviation) <= bands.share(traits) for r in runs(2) if r.traits == traits]
        )
        for traits in (WIDE, NARROW)
    }

    assert np.mean(list(within.values())) == pytest.approx(BAND_SHARE, abs=0.04)
    assert min(within.values()) > 0.65
    assert bands.share(WIDE) > 5 * bands.share(NARROW)


def test_an_unknown_stack_has_the_band_of_the_loosest(bands):
    assert bands.share(("stack other", "chip new")) == pytest.approx(bands.share(WIDE))
    assert bands.share(("experts", *NARROW)) == pytest.approx(bands.share(NARROW))


def test_a_left_out_experiment_has_no_part_in_its_band():
    seen = runs(1)
    alone = ConformalBands(seen, PRIOR_ROWS)
    with_outlier = ConformalBands([*seen, Deviating("one", "broken", NARROW, 50.0)], PRIOR_ROWS)

    assert with_outlier.share(NARROW, without="broken") == pytest.approx(alone.share(NARROW))
    assert with_outlier.share(NARROW) > alone.share(NARROW)


def test_the_last_run_of_a_stack_left_out_makes_it_unknown():
    seen = [*runs(1), Deviating("one", "only", ("stack rare",), 0.0)]

    share = ConformalBands(seen, PRIOR_ROWS).share(("stack rare", "chip new"), without="only")

    assert share == pytest.approx(ConformalBands(runs(1), PRIOR_ROWS).share(WIDE))


def test_no_runs_make_no_band():
    with pytest.raises(ValueError, match="measured runs"):
        ConformalBands([], PRIOR_ROWS)


def test_a_trait_with_few_runs_is_as_wide_as_these_ask_for_and_no_other_changes(bands):
    few = [
        Deviating(f"few-{row}", f"few-{row}", ("stack few", "chip new"), 0.9) for row in range(6)
    ]
    plain = ConformalBands([*runs(1), *few], prior_rows=200.0)
    own = ConformalBands([*runs(1), *few], prior_rows=200.0, own="stack ")

    assert plain.share(few[0].traits) < 0.5 < 0.9 <= own.share(few[0].traits)
    assert own.share(NARROW) == plain.share(NARROW)
