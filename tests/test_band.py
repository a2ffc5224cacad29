"""The error band and the memory margin: whose residuals they are, and when there is no band to show."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.band import error_band, memory_margin, stack_band
from planner.plan import Band, ErrorBand
from planner.request import SearchOptions
from profiles.catalog import load_cluster, load_stack
from profiles.measured import machine_for
from profiles.stack import Stack
from profiles.terms import FEWEST_ROWS, Residuals, Term, Terms

EVERY = Residuals(time_rows=1000, time_band=0.1, memory_rows=300, memory_band=0.08, memory_margin=0.09)
OWN = Residuals(time_rows=700, time_band=0.04, memory_rows=FEWEST_ROWS - 1, memory_band=0.01, memory_margin=0.01)
LEAN = Residuals(time_rows=FEWEST_ROWS - 1, time_band=0.5, memory_rows=FEWEST_ROWS, memory_band=0.02, memory_margin=0.03)
TERMS = Terms(
    residuals={"all": EVERY, "mine": OWN, "lean": LEAN},
    devices={"cpu": {"kernel_slowdown": Term(value=1.0, low=1.0, high=2.0, unit="", rows=20)}})


@pytest.fixture(autouse=True)
def _terms(monkeypatch):
    monkeypatch.setattr("planner.band.shipped_terms", lambda: replace(TERMS, devices={}))


@pytest.mark.parametrize(("name", "expected"), [
    pytest.param("mine", ErrorBand(time=Band(share=0.04, rows=700, stack="mine"), memory=Band(share=0.08, rows=300, stack="all")),
                 id="too-few-memory-rows-of-its-own"),
    pytest.param("lean", ErrorBand(time=Band(share=0.1, rows=1000, stack="all"), memory=Band(share=0.02, rows=10, stack="lean")),
                 id="too-few-time-rows-of-its-own"),
    pytest.param("other", ErrorBand(time=Band(share=0.1, rows=1000, stack="all"), memory=Band(share=0.08, rows=300, stack="all")),
                 id="no-rows-of-its-own"),
])
def test_the_band_of_a_stack_says_whose_rows_it_rests_on(name, expected):
    assert stack_band(name, TERMS) == stack_band(name) == expected


def test_a_device_that_nobody_measured_has_no_band():
    stack = load_stack("megatron-core")

    assert error_band(machine_for(load_cluster("cpu")), stack) is None
    assert error_band(machine_for(load_cluster("a100-80gb")), stack) == stack_band("megatron-core")


def test_a_device_with_assumed_kernels_and_measured_steps_has_a_band(monkeypatch):
    monkeypatch.setattr("planner.band.shipped_terms", lambda: TERMS)

    assert error_band(machine_for(load_cluster("cpu")), Stack(name="mine")) == stack_band("mine")


@pytest.mark.parametrize(("asked", "name", "expected"), [
    pytest.param(None, "other", 0.09, id="of-every-stack"),
    pytest.param(None, "mine", 0.09, id="not-of-too-few-rows"),
    pytest.param(None, "lean", 0.03, id="of-the-stack"),
    pytest.param(0.0, "lean", 0.0, id="none-at-all"),
    pytest.param(0.5, "lean", 0.5, id="as-asked"),
])
def test_the_margin_is_that_of_the_measured_runs_unless_asked(asked, name, expected):
    assert memory_margin(Stack(name=name), SearchOptions(memory_margin=asked)) == expected
