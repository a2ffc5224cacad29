"""The margin at a risk is a quantile of what measured runs needed beyond their prediction."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.planner.plan import oom_risk
from parplan.planner.plan.oom_risk import (
    DEFAULT_RISK,
    ENOUGH_RUNS,
    RiskMargin,
    default_margin,
    margin_at,
)
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.deviations import Deviation
from parplan.profiles.machines.stack_terms import EVERY_STACK, shipped_terms

RUN = Deviation(
    id="made",
    experiment="one",
    citation="",
    traits=("stack mine",),
    time=None,
    memory=0.0,
    excess=0.0,
)


@pytest.fixture(autouse=True)
def _runs(monkeypatch):
    """99 runs of a stack with an excess of 0.00 to 0.98, and 100 of another that has none."""
    own = [replace(RUN, excess=number / 100) for number in range(99)]
    others = [replace(RUN, experiment="two", traits=("stack other",))] * 100
    silent = [replace(RUN, excess=None)] * 5
    monkeypatch.setattr(
        "parplan.planner.plan.oom_risk.shipped_deviations", lambda: (*own, *others, *silent)
    )
    margin_at.cache_clear()
    default_margin.cache_clear()
    yield
    margin_at.cache_clear()
    default_margin.cache_clear()


@pytest.mark.parametrize(
    ("risk", "excess"),
    [(0.01, 0.98), (0.1, 0.89), (0.5, 0.49), (0.99, 0.04 / 0.96)],
    ids=["worst", "tenth", "half", "at-least-four-percent"],
)
def test_one_more_run_exceeds_the_margin_with_the_risk(risk, excess):
    share = round(excess / (1 + excess), 4)

    assert margin_at(risk, "mine") == RiskMargin(share=share, rows=99, stack="mine")


def test_too_few_runs_of_a_stack_take_those_of_every_stack():
    few = margin_at(0.005, "mine")
    unknown = margin_at(0.25, "unknown")

    assert few == RiskMargin(share=round(0.98 / 1.98, 4), rows=199, stack="all")
    assert unknown == RiskMargin(share=round(0.49 / 1.49, 4), rows=199, stack="all")


def test_an_experiment_can_be_left_out():
    assert margin_at(0.5, "mine", without="one") == RiskMargin(share=0.04, rows=100, stack="all")


def test_a_risk_that_no_runs_tell_is_refused_with_the_least_that_they_do():
    with pytest.raises(ConfigError, match=r"199 measured runs tell no risk below 0\.005") as error:
        margin_at(0.001, "mine")
    assert "use 0.5%" in error.value.hint


def test_the_default_margin_is_that_of_a_risk_where_a_stack_has_runs_enough():
    assert default_margin("mine") == margin_at(DEFAULT_RISK, "mine")


def test_few_runs_draw_the_margin_of_all_stacks_to_their_worst(monkeypatch):
    def margins(worst):
        for count in range(ENOUGH_RUNS):
            runs = [replace(RUN, traits=("stack few",), excess=worst)] * count
            monkeypatch.setattr(f"{oom_risk.__name__}.shipped_deviations", lambda each=runs: each)
            default_margin.cache_clear()
            yield default_margin("few").share

    lean, wide = list(margins(0.0)), list(margins(1.0))

    every = shipped_terms().residuals[EVERY_STACK].memory_margin
    assert lean[0] == wide[0] == every
    assert lean == sorted(lean, reverse=True)
    assert lean[-1] == pytest.approx(0.04, abs=0.01)
    assert wide == sorted(wide)
    assert wide[-1] == pytest.approx(0.5, abs=0.02)
