"""The regret of preferences on a made grid equals hand calculation; the default has the least."""

from __future__ import annotations

import pytest

from benchmarks.prices import preference_regret
from benchmarks.prices.preference_regret import (
    SCENARIOS,
    choices_of,
    grid_preferences,
    least_regret,
    mean_regrets,
)
from parplan.planner.objective import Prefer
from parplan.planner.request import SearchOptions
from parplan.planner.validation.priced_rows import PricedRow
from parplan.planner.validation.step_rows import read_table
from parplan.profiles.machines.stack_terms import Residuals, Terms

RESIDUALS = Residuals(
    time_rows=50, time_band=0.1, memory_rows=50, memory_band=0.02, memory_margin=0.04
)
NETWORK_OFF = 4  # place of a scenario with slow NICs


@pytest.fixture
def made_grid(monkeypatch):
    """Returns a maker of grids: (predicted s, measured s or None, GiB, fits, s with slow NICs)."""
    steps_off = {}

    def price(row, *, speeds):
        slow = speeds is SCENARIOS[NETWORK_OFF]
        predicted_s = steps_off[row["id"]] if slow else row["predicted_s"]
        return PricedRow(row["id"], "made", predicted_s=predicted_s)

    monkeypatch.setattr(preference_regret, "price_row", price)
    monkeypatch.setattr(
        "parplan.planner.plan.error_band.shipped_terms",
        lambda: Terms(residuals={"all": RESIDUALS}),
    )

    def make(*figures):
        entries = []
        for number, (predicted_s, measured_s, peak_gib, fits, off_s) in enumerate(figures):
            name = f"made-{number}"
            steps_off[name] = off_s
            priced = PricedRow(
                name,
                "made",
                predicted_s=predicted_s,
                measured_s=measured_s,
                predicted_total_gib=peak_gib,
                predicted_fits=fits,
                out_of_memory=measured_s is None,
            )
            row = {"id": name, "framework": "made", "predicted_s": predicted_s}
            entries.append(preference_regret.GridRow(row, priced))
        return choices_of("made", entries, time_share=0.1)

    return make


def test_each_preference_chooses_among_the_ties_that_fit(made_grid):
    grid = made_grid(
        (10.0, 9.0, 70.0, True, 20.0),  # the fastest, which a slow network hurts
        (10.2, 8.0, 69.5, True, 13.0),  # the most robust
        (10.5, 12.0, 40.0, True, 19.0),  # the leanest
        (11.5, 6.0, 20.0, True, 11.5),  # outside the band, and the fastest run
        (9.0, 7.0, 90.0, False, 9.0),  # does not fit
    )

    assert (grid.configurations, grid.fitting, grid.ties, grid.best_s) == (5, 4, 3, 6.0)
    assert {prefer: chosen.regret for prefer, chosen in grid.chosen.items()} == {
        Prefer.FASTEST: pytest.approx(0.5),
        Prefer.LEANEST: pytest.approx(1.0),
        Prefer.ROBUST: pytest.approx(1 / 3),
    }
    assert grid.chosen[Prefer.LEANEST].peak_gib == 40.0
    assert least_regret([grid]) is Prefer.ROBUST


def test_a_choice_out_of_memory_is_counted_and_the_next_one_is_taken(made_grid):
    grid = made_grid(
        (10.0, None, 70.0, True, 10.0),
        (10.2, 8.0, 60.0, True, 10.2),
        (10.5, 10.0, 40.0, True, 10.5),
    )

    assert grid.chosen[Prefer.FASTEST].out_of_memory == 1
    assert grid.chosen[Prefer.FASTEST].regret == 0.0
    assert grid.chosen[Prefer.LEANEST].out_of_memory == 0
    assert grid.chosen[Prefer.LEANEST].regret == pytest.approx(0.25)


def test_equal_regrets_are_for_the_simplest_preference(made_grid):
    grid = made_grid((1.0, 1.0, 1.0, True, 1.0), (2.0, 3.0, 1.0, True, 2.0))

    assert mean_regrets([grid]) == dict.fromkeys(Prefer, 0.0)
    assert least_regret([grid]) is Prefer.FASTEST


@pytest.mark.slow
def test_the_default_has_the_least_mean_regret_on_the_shipped_grids():
    grids = grid_preferences(read_table())

    assert sum(grid.ties > 1 for grid in grids) >= 10
    assert SearchOptions().prefer is least_regret(grids)
