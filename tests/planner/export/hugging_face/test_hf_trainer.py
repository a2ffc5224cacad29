"""Plans as TrainingArguments, and the files and scripts of users of the Trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.export.exported import export_plan
from parplan.planner.export.launcher_file import LauncherFile, read_launcher_file
from parplan.planner.export.targets import TARGETS, target_named
from parplan.planner.plan.plan import Plan
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import Optimizer, Precision
from parplan.profiles.stack import AttentionKernel, ContextForm
from tests.helpers.laid_out_plans import laid_out
from tests.helpers.launcher_scripts import TRAINER_YAML

OWN = {"stack": "huggingface"}
MODEL = load_model("llama3-8b").spec
SCRIPT = """\
torchrun --nnodes 2 --nproc_per_node 8 run_clm.py \\
    --per_device_train_batch_size 1 --gradient_accumulation_steps 2 --bf16 \\
    --fsdp "shard_grad_op auto_wrap" --fsdp_config '{"activation_checkpointing": true}' \\
    --block_size 2048 --optim adamw_bnb_8bit --attn_implementation eager --logging_steps 1
"""


def exported(plan: Plan):
    return export_plan(plan, target_named("huggingface"), "plan.yaml")


def read(folder: Path, name: str, text: str) -> LauncherFile:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    file = read_launcher_file(path, TARGETS)
    assert file is not None
    assert file.target.name == "huggingface"
    return file


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL])
def test_the_trainer_says_all_of_a_plan_of_data_parallelism(recompute):
    assert exported(laid_out("llama3-8b", dp=4, zero=0, recompute=recompute, **OWN)).losses == ()


def test_fsdp_loses_the_type_of_reductions_alone():
    (lost,) = exported(laid_out("llama3-8b", dp=4, zero=3, zero_ranks=2, **OWN)).losses

    assert "gradients fp32 " in lost.what.partition(" -> ")[0]
    assert "gradients bf16 " in lost.what.partition(" -> ")[2]


def test_degrees_are_read_back_from_the_head_of_either_file(tmp_path):
    plan = laid_out("llama3-8b", dp=2, cp=4, context_form=ContextForm.ALL_GATHER, zero=3, **OWN)
    for name, text in exported(plan).files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")

    for name in ("training_arguments.yaml", "huggingface.sh"):
        file = read_launcher_file(tmp_path / name, TARGETS)
        assert file is not None
        settings = file.settings(MODEL, 8)
        assert (settings.dp, settings.cp, settings.zero) == (2, 4, 3)
        assert settings.context_form is ContextForm.ALL_GATHER


def test_tensor_parallelism_needs_shards_of_the_copies():
    plan = laid_out("llama3-8b", dp=2, tp=2, zero=0, sequence_parallel=False, **OWN)

    assert exported(plan).losses[0].what.startswith("ZeRO: 0 -> ")


@pytest.mark.parametrize("axes", [{"pp": 4, "dp": 2}, {"dp": 8, "ep": 8}])
def test_an_axis_that_the_trainer_lacks_is_refused(axes):
    model = "mixtral-8x7b" if "ep" in axes else "llama3-8b"

    with pytest.raises(ConfigError, match=r"huggingface does not say (pp|ep)"):
        exported(laid_out(model, zero=1, **axes))


def test_a_users_file_is_read(tmp_path):
    file = read(tmp_path, "sft.yaml", TRAINER_YAML)
    settings = file.settings(MODEL, 16)

    assert (settings.zero, settings.dp, settings.seq_length) == (3, 16, 4096)
    assert settings.global_batch_size == 2 * 4 * 16
    assert settings.recompute is Recompute.FULL
    assert settings.gradient_precision is Precision.BF16
    assert file.not_understood == ()


def test_a_users_script_is_read(tmp_path):
    file = read(tmp_path, "train.sh", SCRIPT)
    settings = file.settings(MODEL, 16)

    assert file.num_gpus == 16
    assert (settings.zero, settings.seq_length) == (2, 2048)
    assert settings.recompute is Recompute.FULL
    assert settings.optimizer is Optimizer.ADAM_8BIT
    assert settings.attention is AttentionKernel.UNFUSED


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("use_liger_kernel: true", r"yaml:10: use_liger_kernel true: .* no price"),
        ("finetuning_type: lora", r"yaml:10: finetuning_type lora: .* no price"),
        ("optim: galore_adamw", r"yaml:10: optim galore_adamw: .* no price"),
    ],
)
def test_a_key_without_a_price_is_an_error_with_its_line(tmp_path, line, message):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, "sft.yaml", f"{TRAINER_YAML}{line}\n").settings(MODEL, 8)
