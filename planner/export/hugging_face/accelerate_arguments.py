"""The keys of `accelerate launch`'s YAML, and of programs beside them: the table.

Names and defaults were read in the release accelerate 1.15.0: accelerate/commands/config/
config_args.py (ClusterConfig) and accelerate/utils/dataclasses.py (FullyShardedDataParallelPlugin)
unless a row says otherwise. `fsdp_config` is FSDP2, whose parameters are gathered again for the
backward pass (ZeRO 3) or not (ZeRO 2); MULTI_GPU is DDP. The YAML has no model and no batch: the
program has them, mostly by the names of transformers' TrainingArguments.
"""

from __future__ import annotations

from collections.abc import Callable

from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.export.fields.arguments import (
    Argument,
    Facts,
    Words,
    choice,
    constant,
    free,
    number,
    read_number,
    reading,
)
from parplan.planner.export.fields.program_facts import PROGRAM
from parplan.planner.export.fields.settings import Settings
from parplan.planner.export.files.nested_file import flag, read_flag, unpriced
from parplan.planner.export.hugging_face import hf_trainer_arguments
from parplan.planner.export.hugging_face.hf_trainer_arguments import BESIDE, SOME_VALUES
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.spec import Optimizer, Precision
from parplan.profiles.stack import ContextForm

_FSDP = "fsdp_config.fsdp_"
_DEGREE = "parallelism_config.parallelism_config_"
_STRATEGIES = {"FULL_SHARD": 3, "1": 3, "SHARD_GRAD_OP": 2, "2": 2, "NO_SHARD": 0, "3": 0}
_EXCHANGES = {ContextForm.ALL_GATHER: "allgather", ContextForm.RING: "alltoall"}


def _sharded(settings: Settings) -> bool:
    return settings.zero > 0


def _with_degrees(settings: Settings) -> bool:
    """True if the processes are more than one axis of shards."""
    copies = settings.zero_ranks is not None and _sharded(settings)
    return copies or settings.tp > 1 or settings.cp > 1


def _read_type(words: Words, _: Facts) -> Facts:
    if words not in (("FSDP",), ("MULTI_GPU",), ("NO",)):
        raise ValueError("FSDP, MULTI_GPU and NO are read; DeepSpeed has a JSON to read")
    return {"zero": 3 if words == ("FSDP",) else 0}


def _reshard(settings: Settings) -> Words | None:
    word = "true" if settings.zero == 3 else "false"
    return (word,) if _sharded(settings) else None


def read_strategy(words: Words, facts: Facts) -> Facts:
    """Reads the word of FSDP 1, or the switch of FSDP 2."""
    word = words[0].upper()
    if word in ("TRUE", "FALSE"):
        word = "FULL_SHARD" if word == "TRUE" else "SHARD_GRAD_OP"
    if word not in _STRATEGIES:
        raise ValueError(f"it has no price, {', '.join(_STRATEGIES)} have")
    return {"zero": _STRATEGIES[word]} if facts.get("zero") else {}


def _read_wrap(words: Words, _: Facts) -> Facts:
    if words != ("TRANSFORMER_BASED_WRAP",):
        raise ValueError("TRANSFORMER_BASED_WRAP alone is priced")
    return {"by_block": True}


def _size(axis: str, fact: str, write: Callable[[Settings], int]) -> Argument:
    return Argument(
        name=f"{_DEGREE}{axis}_size",
        facts=(fact,),
        write=lambda run: (f"{write(run)}",) if _with_degrees(run) else None,
        read=lambda words, _: {fact: read_number(words)},
        source="accelerate/parallelism_config.py",
    )


def _copies(settings: Settings) -> int:
    return settings.replicas // (settings.zero_ranks or settings.replicas)


