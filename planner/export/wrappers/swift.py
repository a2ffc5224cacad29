"""ms-swift: the arguments of `swift sft` and `swift pt`.

Names and defaults were read in modelscope/ms-swift at 3602360a56: swift/arguments, and
swift/trainers/arguments.py. It loads parameters in torch_dtype, which is bf16 for all models of the
catalog. `--deepspeed zero2` and `--fsdp fsdp2` are files of swift/config.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.export.fields.arguments import (
    Argument,
    Facts,
    Given,
    Words,
    read_number,
    reading,
)
from parplan.planner.export.fields.settings import Settings
from parplan.planner.export.files.nested_file import read_flag, unpriced
from parplan.planner.export.hugging_face.hf_trainer_arguments import ATTENTION, attention_row
from parplan.planner.export.wrappers.wrapper import Wrapper, fixed, passed
from parplan.planner.export.wrappers.wrapper_names import SWIFT_NAMES
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.spec import Precision
from parplan.profiles.stack import AttentionKernel

_ENOUGH_SEQUENCES = 16  # of a step, by which gradient_accumulation_steps is derived
_ZERO = "zero_optimization."
_STAGE_3 = (("reduce_bucket_size", "auto"), ("overlap_comm", "false"))
_BELOW_3 = (("reduce_bucket_size", "200000000"), ("overlap_comm", "false"))
_HOST = (("offload_optimizer.device", "cpu"),)
_HOST_3 = (*_HOST, ("offload_param.device", "cpu"))
# swift/config/*.json
_CONFIGS = {
    "zero0": (("stage", "0"), *_BELOW_3),
    "zero1": (("stage", "1"), *_BELOW_3),
    "zero2": (("stage", "2"), *_BELOW_3),
    "zero2_offload": (("stage", "2"), *_BELOW_3, *_HOST),
    "zero3": (("stage", "3"), *_STAGE_3),
    "zero3_offload": (("stage", "3"), *_STAGE_3, *_HOST_3),
}
_FSDP2 = (("fsdp", "full_shard"), ("fsdp_config.activation_checkpointing", "true"))
_TUNERS = ("train_type", "tuner_type", "sft_type")  # the last two names of older releases


def _read_dtype(words: Words, _: Facts) -> Facts:
    """Reads the type of parameters, which decides mixed precision too (model_args.py)."""
    if words in (("bfloat16",), ("bf16",)):
        return {"precision": Precision.BF16, "narrow_states": True}
    if words in (("float16",), ("float32",)):  # both train in fp16
        return {"precision": Precision.FP16, "narrow_states": False}
    raise ValueError("bfloat16, float16 and float32 are priced")


def _read_bf16(words: Words, _: Facts) -> Facts:
    return {"precision": Precision.BF16} if read_flag(words) else {}


def _write_checkpoints(settings: Settings) -> Words:
    return ("true",) if settings.recompute is Recompute.FULL else ("false",)


def _read_checkpoints(words: Words, _: Facts) -> Facts:
    return {"recompute": Recompute.FULL if read_flag(words) else Recompute.NONE}


_KERNELS = ATTENTION | {"flash_attn": AttentionKernel.FLASH, "null": AttentionKernel.FLASH}
_PRICED: tuple[Argument, ...] = (
    *(unpriced(name, "full") for name in _TUNERS),
    reading("torch_dtype", _read_dtype),
    reading("bf16", _read_bf16),
    Argument(
        name="gradient_checkpointing",
        facts=("recompute",),
        write=_write_checkpoints,
        read=_read_checkpoints,
    ),
    reading("max_length", lambda words, _: {"seq_length": read_number(words)}),
    attention_row("attn_impl", _KERNELS),
    *passed("packing", "freeze_vit", "freeze_aligner", "vit_gradient_checkpointing"),
)
_ONE_VALUE = (
    unpriced("padding_free", "false"),
    unpriced("sequence_parallel_size", "1"),
    unpriced("zero_hpz_partition_size", "1"),
    *(
        fixed(name, "is another kind of training")
        for name in (
            *("freeze_llm", "freeze_parameters", "freeze_parameters_ratio", "use_galore"),
            *("freeze_parameters_regex", "trainable_parameters", "trainable_parameters_regex"),
            *("lisa_activated_layers", "quant_bits", "quant_method", "adapters", "rlhf_type"),
            *("ref_model", "reward_model", "teacher_model", "optimizer", "group_by_length"),
            *(
                "enable_dft_loss",
                "enable_channel_loss",
                "use_logits_to_keep",
                "task_type",
                "device_map",
            ),
        )
    ),
)


def completed(given: tuple[Given, ...]) -> tuple[Given, ...]:
    """Returns the arguments with those of the configurations that swift has by name.

    Raises ConfigError for one that it does not have.
    """
    names = {each.name for each in given}
    found = [one for each in given for one in _expanded(each)]
    if given and not names.intersection(_TUNERS):
        found.insert(0, Given("tuner_type", ("lora",), f"{given[0].where} (swift's default)"))
    return tuple(found)


def _expanded(given: Given) -> Iterator[Given]:
    word = given.words[0] if given.words else ""
    if given.name == "deepspeed" and word in _CONFIGS:
        for name, value in _CONFIGS[word]:
            yield Given(f"{_ZERO}{name}", (value,), given.where)
    elif given.name == "fsdp" and word == "fsdp2":
        for name, value in _FSDP2:
            yield Given(name, (value,), given.where)
    elif given.name == "fsdp":
        raise ConfigError(
            f"{given.where}: fsdp {word}: fsdp2 is read, the configuration of swift",
            hint="use fsdp2",
        )
    elif given.name == "deepspeed_autotp_size":
        yield Given("tensor_parallel.autotp_size", given.words, given.where)
    else:
        yield given


def derived(facts: Facts, num_gpus: int) -> Facts:
    """Returns the facts with the accumulation that swift chooses for 16 sequences a step."""
    if "accumulation" in facts:
        return facts
    at_once = facts["micro_batch_size"] * num_gpus
    return facts | {"accumulation": max(1, math.ceil(_ENOUGH_SEQUENCES / at_once))}


SWIFT = Wrapper(
    name="ms-swift",
    source="modelscope/ms-swift at 3602360a56",
    rows=(*_PRICED, *_ONE_VALUE),
    defaults={
        "micro_batch_size": 1,
        "precision": Precision.BF16,
        "recompute": Recompute.FULL,
        "narrow_states": True,
    },
    harmless=(SWIFT_NAMES,),
    marks=frozenset((*_TUNERS, "lazy_tokenize", "split_dataset_ratio", "attn_impl", "freeze_vit")),
    programs=(
        r"(?:^|\s)swift\s+(?:sft|pt)\b",
        r"swift/cli/(?:sft|pt)\.py",
        r"swift\.cli\.(?:sft|pt)",
    ),
    completed=completed,
    derived=derived,
)
