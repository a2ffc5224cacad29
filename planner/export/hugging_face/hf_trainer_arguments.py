"""The keys of transformers' TrainingArguments, and of programs beside them: the table.

Names and defaults were read in the releases transformers 5.23.0, transformers/training_args.py,
and accelerate 1.15.0 unless a row says otherwise. `fsdp` is FSDP2, whose parameters are gathered
again for the backward pass (ZeRO 3) or not (ZeRO 2); without it the Trainer runs DDP. Degrees are
those of accelerate's ParallelismConfig, which no file of TrainingArguments can have: they are
environment variables of the script. The sequence length and the attention are keys of programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.export.fields.arguments import (
    Argument,
    Facts,
    Words,
    choice,
    number,
    read_number,
    reading,
)
from parplan.planner.export.fields.program_facts import PROGRAM, require_length
from parplan.planner.export.fields.settings import Settings
from parplan.planner.export.files.nested_file import flag, read_flag, unpriced
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.spec import Optimizer, Precision
from parplan.profiles.stack import AttentionKernel, ContextForm
from parplan.profiles.state_precision import StatePrecision

_FSDP = "fsdp_config."
_SIZE = "PARALLELISM_CONFIG_{}_SIZE"
_USUAL_BATCH = 8  # per_device_train_batch_size
_OPTIMIZERS = {
    Optimizer.ADAM: ("adamw_torch_fused", "adamw_torch", "adamw_apex_fused", "adamw_hf"),
    Optimizer.ADAM_8BIT: ("adamw_bnb_8bit", "adamw_8bit"),
    Optimizer.ADAFACTOR: ("adafactor",),
    Optimizer.SGD: ("sgd",),
}
ATTENTION = {
    "sdpa": AttentionKernel.FLASH,
    "flash_attention_2": AttentionKernel.FLASH,
    "flash_attention_3": AttentionKernel.FLASH,
    "eager": AttentionKernel.UNFUSED,
}
# LLaMA-Factory: src/llamafactory/extras/constants.py (AttentionFunction); true in older releases
FLASH_ATTN = {
    **dict.fromkeys(("auto", "sdpa", "fa2", "fa3", "true"), AttentionKernel.FLASH),
    "disabled": AttentionKernel.UNFUSED,
}
_SWITCHED = {"true": AttentionKernel.FLASH, "True": AttentionKernel.FLASH}
_EXCHANGES = {ContextForm.ALL_GATHER: "allgather", ContextForm.RING: "alltoall"}
# names of the sequence length: run_clm.py of transformers, trl's SFTConfig and its older name,
# LLaMA-Factory, FastChat
LENGTHS = ("block_size", "max_length", "max_seq_length", "cutoff_len", "model_max_length")
# Keys that change time or memory and have no price here: a file that has one is refused.
REFUSED = (
    "deepspeed",
    "quantization_bit",
    "optim_target_modules",
    *("lora_r", "lora_rank", "lora_target", "q_lora"),
    *("beta", "max_prompt_length", "max_completion_length", "num_generations"),  # trl's DPO, GRPO
    f"{_FSDP}xla_fsdp_settings",
)


def _sharded(settings: Settings) -> bool:
    return settings.zero > 0


def _recomputes(settings: Settings) -> bool:
    return settings.recompute is Recompute.FULL


def precision_row(name: str, precision: Precision) -> Argument:
    """Returns the row of a switch of mixed precision."""
    return Argument(
        name=name,
        facts=("precision",),
        write=lambda run: ("true",) if run.precision is precision else None,
        read=lambda words, _: {"precision": precision} if read_flag(words) else {},
    )


def _checkpoints(name: str, *, sharded: bool) -> Argument:
    """Returns the row of a switch that recomputes all blocks, with FSDP or without."""

    def read(words: Words, facts: Facts) -> Facts:
        on = read_flag(words) or (sharded and facts.get("recompute") is Recompute.FULL)
        return {"recompute": Recompute.FULL if on else Recompute.NONE}

    return Argument(
        name=name,
        facts=("recompute",),
        write=lambda run: ("true",) if _recomputes(run) and _sharded(run) is sharded else None,
        read=read,
    )


def _optimizer(settings: Settings) -> Words | None:
    names = _OPTIMIZERS.get(settings.optimizer)
    return names and names[:1]


def _read_optimizer(words: Words, _: Facts) -> Facts:
    for optimizer, names in _OPTIMIZERS.items():
        if words[0] in names:
            return {"optimizer": optimizer}
    known = (name for names in _OPTIMIZERS.values() for name in names)
    raise ValueError(f"it has no price, {', '.join(known)} have")


def _read_fsdp(words: Words, _: Facts) -> Facts:
    """Reads a switch, or the words that older releases have in its place."""
    options = " ".join(words).split()
    if options in (["false"], ["False"], [""], []):
        return {}
    kinds = {"true": 3, "True": 3, "full_shard": 3, "shard_grad_op": 2}
    facts: Facts = {}
    for option in options:
        if option in kinds:
            facts["zero"] = kinds[option]
        elif option == "offload":
            facts["states_on_host"] = True
        elif option not in ("auto_wrap", "no_shard"):
            raise ValueError(f"{option} has no price, {', '.join(kinds)} and offload have")
    return facts


def _reshard(settings: Settings) -> Words | None:
    if not _sharded(settings):
        return None
    return ("true",) if settings.zero == 3 else ("false",)


def _read_reshard(words: Words, facts: Facts) -> Facts:
    stage = 3 if read_flag(words) else 2
    return {"zero": stage} if facts.get("zero") else {}


def _size(axis: str, fact: str) -> Argument:
    return number(_SIZE.format(axis), fact, 1, source="accelerate/parallelism_config.py")


def _copies(settings: Settings) -> Words | None:
    ranks = settings.zero_ranks
    return (f"{settings.replicas // ranks}",) if ranks and _sharded(settings) else None


def _shards(settings: Settings) -> Words | None:
    divided = settings.zero_ranks or settings.tp > 1 or settings.cp > 1
    if not divided or not _sharded(settings):
        return None
    return (f"{(settings.zero_ranks or settings.replicas) // settings.cp}",)


def optimizer_row(name: str) -> Argument:
    """Returns the row of an optimizer by transformers' names."""
    return reading(name, _read_optimizer)


