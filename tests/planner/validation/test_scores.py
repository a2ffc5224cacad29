"""Scores of prices equal hand calculation, keep their bounds, and are best when all is exact."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parplan.planner.validation.priced_rows import PricedRow
from parplan.planner.validation.scores import (
    SourceScore,
    grid_scores,
    kendall_tau,
    oom_precision,
    oom_recall,
    regret,
    score,
)

SECONDS = st.floats(1e-3, 1e3, allow_nan=False)
PAIRS = st.lists(st.tuples(SECONDS, SECONDS), min_size=2, max_size=12)


def timed(grid: str | None, *pairs: tuple[float, float], source: str = "made") -> list[PricedRow]:
    """Returns rows of one grid from pairs of predicted and measured seconds."""
    return [
        PricedRow(
            f"{source}-{index}", source, predicted_s=predicted, measured_s=measured, grid=grid
        )
        for index, (predicted, measured) in enumerate(pairs)
    ]


def memory_row(*, ran_out: bool | None, fits: bool | None) -> PricedRow:
    return PricedRow("made-1", "made", out_of_memory=ran_out, predicted_fits=fits)


def test_errors_of_a_source_by_hand():
    rows = [
        PricedRow(
            "a-1", "a", measured_s=1.0, predicted_s=1.1, measured_gib=10.0, predicted_gib=9.0
        ),
        PricedRow(
            "a-2", "a", measured_s=2.0, predicted_s=1.6, measured_gib=10.0, predicted_gib=10.5
        ),
        PricedRow("a-3", "a", measured_s=4.0, predicted_s=4.0),
        PricedRow("a-4", "a", predicted_s=3.0),
        PricedRow("a-5", "a", reason="mixture of experts"),
        PricedRow("a-6", "a", reason="no recompute"),
        PricedRow("a-7", "a", reason="no recompute"),
        PricedRow("b-1", "b", measured_s=1.0, predicted_s=5.0),
    ]

    scores = score(rows)

    assert list(scores) == ["a", "b"]
    assert (scores["a"].rows, scores["a"].priced) == (
        7,
        4,
    )  # one of the four has nothing to be compared with
    assert list(scores["a"].unpriced.items()) == [("no recompute", 2), ("mixture of experts", 1)]
    assert scores["a"].mape_time == pytest.approx((0.1 + 0.2 + 0.0) / 3)
    assert scores["a"].median_time == pytest.approx(0.1)
    assert scores["a"].bias_time == pytest.approx((0.1 - 0.2 + 0.0) / 3)
    assert scores["a"].mape_memory == pytest.approx(0.075)
    assert scores["a"].bias_memory == pytest.approx(-0.025)
    assert scores["b"].mape_time == scores["b"].bias_time == pytest.approx(4.0)


def test_a_source_without_a_priced_row_has_counts_and_nothing_else():
    scores = score([PricedRow("a-1", "a", reason="mixture of experts")])["a"]

    assert scores == SourceScore(
        rows=1,
        priced=0,
        unpriced={"mixture of experts": 1},
        mape_time=None,
        median_time=None,
        bias_time=None,
        kendall_tau=None,
        regret_at_1=None,
        regret_at_3=None,
        mape_memory=None,
        bias_memory=None,
        oom_recall=None,
        oom_precision=None,
    )


@pytest.mark.parametrize(
    ("predicted", "measured", "tau"),
    [
        pytest.param((1, 2, 3, 4), (1, 2, 3, 4), 1.0, id="same-order"),
        pytest.param((1, 2, 3, 4), (4, 3, 2, 1), -1.0, id="opposite"),
        pytest.param((1, 2, 3, 4), (1, 2, 4, 3), 4 / 6, id="one-pair-of-six-swapped"),
        pytest.param((1, 1, 2), (1, 2, 3), 2 / (2 * 3) ** 0.5, id="one-tie-in-the-prediction"),
        pytest.param(
            (12, 2, 1, 12, 2),
            (1, 4, 7, 1, 0),
            -4 / (8 * 9) ** 0.5,
            id="ties-in-both-as-in-the-docs-of-scipy",
        ),
        pytest.param((1, 1, 1), (1, 2, 3), None, id="a-prediction-that-ranks-nothing"),
        pytest.param((1, 2, 3), (5, 5, 5), None, id="measurements-that-rank-nothing"),
        pytest.param((), (), None, id="nothing"),
    ],
)
def test_kendall_tau_by_hand(predicted, measured, tau):
    assert kendall_tau(predicted, measured) == (None if tau is None else pytest.approx(tau))


@pytest.mark.parametrize(("k", "expected"), [(1, 0.5), (2, 0.2), (3, 0.0), (9, 0.0)])
def test_regret_is_of_the_best_of_the_k_predicted_fastest(k, expected):
    assert regret((1.0, 2.0, 3.0, 4.0), (1.5, 1.2, 1.0, 1.1), k) == pytest.approx(expected)


def test_ties_of_the_prediction_count_against_it():
    assert regret((1.0, 1.0, 1.0), (1.0, 3.0, 2.0), 1) == pytest.approx(2.0)


@given(PAIRS)
def test_tau_is_within_its_bounds_and_turns_with_the_prediction(pairs):
    predicted, measured = zip(*pairs, strict=True)

    tau = kendall_tau(predicted, measured)

    assert tau is None or -1 - 1e-12 <= tau <= 1 + 1e-12
    assert kendall_tau([-p for p in predicted], measured) == (
        None if tau is None else pytest.approx(-tau)
    )
    assert kendall_tau(measured, predicted) == (None if tau is None else pytest.approx(tau))


@given(PAIRS, st.integers(1, 12))
def test_regret_is_not_negative_and_does_not_grow_with_k(pairs, k):
    predicted, measured = zip(*pairs, strict=True)

    assert 0 <= regret(predicted, measured, k + 1) <= regret(predicted, measured, k)


@given(
    st.lists(SECONDS, min_size=3, max_size=12, unique_by=lambda seconds: round(seconds, 9)),
    st.floats(0.1, 10),
)
def test_a_prediction_that_is_right_up_to_a_factor_ranks_perfectly(measured, factor):
    scores = score(timed("grid", *((m * factor, m) for m in measured)))["made"]

    assert scores.kendall_tau == pytest.approx(1.0)
    assert (scores.regret_at_1, scores.regret_at_3) == (0.0, 0.0)
    assert scores.mape_time == pytest.approx(abs(factor - 1), abs=1e-9)
    assert scores.bias_time == pytest.approx(factor - 1, abs=1e-9)


def test_ranking_is_inside_each_grid_and_every_grid_counts_once():
    right = timed("small", (1.0, 1.0), (2.0, 2.0), (3.0, 3.0))
    wrong = timed(
        "large", (100.0, 400.0), (200.0, 300.0), (300.0, 200.0), (400.0, 100.0), (500.0, 50.0)
    )

    scores = score(right + wrong)["made"]

    assert scores.kendall_tau == pytest.approx((1.0 - 1.0) / 2)
    assert scores.regret_at_1 == pytest.approx((0.0 + 7.0) / 2)
    assert scores.regret_at_3 == pytest.approx((0.0 + 3.0) / 2)
    assert [(grid.key, grid.rows, grid.best_s) for grid in grid_scores(right + wrong)] == [
        ("small", 3, 1.0),
        ("large", 5, 50.0),
    ]


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(timed("grid", (1.0, 1.0), (2.0, 2.0)), id="two-configurations"),
        pytest.param(
            timed("grid", (1.0, 1.0), (1.0, 1.1), (1.0, 1.2), (2.0, 2.0)),
            id="repeats-of-two-configurations",
        ),
        pytest.param(timed(None, (1.0, 1.0), (2.0, 2.0), (3.0, 3.0)), id="no-grid"),
        pytest.param(
            [PricedRow(f"made-{n}", "made", predicted_s=n, grid="grid") for n in (1.0, 2.0, 3.0)],
            id="not-timed",
        ),
    ],
)
def test_fewer_than_three_timed_configurations_are_no_grid(rows):
    assert grid_scores(rows) == []
    assert score(rows)["made"].kendall_tau is None
    assert score(rows)["made"].regret_at_1 is None


def test_out_of_memory_recall_and_precision_by_hand():
    rows = [
        memory_row(ran_out=True, fits=False),
        memory_row(ran_out=True, fits=False),
        memory_row(ran_out=True, fits=True),
        memory_row(ran_out=False, fits=False),
        memory_row(ran_out=False, fits=True),
        memory_row(ran_out=None, fits=False),
        memory_row(ran_out=True, fits=None),
    ]

    assert oom_recall(rows) == pytest.approx(2 / 3)
    assert oom_precision(rows) == pytest.approx(2 / 3)


def test_recall_and_precision_of_nothing_are_none():
    fine = [memory_row(ran_out=False, fits=True), memory_row(ran_out=None, fits=None)]

    assert oom_recall(fine) is None
    assert oom_precision(fine) is None
