"""Files of other planners become a profile: their prices, and the shipped ones elsewhere."""

from __future__ import annotations

import json

import pytest

from parplan.costmodels.stage_costs import step_costs
from parplan.planner.calibration.imported_profile import import_files
from parplan.planner.calibration.layer_measured import measured_by_layers
from parplan.planner.calibration.run_factors import calibrate
from parplan.planner.plan.plan_strategy import prices_of_plan, strategy_of
from parplan.planner.runs.timelines import parts_s
from parplan.profiles.documents.schema import document
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.shipped_profiles import shipped_profile
from parplan.profiles.machines.user_profile import read_profile
from tests.helpers.synthetic_runs import estimated

FORWARD = "b=1, m=4096, k=5120, n=1536, layout=TN, accumulate=False, out_dtype=bf16"


@pytest.fixture
def simumax(tmp_path):
    path = tmp_path / "system.json"
    factors = {"tflops": 312, "accurate_efficient_factor": {FORWARD: 0.5}}
    path.write_text(
        json.dumps({"sys_name": "x", "num_per_node": 8, "accelerator": {"op": {"matmul": factors}}})
    )
    return path


def test_a_profile_of_files_has_their_points_and_the_shipped_curves(tmp_path, simumax):
    import_files(tmp_path / "mine.yaml", [simumax], "a100-80gb")

    made = read_profile(tmp_path / "mine.yaml")

    shipped = shipped_profile("a100-80gb")
    curve = made.profile.compute.forward
    assert curve.points == ((4096, 1536, 5120, pytest.approx(412.98, rel=1e-4)),)
    assert curve.source.startswith("files of SimuMax, ")
    assert (made.device, made.precision, made.environment.tool) == ("a100-80gb", "bf16", "SimuMax")
    assert document(made.profile.compute.norm) == document(shipped.compute.norm)
    assert document(made.profile.compute.flash_backward) == document(shipped.compute.flash_backward)
    assert document(made.profile.intra) == document(shipped.intra)
    assert made.records[0].detail.startswith("SimuMax x, ")


def test_a_second_file_extends_the_profile(tmp_path, simumax):
    hardware = tmp_path / "sp_time_1nodes_8gpus_per_node.json"
    hardware.write_text('{"allreduce_size_8_64MB_time": 0.6}')
    output = tmp_path / "mine.yaml"

    import_files(output, [simumax], "a100-80gb")
    import_files(output, [hardware], None)

    made = read_profile(output)
    assert len(made.records) == 2
    assert made.profile.intra.curves[0].time_us == (600.0,)
    assert made.profile.compute.forward.points
    shipped = shipped_profile("a100-80gb").compute
    assert document(made.profile.compute.norm) == document(shipped.norm)
    with pytest.raises(ConfigError, match="it was measured on NVIDIA H200, "):
        import_files(output, [hardware], "h200-141gb")


@pytest.mark.parametrize(
    ("gpu", "message"),
    [(None, "it names no device"), ("a100", "--gpu a100: no driver's name of such a GPU")],
)
def test_a_device_that_nothing_names_is_refused(tmp_path, simumax, gpu, message):
    with pytest.raises(ConfigError, match=message):
        import_files(tmp_path / "mine.yaml", [simumax], gpu)


def prices(plan):
    price_cache = prices_of_plan(plan)
    return parts_s(
        strategy_of(plan, price_cache), step_costs(strategy_of(plan, price_cache), price_cache)
    )


@pytest.fixture
def plan():
    return estimated(num_micro_batches=1)


def test_metis_times_of_layers_are_factors_of_both_passes_and_the_optimizer(tmp_path, plan):
    priced = prices(plan)
    passes_ms = 2e3 * (priced["F", 0] + priced["B", 0])
    blocks = plan.model.num_layers
    times = {
        "total_time_ms": passes_ms + 3e3 * priced["optimizer", 0],
        "layer_compute_total_ms": [passes_ms / (blocks + 2)] * (blocks + 2),
        "optimizer_time_ms": 3e3 * priced["optimizer", 0],
    }
    path = tmp_path / "DeviceType.A100_tp1_bs2.json"
    path.write_text(json.dumps({"execution_time": times}))

    profile = calibrate([measured_by_layers(path, plan)])

    factors = profile.calibration
    assert factors.forward.value == factors.backward.value == pytest.approx(2.0, rel=1e-4)
    assert factors.optimizer.value == pytest.approx(3.0, rel=1e-4)
    assert factors.forward.source.startswith("Metis file ")
    assert profile.runs[0].calibrated_s == pytest.approx(profile.runs[0].measured_s, rel=1e-3)


def test_galvatron_times_are_a_factor_of_the_forward_pass(tmp_path, plan):
    forward_ms = 1.5e3 * prices(plan)["F", 0]
    depth, seq = plan.model.num_layers, plan.training.seq_length
    path = tmp_path / "computation_profiling_bf16_x.json"
    path.write_text(
        json.dumps(
            {
                f"layernum[{depth - 1}]_bsz2_seq{seq}": 0.9 * forward_ms,
                f"layernum[{depth + 1}]_bsz2_seq{seq}": 1.1 * forward_ms,
            }
        )
    )

    profile = calibrate([measured_by_layers(path, plan)])

    assert profile.calibration.forward.value == pytest.approx(1.5, rel=1e-4)
    assert not profile.calibration.backward.measured
    assert profile.runs[0].measured_s is None


def test_times_of_another_layout_than_the_plans_are_refused(tmp_path, plan):
    path = tmp_path / "DeviceType.A100_tp4_bs2.json"
    layers = {"layer_compute_total_ms": [1, 1, 1], "optimizer_time_ms": 1, "total_time_ms": 4}
    path.write_text(json.dumps({"execution_time": layers}))

    with pytest.raises(ConfigError, match="its tp is 4, the plan's is 1"):
        measured_by_layers(path, plan)