def read_dtype(words: Words, facts: Facts) -> Facts:
    """Reads the type in which a program loads parameters; Adam's states are then of this type.

    Without mixed precision it is the type of training too.
    """
    if words[0] in ("float32", "fp32", "torch.float32"):
        return {}
    if words[0] not in ("bfloat16", "bf16", "torch.bfloat16", "auto"):
        raise ValueError("bfloat16, float32 and auto, a checkpoint in bf16, are priced")
    mixed = facts.get("precision", Precision.FP32) is not Precision.FP32
    alone = {} if mixed else {"precision": Precision.BF16, "mixed": False}
    return {"narrow_states": True, **alone}


def attention_row(name: str, kernels: Mapping[str, AttentionKernel]) -> Argument:
    """Returns the row of an implementation of attention, by its words."""

    def read(words: Words, _: Facts) -> Facts:
        if words[0] not in kernels:
            raise ValueError(f"it has no price, {', '.join(kernels)} have")
        return {"attention": kernels[words[0]]}

    return reading(name, read)


ARGUMENTS: tuple[Argument, ...] = (
    number("per_device_train_batch_size", "micro_batch_size"),
    Argument(
        name="gradient_accumulation_steps",
        facts=("global_batch_size",),
        write=lambda run: (f"{run.num_micro_batches}",),
        read=lambda words, _: {"accumulation": read_number(words)},
    ),
    precision_row("bf16", Precision.BF16),
    precision_row("fp16", Precision.FP16),
    replace(optimizer_row("optim"), facts=("optimizer",), write=_optimizer),
    _checkpoints("gradient_checkpointing", sharded=False),
    reading(
        "activation_checkpointing", _checkpoints("activation_checkpointing", sharded=True).read
    ),
    Argument(
        name="fsdp",
        facts=("zero",),
        write=lambda run: ("true",) if _sharded(run) else None,
        read=_read_fsdp,
    ),
    Argument(
        name=f"{_FSDP}reshard_after_forward",
        facts=("zero",),
        write=_reshard,
        read=_read_reshard,
    ),
    flag(f"{_FSDP}cpu_offload", "states_on_host", False),
    _checkpoints(f"{_FSDP}activation_checkpointing", sharded=True),
)
# Degrees, in the environment.
DEGREES: tuple[Argument, ...] = (
    Argument(
        name=_SIZE.format("DP_REPLICATE"),
        facts=("zero_ranks",),
        write=_copies,
        read=lambda words, _: {"copies": read_number(words)},
        source="accelerate/parallelism_config.py",
    ),
    Argument(
        name=_SIZE.format("DP_SHARD"),
        facts=("zero_ranks",),
        write=_shards,
        read=lambda words, _: {"shards": read_number(words)},
        source="accelerate/parallelism_config.py",
    ),
    _size("TP", "tp"),
    _size("CP", "cp"),
    choice(
        "PARALLELISM_CONFIG_CP_COMM_STRATEGY",
        "context_form",
        _EXCHANGES,
        ContextForm.ALL_GATHER,
        when=lambda run: run.cp > 1,
    ),
)
# Keys that programs have beside TrainingArguments.
BESIDE: tuple[Argument, ...] = (
    *(reading(name, lambda words, _: {"seq_length": read_number(words)}) for name in LENGTHS),
    reading("torch_dtype", read_dtype),
    reading("dtype", read_dtype),
    attention_row("attn_implementation", ATTENTION),
    attention_row("flash_attn", ATTENTION | FLASH_ATTN),
    *(attention_row(name, _SWITCHED) for name in ("use_flash_attention_2", "use_flash_attn")),
)
# Keys of which some values have a price.
SOME_VALUES: tuple[Argument, ...] = (
    unpriced(_SIZE.format("SP"), "1"),
    unpriced("torch_compile", "false"),
    unpriced("use_liger_kernel", "false"),
    unpriced("enable_liger_kernel", "false"),
    unpriced("auto_find_batch_size", "false"),
    unpriced("use_peft", "false"),
    unpriced("finetuning_type", "full"),
    unpriced("stage", "sft", "pt"),  # LLaMA-Factory
    unpriced("load_in_4bit", "false"),
    unpriced("load_in_8bit", "false"),
    unpriced("neat_packing", "false"),
    unpriced("packing", "false", "true"),
    unpriced(f"{_FSDP}version", "1", "2"),
    unpriced(f"{_FSDP}xla", "false"),
    unpriced(f"{_FSDP}auto_wrap_policy", "transformer_based_wrap"),
    unpriced("fsdp_config"),  # a path, whose keys belong here
    unpriced("parallelism_config"),
)
FILE_ROWS = ARGUMENTS
# options of `plan read` for what a file leaves to its program
STATED: tuple[Argument, ...] = (
    reading("--micro-batch-size", lambda words, _: {"micro_batch_size": read_number(words)}),
    reading("--global-batch-size", lambda words, _: {"global_batch_size": read_number(words)}),
    reading("--optimizer", lambda words, _: {"optimizer": Optimizer(words[0])}),
    reading("--recompute", lambda words, _: {"recompute": Recompute(words[0])}),
    *PROGRAM,
)
TABLE: tuple[Argument, ...] = (*ARGUMENTS, *DEGREES, *BESIDE, *SOME_VALUES, *STATED)
# facts of the Trainer that are no settings. `narrow_states`: the program loads parameters in 16
# bits; `mixed`: they are cast to fp32 beside FSDP, for training in mixed precision
_DERIVED = ("accumulation", "copies", "shards", "narrow_states", "mixed")


