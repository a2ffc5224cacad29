"""The run file: what is in it, that it comes back unchanged, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.planner.runs.run_account import predict
from parplan.planner.runs.run_file import (
    WorkSpan,
    read_run,
    run_fingerprint,
    run_to_json,
    write_run,
)
from parplan.planner.runs.timelines import measured_parts_s
from parplan.profiles.errors import ConfigError
from tests.helpers.synthetic_runs import BYTES, estimated, factors, run_of

PIPELINE = {"pp": 2, "dp": 2}
AHEAD = {
    "pp": 2,
    "recompute": Recompute.FULL,
    "schedule": Schedule.EARLY_RECOMPUTE,
    "stack": "parplan",
}


def test_a_run_comes_back_unchanged_with_its_plan(tmp_path):
    plan = estimated(**PIPELINE)
    run = run_of(plan)
    write_run(run, tmp_path / "run.json")

    back = read_run(tmp_path / "run.json")

    assert run_to_json(back) == run_to_json(run)
    assert back.the_plan() == plan
    assert run_fingerprint(back) == run_fingerprint(run)


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param({}, id="one-rank"),
        pytest.param(PIPELINE, id="pipeline"),
        pytest.param({"pp": 2, "virtual_stages": 3}, id="interleaved"),
        pytest.param(AHEAD, id="recompute-ahead"),
        pytest.param({"tp": 2, "dp": 2, "zero": 3}, id="tensor-parallel"),
    ],
)
def test_the_parts_of_a_run_are_the_prices_that_made_its_timeline(mesh):
    plan = estimated(**mesh)
    run = run_of(plan)

    measured = {(part.work, part.stage): part.measured_s for part in run.parts}
    priced = {(part.work, part.stage): part.predicted_s for part in run.parts}

    assert {key for key, seconds in priced.items() if seconds} == set(measured)
    for key, seconds in measured.items():
        assert seconds == pytest.approx(priced[key], rel=1e-6, abs=1e-12), key
    for share in (run.figures.idle_share, *(rank.idle_share for rank in run.ranks)):
        assert share.measured == pytest.approx(share.predicted, abs=1e-9)


def test_waits_for_transfers_are_measured_where_there_are_stages():
    plan = estimated(**PIPELINE)
    run = run_of(plan, factors(plan, pipeline=50.0))

    waits = {
        (part.work, part.stage): part.measured_s / part.predicted_s
        for part in run.parts
        if part.work.startswith("receive")
    }

    assert waits == {
        ("receive_F", 1): pytest.approx(50.0, rel=1e-4),
        ("receive_B", 0): pytest.approx(50.0, rel=1e-4),
    }


def test_a_tied_reduction_takes_as_long_as_for_the_rank_that_came_last():
    run = run_of(estimated(pp=2))
    early = run.ranks[1]
    longer = tuple(
        replace(span, start_s=span.start_s - 1.0) if span.work == "tied" else span
        for span in early.spans
    )

    measured = measured_parts_s([[run.ranks[0], replace(early, spans=longer)]])

    assert measured["tied", 0] == pytest.approx(
        next(part.predicted_s for part in run.parts if part.work == "tied"), rel=1e-6
    )


def test_parts_of_a_pass_add_up_by_micro_batch_before_their_mean():
    first = run_of(estimated()).ranks[0]

    def span(work: str, micro_batch: int, start_s: float, seconds: float) -> WorkSpan:
        return WorkSpan(
            work=work, stage=0, micro_batch=micro_batch, start_s=start_s, end_s=start_s + seconds
        )

    # forward and loss, a backward pass in two of which one half waits, a whole backward pass
    spans = (
        span("F", 0, 0.0, 2.0),
        span("F", 0, 2.0, 1.0),
        span("I", 0, 3.0, 4.0),
        span("F", 1, 7.0, 4.0),
        span("F", 1, 11.0, 1.0),
        span("B", 1, 12.0, 5.0),
        span("W", 0, 17.0, 2.0),
    )

    assert measured_parts_s([[replace(first, spans=spans)]]) == {("F", 0): 4.0, ("B", 0): 5.5}


def test_figures_leave_out_the_warm_up_and_follow_from_the_step():
    plan = estimated(**PIPELINE)
    figures, steps = run_of(plan).figures, run_of(plan).steps

    step_s = predict(plan).step_s
    assert steps.median_s == steps.most_s == pytest.approx(step_s)
    assert figures.tokens_per_s.measured == pytest.approx(16 * 1024 / step_s)
    assert figures.tokens_per_s_per_gpu.measured == pytest.approx(16 * 1024 / step_s / 4)
    assert figures.mfu.measured == pytest.approx(plan.predicted.mfu.value, rel=1e-5)


def test_every_rank_has_its_bytes_and_starts_at_the_step():
    run = run_of(estimated(**PIPELINE), allocated=100, reserved=110)

    assert [(rank.pp, rank.dp, rank.tp) for rank in run.ranks] == [
        (0, 0, 0),
        (0, 1, 0),
        (1, 0, 0),
        (1, 1, 0),
    ]
    assert all(rank.gradients_bytes.measured == BYTES.gradients for rank in run.ranks)
    assert all(
        rank.peak_reserved_bytes.predicted > rank.peak_allocated_bytes.predicted > 10**9
        for rank in run.ranks
    )
    assert min(span.start_s for rank in run.ranks for span in rank.spans) == pytest.approx(
        0.0, abs=1e-9
    )


def _broken(text: str, **changes: object) -> str:
    return json.dumps(json.loads(text) | changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda text: text[:100], r"run\.json:\d+: not JSON", id="cut-off"),
        pytest.param(
            lambda text: "[]", "run_version is missing, this parplan reads 1", id="a-list"
        ),
        pytest.param(
            lambda text: _broken(text, run_version=2),
            "run_version is 2, this parplan reads 1",
            id="another-version",
        ),
        pytest.param(
            lambda text: _broken(text, recorded_steps=0), "no step was recorded", id="no-step"
        ),
        pytest.param(lambda text: _broken(text, stepz=1), "unknown key stepz", id="unknown-key"),
    ],
)
def test_what_is_no_run_is_refused(change, message, tmp_path):
    path = tmp_path / "run.json"
    path.write_text(change(run_to_json(run_of(estimated()))))

    with pytest.raises(ConfigError, match=message):
        read_run(path)


def test_a_missing_run_says_how_to_make_one(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*run\.json: No such file") as error:
        read_run(tmp_path / "run.json")

    assert error.value.hint == "make one with: torchrun ... -m parplan.executor plan.yaml"
