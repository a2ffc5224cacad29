"""The calibration: refused rows, fits that find the constants behind made-up rows, and a file that reads back."""

from __future__ import annotations

import csv

import numpy as np
import pytest

from profiles.calibrate import to_yaml
from profiles.calibrate_links import _curves
from profiles.curves import MemoryCurve, memory_bound_s, spline_s
from profiles.fitting import Family, Score, Tables, fit, rounded, score
from profiles.measured import analytic_profile, read_profile
from profiles.provenance import Kind

COLUMNS = ("gpu", "op", "elements", "time_us", "source", "flag")


def write(path, columns, rows):
    with path.open("w", encoding="ascii", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([columns, *rows])


def made_up_family(rows):
    return Family(
        device="made-up", name="copy", rows=rows, sizes=lambda row: (int(row["elements"]),), start=(1e-6, 0.9),
        curve=lambda x: MemoryCurve(
            launch_s=float(x[0]), bandwidth_share=float(x[1]), kind=Kind.INTERPOLATED, source="made up"),
        price=lambda row, curve: memory_bound_s(float(row["elements"]), curve, 1e12))


def made_up_rows(noise):
    return [
        {"elements": str(n), "time_us": str((5.0 + n / 0.6e6) * wobble)}
        for n, wobble in zip((2**i for i in range(10, 34)), noise, strict=False)
    ]


def test_rows_that_no_profile_may_rest_on_are_refused(tmp_path):
    write(tmp_path / "elementwise.csv", COLUMNS, [
        ("A", "gelu", 1, 1, "x/good a", ""), ("A", "gelu", 2, 1, "x/good a", "strided_qkv"),
        ("A", "gelu", 3, 1, "x/good a", "tiny_gradients"),
        ("A", "gelu", 4, 1, "x/good a", "host_timed other_run_differs"), ("A", "gelu", 5, 1, "stas00/ml-engineering b", ""),
        ("B", "gelu", 6, 1, "x/good a", ""), ("A", "norm", 7, 1, "y/other a", ""),
    ])
    tables = Tables(tmp_path)

    def elements(**options):
        return [row["elements"] for row in tables.rows("elementwise", {"gpu": "A", "source": ("x/",)}, **options)]

    assert elements() == ["1", "2"]
    assert elements(allow="tiny_gradients") == ["1", "2", "3"]


def test_a_fit_finds_the_constants_behind_exact_rows():
    scores: list[Score] = []
    curve = made_up_family(made_up_rows([1.0] * 24)).fitted(scores)

    assert (curve.launch_s, curve.bandwidth_share) == (pytest.approx(5e-6, rel=1e-3), pytest.approx(0.6, rel=1e-3))
    assert (curve.bounds.low, curve.bounds.high) == ((2**10,), (2**33,))
    assert scores[0].median < 1e-3
    assert scores[0].crossed[0] < 1e-3


def test_a_fit_follows_the_median_not_the_outlier():
    noise = [1.0] * 24
    noise[20] = 10.0
    curve = made_up_family(made_up_rows(noise)).fitted([])

    assert curve.bandwidth_share == pytest.approx(0.6, rel=0.01)


def test_a_fit_is_deterministic_and_rounds_what_it_keeps():
    noise = np.random.default_rng(0).uniform(0.9, 1.1, 24).tolist()
    first, second = (made_up_family(made_up_rows(noise)).fitted([]) for _ in range(2))

    assert (first.launch_s, first.bandwidth_share) == (second.launch_s, second.bandwidth_share)
    assert first.launch_s == rounded(first.launch_s)


def test_a_constant_that_does_not_matter_stays_finite():
    x = fit(lambda x: x[0] * np.array([1.0, 2.0, 3.0]), np.array([2.0, 4.0, 6.0]), (1.0, 7.0))

    assert x == pytest.approx([2.0, 7.0], rel=1e-3)


def test_a_score_is_in_absolute_percent():
    line = score("d", "f", np.array([1.1, 0.8, 1.0]), np.ones(3), np.array([2.0, 1.0, 1.0]))

    assert (line.median, line.mean) == (pytest.approx(0.1), pytest.approx(0.1))
    assert line.crossed == (0.0, pytest.approx(1 / 3))
    assert "10.0%" in str(line)


def test_a_collective_spline_rises_even_where_rows_do_not(tmp_path):
    columns = ("gpu", "collective", "nodes", "ranks", "bytes", "time_us", "source", "flag")
    rows = [
        ("A", name, 1, ranks, 512 * 2**i, (10.0 + 512 * 2**i / 1e5) * (0.8 if i == 6 else 1.0), "x/good a", "")
        for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all") for ranks in (2, 4, 8) for i in range(21)
    ]
    write(tmp_path / "collectives.csv", columns, rows)
    curves = tuple(_curves(Tables(tmp_path), "made-up", ("A",), ("x/",), []))

    assert len(curves) == 12
    for curve in curves:
        assert list(curve.time_us) == sorted(curve.time_us)
        assert spline_s(curve, 2**29) == pytest.approx((10.0 + 2**29 / 1e5) / 1e6, rel=0.05)
        assert spline_s(curve, 512) == pytest.approx(10e-6, rel=0.05)


def test_a_profile_reads_back_as_it_was_written():
    text = to_yaml(analytic_profile("made-up"))

    assert to_yaml(read_profile(text, "made-up.yaml")) == text
    assert text.isascii()
