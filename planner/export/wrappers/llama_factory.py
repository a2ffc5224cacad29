"""LLaMA-Factory: the keys of its YAML, and the arguments of its command line.

Names and defaults were read in hiyouga/LLaMA-Factory at ff6d4d12ee: src/llamafactory/hparams, and
what they do in model/adapter.py (parameters are cast to fp32, but for pure_bf16) and
model/model_utils/checkpointing.py (blocks recompute unless disable_gradient_checkpointing, whatever
gradient_checkpointing says).
"""

from __future__ import annotations

from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.export.fields.arguments import (
    Argument,
    Facts,
    Given,
    Words,
)
from parplan.planner.export.files.nested_file import read_flag, unpriced
from parplan.planner.export.hugging_face.hf_trainer_arguments import FLASH_ATTN, attention_row
from parplan.planner.export.wrappers.wrapper import TRAINER_BATCH, Wrapper, fact, fixed, passed
from parplan.planner.export.wrappers.wrapper_names import LLAMA_FACTORY_NAMES
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.spec import Precision
from parplan.profiles.state_precision import StatePrecision

_METHOD = "finetuning_type"
# keys of transformers that turn recompute on beside its own
_CHECKPOINTS = (
    "gradient_checkpointing",
    "activation_checkpointing",
    "fsdp_config.activation_checkpointing",
)


def _read_pure(words: Words, facts: Facts) -> Facts:
    """Reads `pure_bf16`, which leaves parameters in bf16; `bf16` beside it is mixed precision."""
    if not read_flag(words):
        return {}
    return {"precision": Precision.BF16, "narrow_states": True, "mixed": "precision" in facts}


def _read_checkpoints(words: Words, _: Facts) -> Facts:
    return {"recompute": Recompute.NONE if read_flag(words) else Recompute.FULL}


_PRICED: tuple[Argument, ...] = (
    unpriced(_METHOD, "full"),
    unpriced("stage", "sft", "pt"),
    Argument(
        name="pure_bf16",
        facts=(),
        write=lambda run: ("true",) if run.state_precision is StatePrecision.BF16 else None,
        read=_read_pure,
    ),
    Argument(
        name="disable_gradient_checkpointing",
        facts=("recompute",),
        write=lambda run: ("true",) if run.recompute is Recompute.NONE else None,
        read=_read_checkpoints,
    ),
    *(fact(name, recompute=Recompute.FULL) for name in _CHECKPOINTS),
    attention_row("flash_attn", FLASH_ATTN),
    *passed("packing", "freeze_vision_tower", "freeze_multi_modal_projector"),
)
_ONE_VALUE = (
    unpriced("neat_packing", "false"),
    unpriced("sequence_parallel_size", "1"),  # 360-LLaMA-Factory
    unpriced("hyper_parallel_cp_size", "1"),
    *(
        fixed(name, "changes kernels of the step")
        for name in ("enable_liger_kernel", "use_unsloth", "use_v1_kernels", "shift_attn")
    ),
    *(
        fixed(name, "is another kind of training")
        for name in (
            *("use_badam", "use_galore", "use_apollo", "use_adam_mini", "use_muon", "use_kt"),
            *("use_llama_pro", "use_dft_loss", "use_asft_loss", "use_eaft_loss", "fp8"),
            *("fp8_enable_fsdp_float8_all_gather", "use_unsloth_gc", "mixture_of_depths"),
            *("upcast_layernorm", "upcast_lmhead_output", "freeze_language_model"),
            *("ref_model", "reward_model", "use_hyper_parallel", "use_megatron_bridge"),
            *("quantization_bit", "adapter_name_or_path", "resize_vocab"),
        )
    ),
)
# of its 1.x format and of the others that it has under the same names
_REFUSED = ("dist_config", "kernel_config", "peft_config", "quant_config", "optim_config")


def completed(given: tuple[Given, ...]) -> tuple[Given, ...]:
    """Returns the keys with the method that is left out. Raises ConfigError for some pairs."""
    names = {each.name.partition(".")[0] for each in given}
    pure = next((each for each in given if each.name == "pure_bf16"), None)
    if pure is not None and "deepspeed" in names and pure.words != ("false",):
        raise ConfigError(
            f"{pure.where}: pure_bf16 beside deepspeed has no price",
            hint="price bf16 with deepspeed, or pure_bf16 with fsdp or alone",
        )
    if _METHOD in names or not given:
        return given
    return (Given(_METHOD, ("lora",), f"{given[0].where} (the default of LLaMA-Factory)"), *given)


LLAMA_FACTORY = Wrapper(
    name="LLaMA-Factory",
    source="hiyouga/LLaMA-Factory at ff6d4d12ee",
    rows=(*_PRICED, *_ONE_VALUE),
    defaults={**TRAINER_BATCH, "seq_length": 2048, "recompute": Recompute.FULL},
    harmless=(LLAMA_FACTORY_NAMES,),
    refused=_REFUSED,
    marks=frozenset(
        (
            *(_METHOD, "stage", "template", "pure_bf16", "neat_packing", "dataset_dir"),
            *("disable_gradient_checkpointing", "use_badam", "use_galore", "use_unsloth"),
            *("dist_config", "freeze_trainable_layers", "enable_liger_kernel", "mask_history"),
        )
    ),
    programs=(r"llamafactory-cli\s+train", r"llamafactory\.launcher", r"src/train(?:_bash)?\.py"),
    spelled={"max_length": "cutoff_len"},
    completed=completed,
)
