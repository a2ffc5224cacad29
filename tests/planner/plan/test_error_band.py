"""The band of a plan is by its traits; that of a stack comes from its residuals."""

from __future__ import annotations

import functools
import statistics
from dataclasses import replace

import pytest

from parplan.costmodels.communication.mesh import Mesh
from parplan.planner.plan.conformal import BAND_SHARE, ConformalBands, Deviating
from parplan.planner.plan.error_band import (
    MEMORY_PRIOR_ROWS,
    TIME_PRIOR_ROWS,
    error_band,
    margin_text,
    memory_margin,
    stack_band,
    without_steps,
)
from parplan.planner.plan.oom_risk import RiskMargin, default_margin, margin_at
from parplan.planner.plan.prediction import Band, ErrorBand
from parplan.planner.plan.traits import Run
from parplan.planner.request import SearchOptions
from parplan.profiles.machines.deviations import shipped_deviations
from parplan.profiles.machines.machine_catalog import load_cluster
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.machines.stack_terms import FEWEST_ROWS, Residuals, Terms
from parplan.profiles.models.fine_tuning import FineTuning
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.product_formats import ProductFormat
from parplan.profiles.stack import NEUTRAL, Stack

EVERY = Residuals(
    time_rows=1000, time_band=0.1, memory_rows=300, memory_band=0.08, memory_margin=0.09
)
OWN = Residuals(
    time_rows=700, time_band=0.04, memory_rows=FEWEST_ROWS - 1, memory_band=0.01, memory_margin=0.01
)
LEAN = Residuals(
    time_rows=FEWEST_ROWS - 1,
    time_band=0.5,
    memory_rows=FEWEST_ROWS,
    memory_band=0.02,
    memory_margin=0.03,
)
TERMS = Terms(residuals={"all": EVERY, "mine": OWN, "lean": LEAN})


@pytest.fixture(autouse=True)
def _terms(monkeypatch):
    monkeypatch.setattr("parplan.planner.plan.error_band.shipped_terms", lambda: TERMS)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param(
            "mine",
            ErrorBand(
                time=Band(share=0.04, rows=700, stack="mine"),
                memory=Band(share=0.08, rows=300, stack="all"),
            ),
            id="too-few-memory-rows-of-its-own",
        ),
        pytest.param(
            "lean",
            ErrorBand(
                time=Band(share=0.1, rows=1000, stack="all"),
                memory=Band(share=0.02, rows=10, stack="lean"),
            ),
            id="too-few-time-rows-of-its-own",
        ),
        pytest.param(
            "other",
            ErrorBand(
                time=Band(share=0.1, rows=1000, stack="all"),
                memory=Band(share=0.08, rows=300, stack="all"),
            ),
            id="no-rows-of-its-own",
        ),
    ],
)
def test_the_band_of_a_stack_says_whose_rows_it_rests_on(name, expected):
    assert stack_band(name, TERMS) == stack_band(name) == expected


def run_on(cluster, **changes):
    return Run(
        model=load_model("gpt-tiny").spec,
        training=TrainingSpec(global_batch_size=8, seq_length=128, stack=NEUTRAL, **changes),
        machine=machine_for(load_cluster(cluster)),
        mesh=Mesh(pp=1, dp=8, tp=1),
        zero=0,
    )


def test_the_band_of_a_plan_counts_the_measured_runs_of_its_kind():
    band = error_band(run_on("a100-80gb"))

    times = [each for each in shipped_deviations() if each.time is not None]
    ampere = len({each.id for each in times if "chip Ampere" in each.traits})
    assert (band.time.rows, band.time.stack) == (len({each.id for each in times}), "all")
    assert band.time.like == {"stack neutral": 0, "chip Ampere": ampere}
    assert 0 < band.memory.share < 1


def test_a_device_that_nobody_measured_has_a_wider_band():
    measured, computed = (error_band(run_on(name)) for name in ("a100-80gb", "cpu"))

    assert computed.time.share > measured.time.share
    assert computed.time.like["computed kernels"] > 0


@pytest.mark.parametrize("margin", [0.0, 0.5])
def test_the_margin_is_the_default_of_the_stack_unless_asked(margin):
    stack = Stack(name="mine")

    assert memory_margin(stack, SearchOptions(memory_margin=margin)) == margin
    assert memory_margin(stack, SearchOptions()) == default_margin("mine").share


def test_a_risk_gives_the_margin_unless_a_margin_is_stated():
    stack, options = Stack(name="mine"), SearchOptions(oom_risk=0.05)

    assert memory_margin(stack, options) == margin_at(0.05, "mine").share
    assert margin_text(stack, options).startswith("from --oom-risk 0.05 and ")
    assert memory_margin(stack, replace(options, memory_margin=0.2)) == 0.2


@pytest.mark.parametrize(
    ("share", "rows", "whose", "text"),
    [
        (0.1, 300, "all", "from 300 measured runs of other stacks"),
        (0.04, 50, "mine", "the least; 50 measured runs ask for no more"),
        (0.1, 50, "mine", "from 50 measured runs"),
        (0.1, 9, "mine", "from 9 measured runs and, as these are few, those of other stacks"),
    ],
)
def test_the_margin_says_where_it_comes_from(share, rows, whose, text, monkeypatch):
    margin = RiskMargin(share=share, rows=rows, stack=whose)
    monkeypatch.setattr("parplan.planner.plan.error_band.default_margin", lambda _: margin)

    assert margin_text(Stack(name="mine"), SearchOptions()) == text


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({}, None),
        ({"products": ProductFormat.NVFP4}, None),
        ({"fine_tuning": FineTuning(freeze=("embedding",))}, "training in part"),
    ],
)
def test_what_no_measured_step_has_leaves_a_plan_without_a_band(changes, missing):
    training = TrainingSpec(global_batch_size=8, seq_length=128, stack=NEUTRAL, **changes)

    assert without_steps(load_model("gpt-tiny").spec, training) == missing


def interval_score(runs, prior_rows):
    """The mean interval score of the bands of runs, each without the experiment of the run."""
    bands = ConformalBands(runs, prior_rows)
    share = functools.cache(bands.share)
    excess = [
        (band := share(run.traits, run.experiment), max(0.0, abs(run.deviation) - band))
        for run in runs
    ]
    return statistics.fmean(2 * band + 2 / (1 - BAND_SHARE) * over for band, over in excess)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantity", "prior_rows"), [("time", TIME_PRIOR_ROWS), ("memory", MEMORY_PRIOR_ROWS)]
)
def test_no_other_prior_makes_better_bands(quantity, prior_rows):
    runs = [
        Deviating(run.id, run.experiment, run.traits, deviation)
        for run in shipped_deviations()
        if (deviation := getattr(run, quantity)) is not None
    ]

    best = min(interval_score(runs, rows) for rows in (10.0, 40.0, 1000.0))

    assert interval_score(runs, prior_rows) < 1.02 * best
