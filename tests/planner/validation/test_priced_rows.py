"""A measured row is priced as the configuration it states, or returned with a reason."""

from __future__ import annotations

import contextlib

import pytest

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.validation.configuration import configuration_of, expert_tensor_parallel
from parplan.planner.validation.priced_rows import price_row
from parplan.planner.validation.step_rows import read_rows
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack, with_gpus
from parplan.profiles.models.spec import (
    ModelSpec,
    TrainingSpec,
)
from parplan.profiles.stack import ContextForm
from tests.helpers.cases import named
from tests.helpers.measured_rows import FULL, ROW
from tests.helpers.planning import estimate_plan

MODEL = ModelSpec(
    name="made",
    num_layers=8,
    hidden_size=1024,
    num_heads=16,
    num_kv_heads=16,
    head_dim=64,
    ffn_hidden_size=4096,
    vocab_size=51200,
    max_seq_length=1024,
)
TRAINING = TrainingSpec(
    global_batch_size=32,
    seq_length=1024,
    overlap_grad_reduce=False,
    stack=load_stack("megatron-core"),
)


def test_a_row_is_priced_as_estimate_prices_its_configuration():
    layout = ParallelLayout(
        mesh=Mesh(pp=2, dp=4, tp=2),
        schedule=Schedule.ONE_F_ONE_B,
        virtual_stages=1,
        micro_batch_size=2,
        num_micro_batches=4,
        sequence_parallel=True,
    )
    plan = estimate_plan(
        MODEL,
        with_gpus(load_cluster("a100-80gb"), 16),
        TRAINING,
        layout,
        zero=1,
        recompute=Recompute.FULL,
    )

    priced = price_row({**ROW, "memory_kind": "allocated"})

    assert priced.reason is None
    assert priced.predicted_s == pytest.approx(plan.predicted.step_time_s.value, rel=1e-5)
    fullest = max(plan.predicted.memory_gib, key=lambda memory: memory.total)
    assert priced.predicted_gib == pytest.approx(
        fullest.total - fullest.reserve, abs=1e-3
    )  # allocated, without the reserve
    assert price_row(ROW).predicted_gib == pytest.approx(
        fullest.total, abs=1e-3
    )  # an unnamed figure is the whole device's
    assert priced.error == pytest.approx(priced.predicted_s / 0.5 - 1)
    assert priced.memory_error == pytest.approx(priced.predicted_gib / 4.0 - 1)


NOT_PRICED = {
    "missing": ({"layers": ""}, "layers is not stated"),
    "network": ({"interconnect": "8x 0 Gb/s"}, "interconnect is 0 Gb/s"),
    "expert-tensor-parallel": (
        {"experts": "8", "tp": "4", "dp": "2", "notes": "etp3"},
        "mesh: etp is N, it must divide tp N",
    ),
    "experts-of-a-token": ({"experts": "8", "framework": "NeMo", "ep": "4"}, "top_k is not stated"),
    "expert-parallel": (
        {"experts": "8", "framework": "NeMo", "top_k": "2", "ep": "3"},
        "mesh: ep N does not divide the N ranks of a stage, over which the experts are divided",
    ),
    "encoder": ({"model": "t5/t5_tp1"}, "an encoder beside a decoder, or of images"),
    "contradiction": ({"notes": "STALE: a"}, "its own figures disagree"),
    "unknown-module": (
        {"recompute": "selective [moe_act block]"},
        "recompute 'selective [moe_act block]'",
    ),
    "offloaded-module": ({"offload": "block"}, "offloaded module 'block'"),
    "layout": ({"pipeline_layout": "Et*3|t*5?L"}, "pipeline_layout 'Et*3|t*5?L' is not understood"),
    "layout-of-fewer-layers": (
        {"pipeline_layout": "Et*3|t*4L"},
        "2 stages of 7 layers are stated, not 2 of 8",
    ),
    "layer-pattern": (
        {"layer_pattern": "M?", "state_space": "1 1 1 1"},
        "layer_pattern 'M?' is not understood",
    ),
    "latent-ranks": ({"latent": "1 2 3"}, "latent is not made of 5 whole numbers"),
    "no-latent-ranks": (
        {"model": "gpt/small_mla"},
        "latent attention of ranks that are not stated",
    ),
    "unlisted-model": (
        {"model": "DeepSeekV4 Flash", "layers": ""},
        "plan models does not list deepseek-v4-flash",
    ),
    "context-parallel": ({"cp": "2"}, "dp x cp x tp x pp is not the number of GPUs"),
    "device": ({"gpu": "tpu-v5"}, "no device profile for tpu-v5"),
    "a-name-that-begins-alike": ({"gpu": "l40-48g"}, "no device profile for l40-48g"),
    "the-slower-card": ({"gpu": "h200-pcie"}, "no device profile for h200-pcie"),
    "no-vocabulary": ({"vocab": ""}, "vocab is not stated"),
    "no-precision": ({"dtype": ""}, "dtype is not stated"),
    "no-truth-value": ({"sequence_parallel": "yes"}, "sequence_parallel is neither true nor false"),
    "precision": ({"dtype": "int8"}, "precision 'int8'"),
    "recompute": ({"recompute": "block 3 layers"}, "recompute 'block 3 layers'"),
    "mesh": ({"dp": "8"}, "dp x cp x tp x pp is not the number of GPUs"),
    "heads": (
        {"tp": "32", "dp": "1", "pp": "1", "n_gpus": "32"},
        "tp N does not divide the N attention heads",
    ),
    "batch": (
        {"global_batch": "30"},
        "the global batch of N is not micro-batch N x dp N x a whole number",
    ),
}


