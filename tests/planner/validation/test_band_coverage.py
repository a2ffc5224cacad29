"""The coverage counts the rows within their bands, each without the rows of its experiment."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.planner.plan.error_band import shipped_bands
from parplan.planner.plan.ratio_band import shipped_ratio_bands
from parplan.planner.validation.band_coverage import coverage, overrun
from parplan.planner.validation.priced_rows import PricedRow
from parplan.profiles.machines.deviations import shipped_deviations

TRAITS = ("stack megatron-core", "chip Ampere")


def row(measured_s, **changes):
    return PricedRow(
        "made-1", "made", measured_s=measured_s, predicted_s=1.0, traits=TRAITS, **changes
    )


@pytest.mark.slow
def test_rows_within_and_outside_are_counted_by_trait():
    share = shipped_bands()[0].share(TRAITS)

    found = coverage([row(1 + 0.9 * share), row(1 - 0.9 * share), row(1 + 1.1 * share)])

    assert set(found) == {"time"}
    assert found["time"].within == pytest.approx(2 / 3)
    assert found["time"].median_share == pytest.approx(share)
    assert found["time"].by_trait == {trait: (3, pytest.approx(2 / 3)) for trait in TRAITS}


def test_rows_without_a_price_or_with_open_settings_have_no_band():
    assert coverage([row(1.0, assumed=("vpp",)), PricedRow("a", "a", reason="no price")]) == {}


def test_runs_above_the_margin_of_a_risk_are_counted():
    fits = row(None, measured_gib=50.0, predicted_gib=50.0, capacity_gib=80.0, experiment="made")
    worse = replace(fits, measured_gib=79.0)

    found = overrun([fits, fits, fits, worse])

    assert found[0.1] == (4, 0.25)
    assert overrun([row(1.0)]) == {}


@pytest.mark.slow
def test_shipped_bands_hold_eight_in_ten_runs_that_they_did_not_see():
    times, _ = shipped_bands()
    runs = [run for run in shipped_deviations() if run.time is not None]
    within = [abs(run.time) <= times.share(run.traits, without=run.experiment) for run in runs]

    assert sum(within) / len(within) == pytest.approx(0.8, abs=0.04)


def test_a_ratio_is_that_to_the_row_of_its_grid_that_is_predicted_fastest():
    share = shipped_ratio_bands().share(TRAITS)
    fastest = replace(row(1.0), grid="one")
    others = [
        replace(fastest, predicted_s=2.0, measured_s=2.0 * (1 + factor * share))
        for factor in (0.9, -1.1)
    ]

    found = coverage([fastest, fastest, *others])["ratio"]  # a repeat is no pair
    assert (found.rows, found.within) == (2, pytest.approx(0.5))
