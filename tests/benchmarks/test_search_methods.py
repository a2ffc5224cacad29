"""The table of the search methods: medians, gaps, and methods that found nothing."""

from __future__ import annotations

from math import inf

import pytest

from benchmarks.search_methods import (
    BEGIN,
    CASES,
    END,
    MethodResult,
    draw,
    gap_text,
    proven_row,
    write_page,
)
from parplan.planner.search_methods.ledger import Improvement

CASE = CASES[0]


def result(method: str, *steps_s: float, bound_s: float | None = None, ended: bool = False):
    trace = tuple(Improvement(0.5 * (n + 1), step_s) for n, step_s in enumerate(steps_s))
    return MethodResult(
        case=CASE,
        method=method,
        step_s=min(steps_s, default=inf),
        bound_s=bound_s,
        cpu_s=3.0,
        ended=ended,
        trace=trace,
    )


RESULTS = [
    result("ours", 10.0, bound_s=9.9, ended=True),
    result("random", 12.0, 11.0),
    result("random", 10.5),
    result("random", 13.0),
    result("greedy"),
]


@pytest.mark.parametrize(
    ("method", "text"),
    [
        ("ours", "0.00 % (0.5 s, ends)"),
        ("random", "10.00 % (0.5 s)"),
        ("greedy", "none"),
    ],
)
def test_a_gap_is_the_median_over_the_seeds_against_ours(method, text):
    assert gap_text(RESULTS, CASE, method) == text


def test_the_reference_says_its_gap_to_its_bound():
    assert proven_row(RESULTS, CASE)[3:] == ("10.000", "1.00 %", "3.0")


@pytest.mark.slow
def test_the_page_keeps_its_text_and_the_picture_is_drawn(tmp_path):
    results = [
        *RESULTS,
        *(result(name, 11.0) for name in ("flat-program", "mcmc", "genetic", "policy-gradient")),
    ]
    results += [result(name) for name in ("dynamic-program", "recursive-halving", "depth-first")]
    results += [result(name, 12.0) for name in ("alleviation", "tree-search", "exhaustive")]
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}old\n{END}after\n", encoding="utf-8")

    write_page(results, [CASE], page)
    draw(results, [CASE], 3.0, tmp_path / "picture.png")

    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "| mcmc | 10.00 % (0.5 s) |" in text
    assert "old" not in text
    assert (tmp_path / "picture.png").stat().st_size > 1000
