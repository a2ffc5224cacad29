"""Errors carry an exit code and one action; unknown names suggest a known one."""

from __future__ import annotations

import pytest

from parplan.profiles.errors import (
    ConfigError,
    InfeasibleError,
    PlannerError,
    SolverError,
    did_you_mean,
    unknown_name_error,
)


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        pytest.param(PlannerError, 1, id="base"),
        pytest.param(ConfigError, 2, id="config"),
        pytest.param(InfeasibleError, 3, id="infeasible"),
        pytest.param(SolverError, 4, id="solver"),
    ],
)
def test_every_error_is_a_planner_error_with_its_exit_code(error, exit_code):
    raised = error("what was found", hint="one action")

    assert isinstance(raised, PlannerError)
    assert raised.exit_code == exit_code
    assert (str(raised), raised.message, raised.hint) == (
        "what was found",
        "what was found",
        "one action",
    )


def test_a_close_name_is_suggested():
    assert did_you_mean("gpt-20", ["gpt-20b", "llama2-7b"]) == "did you mean 'gpt-20b'?"


def test_nothing_is_suggested_when_nothing_is_close():
    assert did_you_mean("zzz", ["gpt-20b", "llama2-7b"]) is None


def test_an_unknown_name_says_where_and_suggests_the_nearest():
    error = unknown_name_error("model", "gpt-20", ["llama2-7b", "gpt-20b"], where="plan.yaml")

    assert error.message == "unknown model 'gpt-20' in plan.yaml"
    assert error.hint == "did you mean 'gpt-20b'?"


def test_an_unknown_name_lists_the_known_ones_in_order_when_none_is_near():
    error = unknown_name_error("model", "zzz", ["llama2-7b", "gpt-20b"])

    assert error.message == "unknown model 'zzz'"
    assert error.hint == "known: gpt-20b, llama2-7b"


@pytest.mark.parametrize(
    ("name", "suggested"),
    [
        ("b800-80gb", None),
        ("h800-80gb", "h100-80gb"),
        ("rtx4090", None),
        ("mi300x", None),
        ("t4", None),
        ("a100", "a100-40gb"),
        ("a100-8gb", "a100-80gb"),
        ("h100_80gb", "h100-80gb"),
        ("l4", "l4-24gb"),
    ],
)
def test_another_gpu_is_no_misspelling_of_one_that_is_known(name, suggested):
    known = (
        "a100-40gb",
        "a100-80gb",
        "a800-80gb",
        "h100-80gb",
        "h200-141gb",
        "l4-24gb",
        "rtx3090-24gb",
        "v100-32gb",
    )

    assert did_you_mean(name, known) == (suggested and f"did you mean {suggested!r}?")