def _accumulation(global_batch_size: int, at_once: int) -> int:
    """Returns the micro-batches of a step. Raises ConfigError where they are not whole."""
    if at_once == 0 or global_batch_size % at_once:
        raise ConfigError(
            f"--global-batch-size {global_batch_size} is no multiple of the {at_once} sequences "
            f"that run at once",
            hint="change it, or --micro-batch-size",
        )
    return global_batch_size // at_once


def _has_narrow_states(run: Settings, plain: Facts) -> bool:
    """True if parameters, gradients and moments all have 16 bits.

    accelerate/accelerator.py (_prepare_fsdp) and utils/fsdp_utils.py (fsdp2_prepare_model) cast
    parameters of 16 bits to fp32 for mixed precision; DDP leaves them.
    """
    cast = _sharded(run) and plain.get("mixed", True)
    return plain.get("narrow_states", False) and run.precision is Precision.BF16 and not cast


def finished(facts: Facts, num_gpus: int) -> Settings:
    """Returns the settings that keys say, with what the Trainer derives of them.

    facts   with `num_layers` of the model
    Raises ConfigError where the keys contradict one another.
    """
    facts = dict(facts)
    plain = {name: facts.pop(name) for name in _DERIVED if name in facts}
    require_length(facts)
    run = replace(Settings(micro_batch_size=_USUAL_BATCH, overlap=True), **facts)
    inside = run.cp * run.tp
    if num_gpus % inside:
        raise ConfigError(
            f"cp {run.cp} x tp {run.tp} does not divide the {num_gpus} GPUs",
            hint="change a degree or --gpus",
        )
    dp = num_gpus // inside
    shards = plain.get("shards", dp // plain.get("copies", 1))
    if plain.get("copies", 1) * shards != dp:
        raise ConfigError(
            f"dp_replicate_size {plain.get('copies', 1)} x dp_shard_size {shards} is not the dp "
            f"{dp} of these GPUs",
            hint="change a degree or --gpus",
        )
    if inside > 1 and dp > 1 and not _sharded(run):
        raise ConfigError(
            f"cp {run.cp} x tp {run.tp} beside {dp} copies of the model: accelerate runs them "
            f"beside FSDP alone",
            hint="turn fsdp on",
        )
    forms = facts.get("context_form", ContextForm.ALL_GATHER)
    narrow = _has_narrow_states(run, plain)
    steps = plain.get("accumulation", 1)
    if "global_batch_size" in facts:  # the user states it
        steps = _accumulation(facts["global_batch_size"], run.micro_batch_size * dp)
    return replace(
        run,
        dp=dp,
        context_form=forms if run.cp > 1 else None,
        etp=run.tp if run.has_experts else 1,
        zero_ranks=shards * run.cp if _sharded(run) and plain.get("copies", 1) > 1 else None,
        # accelerate's policy reduces in the type of training, DDP in that of parameters
        gradient_precision=run.precision if _sharded(run) or narrow else Precision.FP32,
        state_precision=StatePrecision.BF16 if narrow else StatePrecision.FP32,
        global_batch_size=run.micro_batch_size * steps * dp,
        blocks=(run.num_layers,),
    )
