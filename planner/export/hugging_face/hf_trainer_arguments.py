"""The keys of transformers' TrainingArguments, and of programs beside them: the table.

Names and defaults were read in the releases transformers 5.23.0, transformers/training_args.py,
and accelerate 1.15.0 unless a row says otherwise. `fsdp` is FSDP2, whose parameters are gathered
again for the backward pass (ZeRO 3) or not (ZeRO 2); without it the Trainer runs DDP. Degrees are
those of accelerate's ParallelismConfig, which no file of TrainingArguments can have: they are
environment variables of the script. The sequence length and the attention are keys of programs.
"""

from __future__ import annotations

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

_FSDP = "fsdp_config."
_SIZE = "PARALLELISM_CONFIG_{}_SIZE"
_USUAL_BATCH = 8  # per_device_train_batch_size
_OPTIMIZERS = {
    Optimizer.ADAM: ("adamw_torch_fused", "adamw_torch"),
    Optimizer.ADAM_8BIT: ("adamw_bnb_8bit", "adamw_8bit"),
    Optimizer.ADAFACTOR: ("adafactor",),
    Optimizer.SGD: ("sgd",),
}
_ATTENTION = {
    "sdpa": AttentionKernel.FLASH,
    "flash_attention_2": AttentionKernel.FLASH,
    "flash_attention_3": AttentionKernel.FLASH,
    "eager": AttentionKernel.UNFUSED,
}
_EXCHANGES = {ContextForm.ALL_GATHER: "allgather", ContextForm.RING: "alltoall"}
# names of the sequence length: run_clm.py of transformers, trl's SFTConfig and its older name,
# LLaMA-Factory, FastChat
_LENGTHS = ("block_size", "max_length", "max_seq_length", "cutoff_len", "model_max_length")
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


def _precision(name: str, precision: Precision) -> Argument:
    return Argument(
        name=name,
        facts=("precision",),
        write=lambda run: ("true",) if run.precision is precision else None,
        read=lambda words, _: {"precision": precision} if read_flag(words) else {},
    )


def _checkpoints(name: str, *, sharded: bool) -> Argument:
    """Returns the row of a switch that recomputes all blocks, with FSDP or without."""

    def read(words: Words, _: Facts) -> Facts:
        return {"recompute": Recompute.FULL} if read_flag(words) else {}

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


ARGUMENTS: tuple[Argument, ...] = (
    number("per_device_train_batch_size", "micro_batch_size"),
    Argument(
        name="gradient_accumulation_steps",
        facts=("global_batch_size",),
        write=lambda run: (f"{run.num_micro_batches}",),
        read=lambda words, _: {"accumulation": read_number(words)},
    ),
    _precision("bf16", Precision.BF16),
    _precision("fp16", Precision.FP16),
    Argument(name="optim", facts=("optimizer",), write=_optimizer, read=_read_optimizer),
    _checkpoints("gradient_checkpointing", sharded=False),
    reading(
        "activation_checkpointing", _checkpoints("activation_checkpointing", sharded=False).read
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
    *(reading(name, lambda words, _: {"seq_length": read_number(words)}) for name in _LENGTHS),
    reading("attn_implementation", lambda words, _: {"attention": _attention(words)}),
    reading("flash_attn", lambda words, _: {"attention": _attention(words)}),
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
    unpriced("fsdp_config"),  # a path, whose keys belong here
    unpriced("parallelism_config"),
)
FILE_ROWS = ARGUMENTS
TABLE: tuple[Argument, ...] = (*ARGUMENTS, *DEGREES, *BESIDE, *SOME_VALUES, *PROGRAM)
_DERIVED = ("accumulation", "copies", "shards")


def _attention(words: Words) -> AttentionKernel:
    """Returns the kind of an implementation. Raises ValueError."""
    if words[0] not in _ATTENTION:
        raise ValueError(f"it has no price, {', '.join(_ATTENTION)} have")
    return _ATTENTION[words[0]]


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
    steps = plain.get("accumulation", 1)
    return replace(
        run,
        dp=dp,
        context_form=forms if run.cp > 1 else None,
        etp=run.tp if run.has_experts else 1,
        zero_ranks=shards * run.cp if _sharded(run) and plain.get("copies", 1) > 1 else None,
        # accelerate's policy reduces in the type of training, DDP in that of parameters
        gradient_precision=run.precision if _sharded(run) else Precision.FP32,
        global_batch_size=run.micro_batch_size * steps * dp,
        blocks=(run.num_layers,),
    )
