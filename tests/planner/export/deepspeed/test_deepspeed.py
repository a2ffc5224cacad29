"""Plans in DeepSpeed's JSON, and JSON files as users have them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.export.deepspeed.deepspeed_arguments import even_blocks
from parplan.planner.export.exported import export_plan
from parplan.planner.export.launcher_file import read_launcher_file
from parplan.planner.export.targets import TARGETS, target_named
from parplan.planner.plan.plan import Plan
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import Precision
from parplan.profiles.stack import ContextForm
from tests.helpers.command_runs import fail, succeed
from tests.helpers.laid_out_plans import laid_out
from tests.helpers.launcher_scripts import DEEPSPEED_JSON

OWN = {"stack": "deepspeed"}
MODEL = load_model("gpt-2.5b").spec


def exported(plan: Plan):
    return export_plan(plan, target_named("deepspeed"), "plan.yaml")


def read(tmp_path: Path, text: str):
    path = tmp_path / "ds_config.json"
    path.write_text(text, encoding="utf-8")
    file = read_launcher_file(path, TARGETS)
    assert file is not None
    return file.with_stated({"--seq-length": 2048})


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(lambda: laid_out(dp=4, zero=3, **OWN), id="zero-3"),
        pytest.param(lambda: laid_out(dp=4, zero=2, recompute=Recompute.FULL, **OWN), id="full"),
        pytest.param(
            lambda: laid_out(
                "llama3-8b", dp=2, cp=4, context_form=ContextForm.ALL_TO_ALL, zero=3, **OWN
            ),
            id="sequences",
        ),
        pytest.param(lambda: laid_out("mixtral-8x7b", dp=8, ep=8, zero=2, **OWN), id="experts"),
    ],
)
def test_deepspeed_says_all_of_such_a_plan(plan):
    one = exported(plan())

    assert one.losses == ()
    assert one.configured.price.step_s == pytest.approx(one.plan.price.step_s, rel=1e-9)


def test_a_pipeline_has_its_stages_in_a_module_of_its_own():
    one = exported(laid_out(pp=2, dp=2, tp=2, blocks=(26, 28), zero=1, **OWN))

    assert json.loads(one.files["deepspeed.json"])["pipeline"]["partition"] == [26, 28]
    assert "BLOCKS_OF_STAGES = (26, 28)" in one.files["deepspeed_pipeline.py"]
    assert "num_pp=2, num_mp=2, num_dp=2" in one.files["deepspeed_pipeline.py"]
    compile(one.files["deepspeed_pipeline.py"], "deepspeed_pipeline.py", "exec")


def test_zero_3_is_lost_in_a_pipeline_which_deepspeed_refuses_to_shard():
    one = exported(laid_out(pp=4, dp=2, zero=3, **OWN))

    assert "ZeRO: 3 -> 1" in [loss.what for loss in one.losses]


def test_a_users_file_is_read_with_what_deepspeed_derives(tmp_path):
    file = read(tmp_path, DEEPSPEED_JSON)
    settings = file.settings(MODEL, 8)

    assert (settings.zero, settings.dp, settings.micro_batch_size) == (3, 8, 2)
    assert settings.num_micro_batches == 4
    assert settings.overlap  # stage 3 overlaps unless it is told not to
    assert settings.gradient_precision is settings.precision is Precision.FP16
    assert file.not_understood == ()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ('"stage": 3, "zero_quantized_weights": true', r"json:6: .*quantized_weights.* no price"),
        ('"stage": 3, "offload_optimizer": {"device": "nvme"}', r"json:6: .*cpu and none"),
        ('"stage": "auto"', r"json:6: .* is auto, which transformers fills in"),
    ],
)
def test_a_key_without_a_price_is_an_error_with_its_line(tmp_path, changed, message):
    file = read(tmp_path, DEEPSPEED_JSON.replace('"stage": 3', changed))

    with pytest.raises(ConfigError, match=message):
        file.settings(MODEL, 8)


def test_a_section_without_a_price_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"json:8: .*zenflow"):
        read(tmp_path, DEEPSPEED_JSON.replace("5e7\n", '5e7,\n"zenflow": {"topk_ratio": 0.1}\n'))


def test_a_section_that_is_not_enabled_has_no_say(tmp_path):
    off = '"progressive_layer_drop": {"enabled": false, "theta": 0.5},'
    file = read(tmp_path, DEEPSPEED_JSON.replace('"steps_per_print": 10,', off))

    assert file.settings(MODEL, 8).zero == 3


def test_batches_that_do_not_multiply_are_refused_as_deepspeed_refuses_them(tmp_path):
    file = read(tmp_path, DEEPSPEED_JSON)

    with pytest.raises(ConfigError, match="64 is not train_micro_batch_size_per_gpu 2 x"):
        file.settings(MODEL, 24)


def test_the_partition_by_type_is_that_of_deepspeed():
    assert even_blocks(10, 4) == (3, 3, 2, 2)  # partition_balanced of deepspeed 0.19.8


def test_a_file_of_a_user_is_priced_by_the_command(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(DEEPSPEED_JSON, encoding="utf-8")
    named = ("--model", "gpt-2.5b", "--gpu", "h100-80gb", "--gpus", "8", "--json")

    assert "--seq-length N" in fail(2, "read", str(path), *named)
    plan = json.loads(succeed("read", str(path), *named, "--seq-length", "2048").stdout)
    assert plan["training"]["seq_length"] == 2048
    assert plan["mesh"]["dp"] == 8


AUTO = """{
  "train_micro_batch_size_per_gpu": "auto",
  "gradient_accumulation_steps": "auto",
  "bf16": {"enabled": "auto"},
  "zero_optimization": {"stage": 2, "overlap_comm": true, "reduce_bucket_size": "auto"}
}
"""
TRAINER = """\
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
bf16: true
gradient_checkpointing: true
max_length: 4096
deepspeed: configs/ds_z2.json
"""


@pytest.mark.parametrize("folder", ["configs", "examples/configs"])
def test_arguments_of_transformers_fill_in_the_json_that_they_name(tmp_path, folder):
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "ds_z2.json").write_text(AUTO, encoding="utf-8")
    path = (tmp_path / folder).parent / "train" / "sft.yaml"
    path.parent.mkdir()
    path.write_text(TRAINER, encoding="utf-8")
    file = read_launcher_file(path, TARGETS)

    assert file is not None
    assert file.target.name == "deepspeed"
    settings = file.settings(MODEL, 8)
    assert (settings.zero, settings.micro_batch_size, settings.num_micro_batches) == (2, 2, 4)
    assert settings.precision is Precision.BF16
    assert settings.recompute is Recompute.FULL
    assert settings.seq_length == 4096
    assert settings.bucket_elements == MODEL.hidden_size**2


def test_a_json_that_is_not_beside_its_arguments_is_an_error(tmp_path):
    path = tmp_path / "sft.yaml"
    path.write_text(TRAINER, encoding="utf-8")
    file = read_launcher_file(path, TARGETS)

    assert file is not None
    with pytest.raises(ConfigError, match="ds_z2"):
        file.settings(MODEL, 8)


def test_an_exported_script_is_read_with_its_json(tmp_path):
    for name, text in exported(laid_out(dp=4, zero=3, **OWN)).files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    file = read_launcher_file(tmp_path / "deepspeed.sh", TARGETS)

    assert file is not None
    assert file.num_gpus == 4
    assert (file.settings(MODEL, 4).zero, file.settings(MODEL, 4).seq_length) == (3, 1024)
