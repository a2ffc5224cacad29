"""Measured rows against predictions: a row is priced as the configuration it states, or returned with its reason."""

from __future__ import annotations

import contextlib

import pytest

from costmodels.mesh import Mesh
from costmodels.recompute import Recompute
from costmodels.schedules import Schedule
from costmodels.strategy import Frame
from planner.estimate import estimate_plan
from planner.validate import Priced, errors_of, price_row, read_rows, software_of
from profiles.catalog import load_cluster, with_gpus
from profiles.errors import ConfigError
from profiles.spec import AttentionKernel, ModelSpec, TrainingSpec

ROW = {
    "id": "made-1", "framework": "Megatron-LM core 0.14", "gpu": "a100-80g-sxm", "n_gpus": "16", "gpus_per_node": "8",
    "interconnect": "NVLink3", "model": "made", "layers": "8", "hidden": "1024", "heads": "16", "kv_heads": "", "head_dim": "",
    "ffn_hidden": "4096", "gated_ffn": "false", "vocab": "51200", "seq_len": "1024", "global_batch": "32", "micro_batch": "2", "dp": "4",
    "tp": "2", "pp": "2", "vpp": "", "cp": "", "ep": "", "experts": "", "sequence_parallel": "true", "zero_stage": "1",
    "recompute": "full", "dtype": "bf16", "step_time_s": "0.5", "derived_step_time_s": "", "peak_memory_gib": "4.0", "notes": "",
}
MODEL = ModelSpec(
    name="made", num_layers=8, hidden_size=1024, num_heads=16, num_kv_heads=16, head_dim=64, ffn_hidden_size=4096, vocab_size=51200,
    max_seq_length=1024)
TRAINING = TrainingSpec(global_batch_size=32, seq_length=1024, overlap_grad_reduce=False)


def test_a_row_is_priced_as_estimate_prices_its_configuration():
    frame = Frame(
        mesh=Mesh(pp=2, dp=4, tp=2), schedule=Schedule.ONE_F_ONE_B, virtual_stages=1, micro_batch_size=2, num_micro_batches=4,
        sequence_parallel=True)
    plan = estimate_plan(MODEL, with_gpus(load_cluster("a100-80gb"), 16), TRAINING, frame, zero=1, recompute=Recompute.FULL)

    priced = price_row(ROW)

    assert priced.reason is None
    assert priced.predicted_s == pytest.approx(plan.predicted.step_time_s.value, rel=1e-5)
    fullest = max(plan.predicted.memory_gib, key=lambda memory: memory.total)
    assert priced.predicted_gib == pytest.approx(fullest.total - fullest.reserve, abs=1e-3)  # allocated, without the reserve
    assert priced.error == pytest.approx(priced.predicted_s / 0.5 - 1)
    assert priced.memory_error == pytest.approx(priced.predicted_gib / 4.0 - 1)


@pytest.mark.parametrize(("change", "reason"), [
    pytest.param({"micro_batch": ""}, "micro_batch is not stated", id="missing"),
    pytest.param({"experts": "8"}, "mixture of experts", id="experts"),
    pytest.param({"cp": "2"}, "context parallelism", id="context-parallel"),
    pytest.param({"gpu": "tpu-v5"}, "no device profile for tpu-v5", id="device"),
    pytest.param({"dtype": "fp8"}, "precision 'fp8'", id="precision"),
    pytest.param({"recompute": "block 3 layers"}, "recompute 'block 3 layers'", id="recompute"),
    pytest.param({"dp": "8"}, "dp x tp x pp is not the number of GPUs", id="mesh"),
    pytest.param({"tp": "32", "dp": "1", "pp": "1", "n_gpus": "32"}, "tp N does not divide the N attention heads", id="heads"),
    pytest.param({"global_batch": "30"}, "the global batch of N is not micro-batch N x dp N x a whole number", id="batch"),
])
def test_a_row_outside_what_can_be_priced_has_its_reason(change, reason):
    priced = price_row({**ROW, **change})

    assert priced.reason == reason
    assert (priced.predicted_s, priced.error, priced.memory_error) == (None, None, None)
    assert (priced.id, priced.source) == ("made-1", "made")


def test_a_pipeline_that_never_fills_is_priced_as_gpipe():
    assert price_row({**ROW, "micro_batch": "8"}).reason is None  # one micro-batch on two stages