LAUNCH: tuple[Argument, ...] = (
    free("compute_environment", "LOCAL_MACHINE"),
    Argument(
        name="distributed_type",
        facts=("zero",),
        write=lambda run: ("FSDP" if _sharded(run) else "MULTI_GPU",),
        read=_read_type,
    ),
    choice(
        "mixed_precision",
        "precision",
        {Precision.BF16: "bf16", Precision.FP16: "fp16", Precision.FP32: "no"},
    ),
    Argument(
        name="num_processes",
        facts=(),
        write=lambda run: (f"{run.dp * run.cp * run.tp}",),
        read=lambda _, __: {},
    ),
    reading("num_machines", lambda _, __: {}),
    free("main_training_function", "main"),
    free("rdzv_backend", "static"),
    free("same_network", "true"),
    constant("use_cpu", "false"),
)
SHARDING: tuple[Argument, ...] = (
    Argument(
        name=f"{_FSDP}version",
        facts=(),
        write=lambda run: ("2",) if _sharded(run) else None,
        read=unpriced("", "1", "2").read,
    ),
    reading(f"{_FSDP}sharding_strategy", read_strategy),
    Argument(
        name=f"{_FSDP}reshard_after_forward",
        facts=("zero",),
        write=_reshard,
        read=read_strategy,
    ),
    Argument(
        name=f"{_FSDP}offload_params",
        facts=("states_on_host",),
        write=lambda run: ("true",) if run.states_on_host else None,
        read=flag("", "states_on_host").read,
    ),
    Argument(
        name=f"{_FSDP}auto_wrap_policy",
        facts=(),
        write=lambda run: ("TRANSFORMER_BASED_WRAP",) if _sharded(run) else None,
        read=_read_wrap,
    ),
    free(f"{_FSDP}state_dict_type", "SHARDED_STATE_DICT", when=_sharded),
    free(f"{_FSDP}cpu_ram_efficient_loading", "true", when=_sharded),
    Argument(
        name=f"{_FSDP}activation_checkpointing",
        facts=("recompute",),
        write=lambda run: ("true",) if run.recompute is Recompute.FULL and _sharded(run) else None,
        read=lambda words, _: {"recompute": Recompute.FULL} if read_flag(words) else {},
    ),
    unpriced(f"{_FSDP}activation_checkpointing_offload", "false"),
    unpriced(f"{_FSDP}backward_prefetch", "backward_pre", "no_prefetch"),
)
DEGREES: tuple[Argument, ...] = (
    _size("dp_replicate", "copies", _copies),
    _size("dp_shard", "shards", lambda run: run.dp // _copies(run)),
    _size("tp", "tp", lambda run: run.tp),
    _size("cp", "cp", lambda run: run.cp),
    choice(
        f"{_DEGREE}cp_comm_strategy",
        "context_form",
        _EXCHANGES,
        ContextForm.ALL_GATHER,
        when=lambda run: run.cp > 1,
    ),
    unpriced(f"{_DEGREE}sp_size", "1"),
    unpriced("dynamo_config.dynamo_backend", "no"),
)
_OF_YAML = ("fsdp", "PARALLELISM_", "parallelism_")
# Arguments of the program, by the names of TrainingArguments.
PROGRAM_KEYS: tuple[Argument, ...] = tuple(
    row
    for row in (*hf_trainer_arguments.ARGUMENTS, *BESIDE, *SOME_VALUES)
    if not row.name.startswith(_OF_YAML)
)
# Options of `plan read` for facts of the program.
STATED: tuple[Argument, ...] = (
    number("--micro-batch-size", "micro_batch_size"),
    number("--global-batch-size", "global_batch_size"),
    choice("--optimizer", "optimizer", {each: f"{each}" for each in Optimizer}, Optimizer.ADAM),
    choice(
        "--recompute",
        "recompute",
        {Recompute.NONE: "none", Recompute.FULL: "full"},
        Recompute.NONE,
        when=lambda run: not _sharded(run),
    ),
    *PROGRAM,
)
FILE_ROWS = (*LAUNCH, *SHARDING, *DEGREES)
TABLE = (*FILE_ROWS, *PROGRAM_KEYS, *STATED)


def finished(facts: Facts, num_gpus: int) -> Settings:
    """Returns the settings that keys say, with what accelerate derives of them.

    facts   with `num_layers` of the model
    Raises ConfigError where the keys contradict one another, and without the program's batch.
    """
    facts = dict(facts)
    if not facts.pop("by_block", False) and facts.get("zero"):
        raise ConfigError(
            "without fsdp_auto_wrap_policy the whole model is one unit of FSDP, which has no price",
            hint="add fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
        )
    if not facts.get("micro_batch_size") or not (
        "global_batch_size" in facts or "accumulation" in facts
    ):
        raise ConfigError(
            "the file does not say the batch, which its program chooses",
            hint="state it with plan read FILE --micro-batch-size N --global-batch-size N",
        )
    if facts.get("zero") == 0 and facts.get("tp", 1) * facts.get("cp", 1) > 1:
        raise ConfigError(
            "accelerate has tensor and context parallelism beside FSDP alone",
            hint="use distributed_type: FSDP, or no such degree",
        )
    return hf_trainer_arguments.finished(facts, num_gpus)
