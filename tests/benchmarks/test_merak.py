"""Merak's techniques on one small machine only make rows faster; gains multiply to the whole."""

from __future__ import annotations

import json
import math

import pytest
from click.testing import CliRunner

from benchmarks.papers import merak


@pytest.fixture(scope="module")
def document():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merak, "GPUS", 4)
        result = CliRunner().invoke(
            merak.main,
            ["--models", "gpt-1.5b", "--global-batch-size", "8", "--json"],
            catch_exceptions=False,
        )
    return json.loads(result.stdout)


def test_every_baseline_and_technique_has_a_row_that_fits(document):
    rows = document["rows"]

    assert [row["system"] for row in rows] == [
        "Megatron-LM 1F1B",
        "Megatron-LM interleaved",
        "DeepSpeed 3D",
        "1F1B, all recomputed",
        "+ shifted critical path",
        "+ stage-aware recompute",
        "+ sub-pipelining",
        "+ full search",
    ]
    assert all(0 < row["peak_gib"] < 23.68 and 0 < row["mfu"] < 1 for row in rows)
    assert document["kind"] == "analytic"


def test_a_technique_never_makes_the_step_longer_and_the_gains_multiply_to_the_speed_up(document):
    (summary,), steps = document["summaries"], [row["step_s"] for row in document["rows"]]

    assert steps[3:7] == sorted(steps[3:7], reverse=True)
    assert steps[-1] <= min(steps) * (1 + 1e-5)  # six digits in a plan
    assert math.prod(summary["gains"].values()) == pytest.approx(
        summary["speedup"]["1F1B, all recomputed"], rel=1e-9
    )
    assert summary["speedup_over_best"] == pytest.approx(min(steps[:3]) / steps[-1])
    assert summary["published_up_to"] == 1.42


def test_the_start_recomputes_everything(document):
    start = document["rows"][3]

    assert start["plan"].endswith("recompute full 48")
    assert start["gain"] is None