def test_a_time_that_was_derived_stands_in_for_one_that_is_not_stated():
    priced = price_row({**ROW, "step_time_s": "", "derived_step_time_s": "0.25"})

    assert priced.measured_s == 0.25


def test_a_row_without_a_time_is_priced_and_has_no_error():
    priced = price_row({**ROW, "step_time_s": ""})

    assert priced.predicted_s > 0
    assert priced.error is None


@pytest.mark.parametrize(("framework", "dtype", "attention", "dropout", "fp32_gradients", "overlap"), [
    pytest.param("Megatron-LM (2022)", "fp16", AttentionKernel.UNFUSED, 0.1, False, False, id="megatron-2022"),
    pytest.param("Megatron-LM core 0.14", "bf16", AttentionKernel.FLASH, 0.0, True, False, id="megatron-core"),
    pytest.param("torchtitan", "bf16", AttentionKernel.FLASH, 0.0, True, True, id="fsdp2"),
])
def test_what_a_framework_decides_is_read_off_its_name(framework, dtype, attention, dropout, fp32_gradients, overlap):
    software = software_of({**ROW, "framework": framework, "dtype": dtype})

    assert (software.attention, software.dropout) == (attention, dropout)
    assert (software.fp32_gradients, software.overlap) == (fp32_gradients, overlap)


@pytest.mark.parametrize(("interconnect", "faster"), [
    pytest.param("NVLink3 + 1x 100 Gb/s", False, id="one-slow-nic"), pytest.param("NVLink3 + 8x 400 Gb/s", True, id="eight-fast-nics"),
])
def test_the_network_of_the_row_is_used(interconnect, faster):
    known = price_row(ROW).predicted_s
    found = price_row({**ROW, "interconnect": interconnect}).predicted_s

    assert found < known if faster else found > known


def test_errors_by_hand():
    rows = [
        Priced("a-1", "a", measured_s=1.0, predicted_s=1.1, measured_gib=10.0, predicted_gib=9.0),
        Priced("a-2", "a", measured_s=2.0, predicted_s=1.6),
        Priced("a-3", "a", measured_s=4.0, predicted_s=4.0),
        Priced("a-4", "a", reason="mixture of experts"),
        Priced("b-1", "b", measured_s=1.0, predicted_s=5.0),
    ]

    errors = errors_of("a", rows)

    assert (errors.rows, errors.priced) == (4, 3)
    assert errors.mean_absolute == pytest.approx((0.1 + 0.2 + 0.0) / 3)
    assert errors.median_absolute == pytest.approx(0.1)
    assert errors.bias == pytest.approx((0.1 - 0.2 + 0.0) / 3)
    assert errors.memory_mean_absolute == pytest.approx(0.1)
    assert errors.memory_bias == pytest.approx(-0.1)


def test_a_source_without_priced_rows_has_no_errors():
    errors = errors_of("a", [Priced("a-4", "a", reason="mixture of experts")])

    assert (errors.rows, errors.priced, errors.mean_absolute, errors.median_absolute, errors.bias) == (1, 0, None, None, None)


def test_a_table_is_read_and_a_missing_column_is_an_error(tmp_path):
    path = tmp_path / "steps.csv"
    path.write_text(",".join(ROW) + "\n" + ",".join(ROW.values()) + "\n")
    assert read_rows(path) == [ROW]

    path.write_text("id,framework\nmade-1,Megatron-LM\n")
    with pytest.raises(ConfigError, match=r"steps.csv: no column layers"):
        read_rows(path)
    with pytest.raises(ConfigError, match=r"cannot read .*No such file"):
        read_rows(tmp_path / "none.csv")


def test_a_table_without_a_column_that_may_be_empty_is_refused_or_priced(tmp_path):
    path = tmp_path / "steps.csv"
    for column in sorted(set(ROW) - {"id", "framework"}):
        kept = {name: value for name, value in ROW.items() if name != column}
        path.write_text(",".join(kept) + "\n" + ",".join(kept.values()) + "\n")
        with contextlib.suppress(ConfigError):
            assert [price_row(row).id for row in read_rows(path)] == ["made-1"]


def test_a_cell_that_is_no_number_is_a_reason():
    assert price_row({**ROW, "layers": "eight"}).reason is not None