@pytest.mark.parametrize(("change", "reason"), named(NOT_PRICED, NOT_PRICED))
def test_a_row_outside_what_can_be_priced_has_its_reason(change, reason):
    priced = price_row({**ROW, **change})

    assert priced.reason == reason
    assert (priced.predicted_s, priced.error, priced.memory_error) == (None, None, None)
    assert (priced.id, priced.source) == ("made-1", "made")


@pytest.mark.parametrize(
    ("change", "same"),
    [
        pytest.param(
            {"sequence_parallel": "True", "gated_ffn": "FALSE"}, {}, id="as-pandas-writes-it"
        ),
        pytest.param({"vpp": "0"}, {"vpp": "1"}, id="no-virtual-stages"),
        pytest.param({"gpu": "a100-80gb-pcie"}, {"gpu": "a100-80g-pcie"}, id="gb-for-g"),
    ],
)
def test_other_spellings_of_a_cell_are_priced_the_same(change, same):
    assert price_row({**ROW, **change}).predicted_s == price_row({**ROW, **same}).predicted_s > 0


def test_a_pipeline_that_never_fills_is_priced_as_gpipe():
    assert price_row({**ROW, "micro_batch": "8"}).reason is None  # one micro-batch on two stages


def test_a_time_that_was_derived_stands_in_for_one_that_is_not_stated():
    priced = price_row({**ROW, "step_time_s": "", "derived_step_time_s": "0.25"})

    assert priced.measured_s == 0.25


def test_a_row_without_a_time_is_priced_and_has_no_error():
    priced = price_row({**ROW, "step_time_s": ""})

    assert priced.predicted_s > 0
    assert priced.error is None


def test_a_setting_that_a_row_leaves_open_is_the_fastest_that_fits_and_is_named():
    open_ = price_row({**ROW, "vpp": "1", "micro_batch": "", "recompute": ""})
    stated = [
        price_row({**ROW, "micro_batch": str(size), "recompute": level}).predicted_s
        for size in (1, 2, 4, 8)
        if size * 4 <= 32
        for level in ("none", "selective", "full")
    ]

    assert open_.assumed == ("micro_batch", "recompute")
    assert open_.predicted_s == min(stated)
    assert price_row(ROW).assumed == ()


@pytest.mark.parametrize(
    ("change", "ran_out"),
    [
        ({"memory_kind": "OOM", "step_time_s": "", "peak_memory_gib": ""}, True),
        ({"memory_kind": "out-of-memory", "step_time_s": ""}, True),
        ({}, False),
        ({"step_time_s": "", "peak_memory_gib": ""}, None),
    ],
)
def test_whether_a_run_ran_out_of_memory_is_read_off_the_row(change, ran_out):
    assert price_row({**ROW, **change}).out_of_memory is ran_out


def test_what_does_not_fit_the_device_is_predicted_not_to_fit():
    assert price_row(ROW).predicted_fits
    assert not price_row(
        {**ROW, "layers": "2048", "recompute": "none", "micro_batch": "8"}
    ).predicted_fits


def test_rows_of_one_model_machine_and_batch_are_one_grid():
    second = price_row({**ROW, "id": "made-2", "tp": "1", "dp": "8"})

    assert price_row(ROW).grid == second.grid
    assert price_row({**ROW, "global_batch": "64"}).grid != second.grid


@pytest.mark.parametrize(
    ("interconnect", "faster"),
    [
        pytest.param("NVLink3 + 1x 100 Gb/s", False, id="one-slow-nic"),
        pytest.param("NVLink3 + 8x 400 Gb/s", True, id="eight-fast-nics"),
    ],
)
def test_the_network_of_the_row_is_used(interconnect, faster):
    known = price_row(ROW).predicted_s
    predicted_s = price_row({**ROW, "interconnect": interconnect}).predicted_s

    assert predicted_s < known if faster else predicted_s > known


def test_a_table_is_read_and_a_missing_column_is_an_error(tmp_path):
    path = tmp_path / "steps.csv"
    path.write_text(",".join(ROW) + "\n" + ",".join(ROW.values()) + "\n")
    assert read_rows(path) == [FULL]

    path.write_text("id,framework\nmade-1,Megatron-LM\n")
    with pytest.raises(ConfigError, match=r"steps.csv: no column layers"):
        read_rows(path)
    with pytest.raises(ConfigError, match=r"cannot read .*No such file"):
        read_rows(tmp_path / "none.csv")


