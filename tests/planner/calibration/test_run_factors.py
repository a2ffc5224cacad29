"""Calibration recovers known factors from runs, and states no factor that a run cannot show."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.planner.calibration.measured_run import run_measured
from parplan.planner.calibration.run_factors import calibrate
from parplan.planner.plan.derived import layout_of
from parplan.planner.runs.run_account import predict
from parplan.profiles.documents.schema import document
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.applied_profile import apply_profile
from parplan.profiles.machines.calibration_factors import CAUSES, UNCHANGED, Calibration, Factor
from parplan.profiles.machines.shipped_profiles import shipped_profile
from parplan.profiles.provenance import Kind
from tests.helpers.planning import estimate_plan
from tests.helpers.synthetic_runs import estimated, factors, run_of


def calibrated(*pairs) -> Calibration:
    return profile_of(*pairs).calibration


def profile_of(*pairs):
    runs = [run_of(plan, factors(plan, **truth)) for plan, truth in pairs]
    return made_of(*runs)


def made_of(*runs, names=None):
    names = names or [f"run{i}.json" for i in range(len(runs))]
    return calibrate([run_measured(run, name) for run, name in zip(runs, names, strict=True)])


@pytest.mark.parametrize(
    ("mesh", "truth"),
    [
        pytest.param({}, {"forward": 1.3, "backward": 0.8, "optimizer": 2.5}, id="one-rank"),
        pytest.param(
            {"pp": 2},
            {"forward": 0.7, "backward": 1.4, "pipeline": 6.0, "optimizer": 3.0, "data": 2.0},
            id="pipeline",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"dp": 4},
            {"forward": 1.2, "backward": 1.1, "data": 3.0, "optimizer": 1.5},
            id="data-parallel",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"dp": 2, "zero": 1},
            {"forward": 1.2, "backward": 0.9, "data": 30.0, "optimizer": 0.5},
            id="reduction-half-hidden",
        ),
        pytest.param(
            {"pp": 2, "virtual_stages": 3, "dp": 2},
            {"forward": 1.5, "backward": 1.6, "data": 0.5, "pipeline": 9.0, "optimizer": 1.2},
            id="interleaved",
        ),
    ],
)
def test_known_factors_come_back(mesh, truth):
    calibration = calibrated((estimated(**mesh), truth))

    assert {cause: calibration.factor(cause).value for cause in truth} == {
        cause: pytest.approx(x, rel=1e-4) for cause, x in truth.items()
    }
    assert all(calibration.factor(cause).measured for cause in truth)
    unchanged = {cause for cause in CAUSES if calibration.factor(cause) == UNCHANGED}
    assert unchanged == set(CAUSES) - set(truth)


@pytest.mark.slow
def test_two_runs_tell_tensor_parallel_communication_from_compute():
    truth = {"forward": 1.3, "backward": 0.9, "optimizer": 1.1}

    calibration = calibrated((estimated(), truth), (estimated(tp=2), truth | {"tensor": 3.0}))

    assert calibration.tensor.value == pytest.approx(3.0, rel=1e-3)
    assert calibration.forward.value == pytest.approx(1.3, rel=1e-3)
    assert "told apart" not in calibration.tensor.source


def test_one_run_does_not_and_says_so_yet_its_own_step_is_met():
    plan = estimated(tp=2)
    profile = profile_of((plan, {"forward": 1.3, "backward": 0.9, "tensor": 3.0, "optimizer": 1.1}))

    factors_of_run = profile.calibration
    assert factors_of_run.tensor.source.endswith("together with compute, not told apart")
    assert factors_of_run.tensor.value == pytest.approx(
        (factors_of_run.forward.value * factors_of_run.backward.value) ** 0.5, rel=1e-4
    )
    assert profile.runs[0].calibrated_s == pytest.approx(profile.runs[0].measured_s, rel=1e-4)


@pytest.mark.parametrize("mesh", [{"pp": 2, "dp": 2}, {"tp": 2, "dp": 2, "zero": 3}], ids=str)
def test_the_profile_predicts_the_step_of_its_run(mesh):
    plan = estimated(**mesh)
    profile = profile_of((plan, {"forward": 1.7, "backward": 1.2, "data": 2.0, "optimizer": 4.0}))
    there = replace(plan.cluster, calibration=profile.calibration)

    second = estimate_plan(
        plan.model, there, plan.training, layout_of(plan), zero=mesh.get("zero", 0)
    )

    measured_s = profile.runs[0].measured_s
    assert second.predicted.step_time_s.value == pytest.approx(measured_s, rel=1e-3)
    assert (
        abs(plan.predicted.step_time_s.value / measured_s - 1) > 0.1
    )  # without the profile it was off
    assert second.predicted.step_time_s.kind is Kind.INTERPOLATED


@pytest.mark.slow
def test_noise_of_a_few_percent_stays_a_few_percent():
    plan, truth = (
        estimated(pp=2, dp=2),
        {"forward": 1.3, "backward": 1.2, "data": 2.0, "pipeline": 4.0, "optimizer": 1.5},
    )
    run = run_of(plan, factors(plan, **truth))
    off = [
        replace(part, measured_s=part.measured_s * (1.03 if i % 2 else 0.97))
        for i, part in enumerate(run.parts)
        if part.measured_s
    ]

    calibration = made_of(replace(run, parts=tuple(off))).calibration

    for cause, value in truth.items():
        assert calibration.factor(cause).value == pytest.approx(value, rel=0.12), cause


@pytest.mark.slow
def test_a_run_of_a_calibrated_plan_gives_the_same_profile():
    plan, truth = estimated(), {"forward": 1.3, "backward": 0.8, "optimizer": 2.0}
    first = calibrated((plan, truth))
    with_it = replace(plan, cluster=replace(plan.cluster, calibration=first))

    second = made_of(run_of(with_it, factors(plan, **truth))).calibration

    assert {c: second.factor(c).value for c in CAUSES} == {
        c: pytest.approx(first.factor(c).value, rel=1e-4) for c in CAUSES
    }


def test_runs_of_plans_with_measured_curves_keep_these_beside_the_factors():
    base, truth = estimated(), {"forward": 1.3, "backward": 0.8, "optimizer": 2.0}
    shipped = shipped_profile("a100-80gb")
    measured = replace(
        shipped,
        compute=replace(
            shipped.compute, optimizer=replace(shipped.compute.optimizer, bandwidth_share=0.1)
        ),
    )
    plan = replace(base, cluster=replace(base.cluster, profile=measured))

    profile = profile_of((plan, truth))

    assert document(profile.profile) == document(measured)
    assert (profile.precision, profile.device, profile.cluster["device"]["name"]) == (
        "bf16",
        "a100-80gb",
        "a100-80gb",
    )
    assert not {"calibration", "profile"} & set(profile.cluster)
    assert {cause: profile.calibration.factor(cause).value for cause in truth} == {
        cause: pytest.approx(x, rel=1e-4) for cause, x in truth.items()
    }
    cluster, _ = apply_profile(profile, None, plan.training, "mine.yaml", force=False)
    assert cluster == replace(
        plan.cluster, profile=profile.profile, calibration=profile.calibration
    )


@pytest.mark.slow
def test_runs_with_unlike_curves_make_no_profile():
    base, shipped = estimated(), shipped_profile("a100-80gb")
    plans = (base, replace(base, cluster=replace(base.cluster, profile=shipped)))

    with pytest.raises(
        ConfigError,
        match=r"run1\.json: its plan was made with other measured curves than that of run0\.json",
    ):
        profile_of(*((plan, {"forward": 1.3}) for plan in plans))
    assert document(profile_of(*[(plans[1], {"forward": 1.3})] * 2).profile) == document(shipped)


def test_the_allocator_share_is_the_largest_that_a_rank_had():
    plan = estimated()

    assert made_of(
        run_of(plan, allocated=100, reserved=107), run_of(plan, allocated=100, reserved=103)
    ).allocator_share == pytest.approx(0.07)
    assert made_of(run_of(plan)).allocator_share is None


def test_a_factor_prices_only_its_own_cause():
    plan = estimated(pp=2, dp=2, tp=2)
    base = predict(plan).timeline.parts_s

    def ratios(**truth: float) -> dict[str, float]:
        there = replace(plan, cluster=replace(plan.cluster, calibration=factors(plan, **truth)))
        parts_s = predict(there).timeline.parts_s
        return {
            work: parts_s[work, stage] / seconds
            for (work, stage), seconds in base.items()
            if seconds
        }

    assert ratios(optimizer=2.0) == {
        **dict.fromkeys(ratios(), pytest.approx(1.0)),
        "optimizer": pytest.approx(2.0),
    }
    assert ratios(pipeline=2.0)["receive_F"] == pytest.approx(2.0)
    assert ratios(forward=2.0)["F"] > 1.5
    assert ratios(forward=2.0)["receive_B"] == pytest.approx(1.0)
    assert 1.0 < ratios(tensor=2.0)["F"] < 2.0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        pytest.param(
            {"gpu": "h100-80gb"},
            r"b\.json: its device is h100-80gb, that of a\.json is a100-80gb",
            id="device",
        ),
        pytest.param(
            {"stack": "nemo"},
            r"b\.json: its software stack is nemo, that of a\.json is torchtitan",
            id="stack",
        ),
    ],
)
def test_runs_of_unlike_machines_make_no_profile(changed, message):
    with pytest.raises(ConfigError, match=message):
        made_of(run_of(estimated()), run_of(estimated(**changed)), names=["a.json", "b.json"])


@pytest.mark.parametrize("device", ["cpu", "NVIDIA H100 80GB HBM3"])
def test_a_run_on_another_device_than_the_plans_is_refused(device):
    run = run_of(estimated())
    elsewhere = replace(run, environment=replace(run.environment, device=device))

    with pytest.raises(
        ConfigError, match=rf"run\.json: the plan is for a100-80gb, the run was on {device}"
    ):
        made_of(elsewhere, names=["run.json"])


def test_a_run_without_times_is_refused():
    run = run_of(estimated())
    empty = replace(run, parts=tuple(replace(part, measured_s=None) for part in run.parts))

    with pytest.raises(ConfigError, match="measured no part of a step that has a price"):
        made_of(empty)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_factor_is_a_positive_number(value):
    with pytest.raises(ConfigError, match="it must be a positive number"):
        Factor(value=value)
