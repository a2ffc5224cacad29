"""Plans as the YAML of `accelerate launch`, and the files and launch lines of its users."""

from __future__ import annotations

from pathlib import Path

import pytest

from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.export.exported import export_plan
from parplan.planner.export.launcher_file import LauncherFile, read_launcher_file
from parplan.planner.export.targets import TARGETS
from parplan.planner.plan.plan import Plan
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import Precision
from parplan.profiles.stack import AttentionKernel, ContextForm
from tests.helpers.command_runs import succeed
from tests.helpers.laid_out_plans import laid_out
from tests.helpers.launcher_scripts import ACCELERATE_YAML

OWN = {"stack": "huggingface"}
MODEL = load_model("llama3-8b").spec
LINE = """\
accelerate launch --config_file launch.yaml --num_processes 8 run_clm.py \\
    --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --block_size 2048 \\
    --attn_implementation eager --gradient_checkpointing --learning_rate 1e-4
"""


def exported(plan: Plan):
    return export_plan(plan, TARGETS["accelerate"], "plan.yaml")


def read(folder: Path, name: str, text: str) -> LauncherFile:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    file = read_launcher_file(path, TARGETS)
    assert file is not None
    assert file.target.name == "accelerate"
    return file


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL])
def test_accelerate_says_all_of_a_plan_of_data_parallelism(recompute):
    assert exported(laid_out("llama3-8b", dp=4, zero=0, recompute=recompute, **OWN)).losses == ()


@pytest.mark.parametrize("name", ["accelerate.yaml", "accelerate.sh"])
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"dp": 4, "zero": 3, "zero_ranks": 2}, id="copies"),
        pytest.param({"dp": 4, "zero": 0, "recompute": Recompute.FULL}, id="replicas"),
        pytest.param({"dp": 2, "cp": 2, "context_form": ContextForm.RING, "zero": 2}, id="ring"),
    ],
)
def test_either_file_is_read_back_with_what_its_head_states(tmp_path, name, layout):
    one = exported(laid_out("llama3-8b", **layout, **OWN))
    for file, text in one.files.items():
        (tmp_path / file).write_text(text, encoding="utf-8")

    found = read(tmp_path, name, one.files[name])

    assert found.num_gpus == 4
    settings = found.settings(MODEL, 4)
    assert (settings.zero, settings.zero_ranks) == (layout["zero"], layout.get("zero_ranks"))
    assert settings.recompute is layout.get("recompute", Recompute.NONE)
    assert (settings.context_form, settings.num_micro_batches) == (layout.get("context_form"), 8)


def test_a_users_yaml_is_read_with_the_options_that_it_lacks(tmp_path):
    file = read(tmp_path, "launch.yaml", ACCELERATE_YAML)
    stated = {"--micro-batch-size": 1, "--global-batch-size": 64, "--seq-length": 4096}
    settings = file.with_stated(stated).settings(MODEL, 16)

    assert (file.num_gpus, settings.zero, settings.num_micro_batches) == (16, 2, 4)
    assert settings.gradient_precision is Precision.BF16
    with pytest.raises(ConfigError, match="does not say the batch"):
        file.settings(MODEL, 16)


def test_a_users_launch_line_is_read_with_the_yaml_that_it_names(tmp_path):
    (tmp_path / "launch.yaml").write_text(ACCELERATE_YAML, encoding="utf-8")
    settings = read(tmp_path, "train.sh", LINE).settings(MODEL, 16)

    assert (settings.zero, settings.seq_length, settings.global_batch_size) == (2, 2048, 128)
    assert settings.recompute is Recompute.FULL
    assert settings.attention is AttentionKernel.UNFUSED


def test_the_command_takes_the_batch(tmp_path):
    read(tmp_path, "launch.yaml", ACCELERATE_YAML)
    arguments = ("read", f"{tmp_path}/launch.yaml", "--model", "llama3-8b", "--gpu", "h100-80gb")
    batch = ("--seq-length", "2048", "--micro-batch-size", "1", "--global-batch-size", "64")

    shown = succeed(*arguments, *batch, "--recompute", "full").stdout

    assert "ZeRO 2" in shown
    assert "recompute full" in shown
    assert "micro-batch 1 x 4" in shown


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("distributed_type: FSDP", "distributed_type: DEEPSPEED", r"yaml:3: .* JSON to read"),
        ("mixed_precision: bf16", "mixed_precision: fp8", r"yaml:15: mixed_precision fp8: fp8 is"),
        ("SHARD_GRAD_OP", "HYBRID_SHARD", r"yaml:10: .* no price, FULL_SHARD"),
        ("offload_params: false", "activation_checkpointing_offload: true", r"yaml:9: .* no price"),
        ("use_cpu: false", "use_cpu: true", r"yaml:19: use_cpu true: false alone is priced"),
    ],
)
def test_a_key_without_a_price_is_an_error_with_its_line(tmp_path, old, new, message):
    stated = {"--micro-batch-size": 1, "--global-batch-size": 64, "--seq-length": 4096}
    file = read(tmp_path, "launch.yaml", ACCELERATE_YAML.replace(old, new)).with_stated(stated)

    with pytest.raises(ConfigError, match=message):
        file.settings(MODEL, 16)


def test_a_pipeline_is_refused():
    with pytest.raises(ConfigError, match="accelerate does not say pp 2"):
        exported(laid_out("llama3-8b", pp=2, dp=2))