@pytest.mark.slow
def test_a_table_without_a_column_that_may_be_empty_is_refused_or_priced(tmp_path):
    path = tmp_path / "steps.csv"
    for column in sorted(set(ROW) - {"id", "framework"}):
        kept = {name: value for name, value in ROW.items() if name != column}
        path.write_text(",".join(kept) + "\n" + ",".join(kept.values()) + "\n")
        with contextlib.suppress(ConfigError):
            assert [price_row(row).id for row in read_rows(path)] == ["made-1"]


def test_a_cell_that_is_no_number_is_a_reason():
    assert price_row({**ROW, "layers": "eight"}).reason is not None


def test_levels_that_blocks_take_in_turn_lie_between_them():
    def seconds(recompute):
        return price_row(
            {**ROW, "framework": "torchtitan 820504e", "recompute": recompute}
        ).predicted_s

    assert seconds("none") < seconds("selective (every other layer)") < seconds("full")


def test_figures_that_disagree_are_compared_with_nothing():
    priced = price_row({**ROW, "notes": "a | INCONSISTENT: reported TFLOPs / recomputed = 0.9"})

    assert priced.predicted_s == price_row(ROW).predicted_s
    assert (priced.measured_s, priced.measured_gib) == (None, None)
    assert priced.untimed == ("its own figures disagree",)


def test_adapters_take_less_time_and_memory_than_all_weights():
    large = {**ROW, "hidden": "4096", "ffn_hidden": "16384", "heads": "32", "seq_len": "4096"}
    adapters, whole = price_row({**large, "run_type": "LoRA"}), price_row(large)

    assert adapters.reason is None
    assert adapters.predicted_s < whole.predicted_s
    assert adapters.predicted_gib < whole.predicted_gib


def test_the_time_of_a_toy_model_is_not_compared():
    assert (
        price_row(
            {**ROW, "notes": "small models are launch-bound: use for MEMORY, not time"}
        ).measured_s
        is None
    )


def test_a_framework_that_no_stack_describes_is_priced_as_plain_pytorch_and_said_to_be_assumed():
    unknown = price_row({**ROW, "framework": "mine"})

    assert unknown.assumed == ("framework",)
    assert unknown.predicted_s == price_row({**ROW, "framework": "torchtitan 820504e"}).predicted_s


def test_experts_and_divided_sequences_become_axes_of_the_mesh():
    change = {
        "experts": "8",
        "top_k": "2",
        "ep": "4",
        "cp": "2",
        "dp": "2",
        "sequence_parallel": "false",
    }

    configuration = configuration_of({**FULL, **change, "framework": "NeMo"})

    assert configuration.mesh == Mesh(pp=2, dp=2, cp=2, tp=2, ep=4, context_form=ContextForm.RING)
    assert configuration.sequence_parallel  # experts under tensor parallelism need it
    model = configuration.model
    assert (model.num_experts, model.experts_per_token) == (8, 2)
    assert (model.expert_ffn_hidden_size, model.linear_bias) == (4096, False)


@pytest.mark.parametrize(
    ("change", "etp"),
    [
        pytest.param({}, 2, id="as-tensor-parallel-in-megatron"),
        pytest.param({"framework": "Megatron-Bridge/NeMo 26.02"}, 1, id="whole-in-recipes"),
        pytest.param({"notes": "at TP2/PP1/EP8/ETP1"}, 1, id="stated"),
    ],
)
def test_experts_are_divided_as_the_framework_does(change, etp):
    assert expert_tensor_parallel({**FULL, **change}) == etp


@pytest.mark.parametrize(
    ("notes", "form"),
    [
        pytest.param("", ContextForm.RING, id="default"),
        pytest.param("CP=all-to-all (Ulysses-like)", ContextForm.ALL_TO_ALL, id="ulysses"),
    ],
)
def test_the_form_of_context_parallelism_is_what_the_row_says(notes, form):
    row = {**FULL, "cp": "2", "dp": "2", "notes": notes}

    assert configuration_of(row).mesh.context_form is form


def test_the_time_of_a_release_test_that_checks_none_is_not_compared():
    priced = price_row({**ROW, "id": "mcoreci-gpt-gpt3_weekly_mcore_tp2_pp2-dev-dgx_gb200"})

    assert (priced.measured_s, len(priced.untimed)) == (None, 1)


def test_the_time_of_a_functional_run_is_not_compared():
    priced = price_row({**ROW, "notes": "functional (untuned) run; TP2"})

    assert priced.measured_s is None
    assert priced.predicted_s
    assert len(priced.untimed) == 1


@pytest.mark.parametrize(("gpus", "node"), [pytest.param(32, 32), pytest.param(256, 64)])
def test_the_node_of_a_rack_is_its_nvlink_domain(gpus, node):
    row = {**FULL, "gpu": "gb200-nvl72", "gpus_per_node": "4", "n_gpus": str(gpus)}

    assert configuration_of({**row, "dp": str(gpus // 4)}).cluster.gpus_per_node == node
