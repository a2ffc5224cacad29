"""The names of settings touch the subjects that change a step, in every spelling."""

from __future__ import annotations

import pytest

from parplan.planner.export.fields.harmless import harmless
from parplan.planner.export.fields.subjects import Subject, is_off, subject_of
from parplan.planner.export.targets import READERS

NAMES = {
    Subject.PARALLELISM: "--tensor_model_parallel_size dp_shard_size ulysses.degree useHSDP "
    "zero_stage model.virtual_pipeline_model_parallel_size cpSize --pp ring_attn fsdp2 "
    "DataParallelSize",
    Subject.RECOMPUTE: "gradientCheckpointing --recompute-modules activation_checkpoint.mode "
    "use_gradient_checkpointing remat_policy activation_memory_budget checkpoint_activations",
    Subject.PRECISION: "pure_bf16 load_in_4bit --fp8-format quantization_bit torchDtype use_nvfp4 "
    "amp mixed_precision_policy bnb_4bit_quant_type half_precision_backend dtype",
    Subject.OPTIMIZER: "use_badam optim_args adamw_mode --galore-rank optimizerState muon_lr "
    "ema.decay",
    Subject.ADAPTERS: "lora_rank peft.peft_scheme --tuner_type useDora qlora adapter_name "
    "train_type",
    Subject.FREEZING: "--freeze-LM freeze_trainable_layers frozen_modules modules_to_save unfreeze",
    Subject.PACKING: "sample_packing --packing neat_packing padding_free pack_sequences varlen",
    Subject.OFFLOAD: "offload_params --optimizer-cpu-offload nvme_path cpu_offloading "
    "swap_optimizer",
    Subject.BATCH: "micro_batch_size gradient_accumulation_steps --seqLen max_length bsz",
    Subject.MODEL: "--vision-model-type image_size hybrid_layer_pattern mamba-state-dim teacher",
}
HARMLESS = (
    "learning_rate --lr-decay-style save_steps wandb_project eval_batch_size "
    "resume_from_checkpoint "
    "--ckpt-dir logging_steps seed num_train_epochs --data-path checkpoint.interval weight_decay "
    "save_optimizer_steps per_device_eval_batch_size tokenizer_type max_steps explorations package"
)


@pytest.mark.parametrize("subject", NAMES)
def test_every_spelling_touches_its_subject(subject):
    assert {name: subject_of(name) for name in NAMES[subject].split()} == dict.fromkeys(
        NAMES[subject].split(), subject
    )


def test_names_beside_a_step_touch_nothing():
    assert {name: subject_of(name) for name in HARMLESS.split() if subject_of(name)} == {}


@pytest.mark.parametrize(
    ("name", "words", "off"),
    [
        ("load_in_4bit", ("false",), True),
        ("lora_rank", ("0",), True),
        ("sp_size", ("1",), True),
        ("zero_stage", ("1",), False),
        ("peft", ("None",), True),
        ("--freeze-LM", (), False),
        ("packing", ("true",), False),
    ],
)
def test_words_that_turn_a_setting_off_leave_its_subject_alone(name, words, off):
    assert is_off(name, words) is off


def test_harmless_names_are_whole_or_beginnings_with_any_separators():
    table = harmless("a page", "--lr-* --save data.*")

    assert [table.has(name) for name in ("--lr_decay_style", "--save", "--save-x", "data.a")] == [
        True,
        True,
        False,
        True,
    ]


@pytest.mark.parametrize("name", READERS)
def test_no_priced_name_is_called_harmless(name):
    rows = {row.name for row in READERS[name].table if row.facts}

    assert [each for one in READERS[name].harmless for each in one.names & rows] == []
