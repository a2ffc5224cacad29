"""DeepSpeed's keys: the table of its JSON configuration.

Names and defaults were read in the release deepspeed 0.19.8: deepspeed/runtime/config.py unless a
row says otherwise. Data parallelism is what the other degrees leave of the processes. The JSON has
no model: the sequence length and the attention kernel are the program's. Recompute is asked for by
the program too, so the section `activation_checkpointing` stands for it, and in a pipeline
`activation_checkpoint_interval`.
"""

from __future__ import annotations

from dataclasses import replace

from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.export.fields.arguments import (
    Argument,
    Facts,
    Words,
    constant,
    number,
    read_number,
    reading,
)
from parplan.planner.export.fields.program_facts import PROGRAM, require_length
from parplan.planner.export.fields.settings import Settings
from parplan.planner.export.files.nested_file import read_flag, unpriced
from parplan.profiles.documents.numbers import whole_of
from parplan.profiles.documents.ranges import LAYERS
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.spec import Optimizer, Precision
from parplan.profiles.stack import ContextForm

_ZERO = "zero_optimization."
_PIPE = "pipeline."
_CHECKPOINTS = "activation_checkpointing"
_BUCKET = 500_000_000  # reduce_bucket_size (deepspeed/runtime/zero/config.py)
_DTYPES = {  # DtypeEnum
    Precision.BF16: ("bf16", "bfloat16", "torch.bfloat16"),
    Precision.FP16: ("fp16", "float16", "half", "torch.float16"),
    Precision.FP32: ("fp32", "float32", "float", "torch.float32"),
}
_OPTIMIZERS = {
    Optimizer.ADAM: ("adamw", "adam", "fusedadam"),
    Optimizer.SGD: ("sgd",),
    Optimizer.MUON: ("muon",),
}
# Sections that change time or memory and have no price here: a file that has one is refused.
REFUSED = (
    "compression_training",
    "data_efficiency",
    "sparse_attention",
    "elasticity",
    "curriculum_learning",
    "progressive_layer_drop",
    "weight_quantization",
    f"{_ZERO}zenflow",
)


def _piped(settings: Settings) -> bool:
    return settings.pp > 1


def _overlap(settings: Settings) -> Words | None:
    if settings.zero == 0 or _piped(settings):
        return None
    return ("true",) if settings.overlap else ("false",)


def _flagged(name: str, precision: Precision) -> Argument:
    """Returns the row of a section that turns a precision on."""
    return Argument(
        name=f"{name}.enabled",
        facts=("precision",),
        write=lambda run: ("true",) if run.precision is precision else None,
        read=lambda words, _: {"precision": precision} if read_flag(words) else {},
        source="deepspeed/runtime/precision_config.py",
    )


def _dtype(name: str, fact: str) -> Argument:
    """Returns the row of the type of gradients."""

    def read(words: Words, _: Facts) -> Facts:
        for precision, names in _DTYPES.items():
            if words[0].lower() in names:
                return {fact: precision}
        raise ValueError(f"{words[0]} is none of bf16, fp16, fp32")

    return Argument(
        name=name,
        facts=("gradient_precision",),
        write=lambda run: (_DTYPES[run.gradient_precision][0],),
        read=read,
        source="deepspeed/runtime/engine.py (get_data_types, communication_data_type)",
    )


def _optimizer(settings: Settings) -> Words | None:
    optimizer = Optimizer.SGD if _has_momentum(settings) else settings.optimizer
    known = optimizer is not Optimizer.ADAM and optimizer in _OPTIMIZERS
    return (_OPTIMIZERS[optimizer][0],) if known else None


def _has_momentum(settings: Settings) -> bool:
    return settings.optimizer is Optimizer.SGD_MOMENTUM


def _read_optimizer(words: Words, _: Facts) -> Facts:
    for optimizer, names in _OPTIMIZERS.items():
        if words[0].lower() in names:
            return {"optimizer": optimizer}
    raise ValueError("Adam, AdamW, SGD and Muon are priced")


def _read_momentum(words: Words, facts: Facts) -> Facts:
    slow = facts.get("optimizer") is Optimizer.SGD and read_number(words) > 0
    return {"optimizer": Optimizer.SGD_MOMENTUM} if slow else {}


def _on_host(name: str) -> Argument:
    """Returns the row of states that lie on the host."""

    def read(words: Words, _: Facts) -> Facts:
        if words not in (("cpu",), ("none",)):
            raise ValueError("cpu and none are priced")
        return {name: words == ("cpu",)}

    return Argument(
        name=f"{_ZERO}{name}.device",
        facts=("states_on_host",),
        write=lambda run: ("cpu",) if run.states_on_host else None,
        read=read,
        source="deepspeed/runtime/zero/offload_config.py",
    )


def _read_partition(words: Words, _: Facts) -> Facts:
    if words[0] == "best" or words[0].startswith("type:"):
        return {}  # even_blocks
    blocks = tuple(whole_of(word, LAYERS) or 0 for word in words)
    if not all(blocks):
        raise ValueError("the blocks of every stage are priced, such as [8, 8], and type:..")
    return {"blocks": blocks}


def _read_interval(words: Words, _: Facts) -> Facts:
    interval = read_number(words)
    if interval not in (0, 1):
        raise ValueError("0 and 1 are priced: no layer and every layer")
    return {"recompute": Recompute.FULL if interval else Recompute.NONE}


def _no_price_but(name: str, *words: str) -> Argument:
    """Returns the row of a key of `activation_checkpointing`, which asks for full recompute."""
    row = unpriced(f"{_CHECKPOINTS}.{name}", *words)

    def read(found: Words, facts: Facts) -> Facts:
        row.read(found, facts)
        return {"recompute": Recompute.FULL}

    return reading(row.name, read)


BATCH = (
    Argument(
        name="train_batch_size",
        facts=("global_batch_size",),
        # DeepSpeedConfig multiplies by the ranks of AutoTP too, transformers by all processes
        write=lambda run: (
            (f"{run.global_batch_size}",) if run.tp * run.cp == 1 or run.pp > 1 else None
        ),
        read=lambda words, _: {"global_batch_size": read_number(words)},
    ),
    number("train_micro_batch_size_per_gpu", "micro_batch_size"),
    Argument(
        name="gradient_accumulation_steps",
        facts=("global_batch_size",),
        write=lambda run: (f"{run.num_micro_batches}",),
        read=lambda words, _: {"accumulation": read_number(words)},
    ),
)
PRECISION = (
    _flagged("bf16", Precision.BF16),
    reading("bfloat16.enabled", _flagged("bf16", Precision.BF16).read),
    _flagged("fp16", Precision.FP16),
    _dtype("data_types.grad_accum_dtype", "accumulated"),
    _dtype("communication_data_type", "reduced"),
    Argument(
        name="optimizer.type",
        facts=("optimizer",),
        write=_optimizer,
        read=_read_optimizer,
    ),
    Argument(
        name="optimizer.params.momentum",
        facts=("optimizer",),
        write=lambda run: ("0.9",) if _has_momentum(run) else None,
        read=_read_momentum,
    ),
)
ZERO = (
    number(f"{_ZERO}stage", "zero", source="deepspeed/runtime/zero/config.py"),
    Argument(
        name=f"{_ZERO}overlap_comm",
        facts=("overlap",),
        write=_overlap,
        read=lambda words, _: {"overlap": read_flag(words)},
        source="deepspeed/runtime/zero/config.py (overlap_comm_valid)",
    ),
    number(f"{_ZERO}reduce_bucket_size", "bucket_elements", _BUCKET),
    _on_host("offload_optimizer"),
    _on_host("offload_param"),
)
PARALLEL = (
    Argument(
        name="tensor_parallel.autotp_size",
        facts=("tp",),
        write=lambda run: (f"{run.tp}",) if run.tp > 1 and run.pp == 1 else None,
        read=lambda words, _: {"tp": max(1, int(read_number(words)))},
        source="deepspeed/runtime/tensor_parallel/config.py",
    ),
    Argument(  # that of the topology of a PipelineModule, whose layers are divided by the program
        name="tensor_parallel.tp.tp_size",
        facts=("tp",),
        write=lambda run: (f"{run.tp}",) if run.tp > 1 and run.pp > 1 else None,
        read=lambda words, _: {"tp": read_number(words)},
        source="deepspeed/runtime/tensor_parallel/config.py",
    ),
    number("sequence_parallel_size", "cp", 1, source="deepspeed/__init__.py (initialize)"),
    Argument(
        name="data_parallel_size",
        facts=("dp",),
        write=lambda run: (f"{run.dp}",) if run.cp > 1 else None,
        read=lambda words, _: {"data": read_number(words)},
        source="deepspeed/__init__.py (initialize)",
    ),
    constant("expert_parallel.enabled", "true", when=lambda run: run.ep > 1),
    number(
        "expert_parallel.autoep_size",
        "ep",
        1,
        source="deepspeed/module_inject/auto_ep_config.py",
    ),
    number(f"{_PIPE}stages", "pp", 1, source="deepspeed/runtime/config.py (get_pipeline_config)"),
    Argument(
        name=f"{_PIPE}partition",
        facts=("blocks",),
        write=lambda run: tuple(map(str, run.blocks)) if _piped(run) else None,
        read=_read_partition,
    ),
    Argument(
        name=f"{_PIPE}activation_checkpoint_interval",
        facts=("recompute",),
        write=lambda run: ("1",) if run.recompute is Recompute.FULL and _piped(run) else None,
        read=_read_interval,
        source="deepspeed/runtime/pipe/engine.py",
    ),
    Argument(
        name=f"{_CHECKPOINTS}.number_checkpoints",
        facts=("recompute",),
        write=lambda run: (
            (f"{run.num_layers}",) if run.recompute is Recompute.FULL and not _piped(run) else None
        ),
        read=lambda _, __: {"recompute": Recompute.FULL},
        source="deepspeed/runtime/activation_checkpointing/config.py",
    ),
)
# Keys of which one value has a price.
ONE_VALUE = (
    reading(_CHECKPOINTS, lambda _, __: {"recompute": Recompute.FULL}),  # an empty section
    _no_price_but("partition_activations", "false"),
    _no_price_but("cpu_checkpointing", "false"),
    _no_price_but("contiguous_memory_optimization", "false", "true"),
    _no_price_but("synchronize_checkpoint_boundary", "false", "true"),
    _no_price_but("profile", "false", "true"),
    unpriced(f"{_ZERO}reduce_scatter", "true"),
    unpriced(f"{_ZERO}contiguous_gradients", "true"),
    unpriced(f"{_ZERO}zero_hpz_partition_size", "0", "1"),
    unpriced(f"{_ZERO}zero_quantized_weights", "false"),
    unpriced(f"{_ZERO}zero_quantized_nontrainable_weights", "false"),
    unpriced(f"{_ZERO}zero_quantized_gradients", "false"),
    unpriced(f"{_ZERO}mics_shard_size", "-1"),
    unpriced(f"{_ZERO}cpu_offload", "false"),
    unpriced(f"{_ZERO}offload_optimizer.ratio", "1", "1.0"),
    unpriced(f"{_ZERO}cpu_offload_param", "false"),
    unpriced("bf16.immediate_grad_update", "false", "true"),
    unpriced("bf16.bf16_master_weights_and_grads", "false"),
    unpriced("bf16.bf16_optimizer_states", "false"),
    unpriced("fp16.fp16_master_weights_and_grads", "false"),
    unpriced("fp16.auto_cast", "false"),
    unpriced("amp.enabled", "false"),
    unpriced("torch_autocast.enabled", "false"),
    unpriced("compile.deepcompile", "false"),
    unpriced("autotuning.enabled", "false"),
    unpriced("tensor_parallel.tp_overlap_comm", "false"),
    unpriced("expert_parallel.expert_tensor_parallel_size", "1"),
    unpriced(f"{_PIPE}pipe_partitioned", "true"),
    unpriced(f"{_PIPE}grad_partitioned", "true"),
)
FILE_ROWS: tuple[Argument, ...] = (*BATCH, *PRECISION, *ZERO, *PARALLEL, *ONE_VALUE)
# options of `plan read` for what a file leaves to its program
STATED: tuple[Argument, ...] = (
    reading("--micro-batch-size", lambda words, _: {"micro_batch_size": read_number(words)}),
    reading("--global-batch-size", lambda words, _: {"stated_batch_size": read_number(words)}),
    reading("--optimizer", lambda words, _: {"optimizer": Optimizer(words[0])}),
    reading("--recompute", lambda words, _: {"recompute": Recompute(words[0])}),
    *PROGRAM,
)
TABLE: tuple[Argument, ...] = (*FILE_ROWS, *STATED)
_DERIVED = (
    "accumulation",
    "accumulated",
    "reduced",
    "data",
    "offload_optimizer",
    "offload_param",
    "stated_batch_size",
    "narrow_states",  # of the Trainer: DeepSpeed has its own copies in fp32
    "mixed",
)


def finished(facts: Facts, num_gpus: int) -> Settings:
    """Returns the settings that keys say, with what DeepSpeed derives of them.

    facts   with `num_layers` of the model
    Raises ConfigError where the keys contradict one another.
    """
    facts = dict(facts)
    plain = {name: facts.pop(name) for name in _DERIVED if name in facts}
    require_length(facts)
    run = replace(Settings(), **facts)
    inside = run.pp * run.cp * run.tp
    if num_gpus % inside:
        raise ConfigError(
            f"pp {run.pp} x sequence_parallel_size {run.cp} x tp {run.tp} does not divide the "
            f"{num_gpus} GPUs",
            hint="change a degree or --gpus",
        )
    dp = num_gpus // inside
    _require_allowed(run, dp, plain)
    run = replace(
        run,
        dp=dp,
        context_form=ContextForm.ALL_TO_ALL if run.cp > 1 else None,
        etp=run.tp if run.has_experts and run.ep == 1 else 1,
        gradient_precision=_gradients(run, plain),
        states_on_host=bool(plain.get("offload_param")),
        overlap=bool(facts.get("overlap", run.zero == 3)) and run.zero > 0 and run.pp == 1,
        blocks=run.blocks or even_blocks(run.num_layers, run.pp),
    )
    return _with_batch(run, facts, plain)


def even_blocks(num_layers: int, stages: int) -> tuple[int, ...]:
    """Returns the blocks of stages by `type:`, of which the first have the rest.

    deepspeed/runtime/utils.py (partition_balanced) gives these. Raises ConfigError.
    """
    if stages > num_layers:
        raise ConfigError(
            f"{num_layers} blocks do not divide into {stages} stages", hint="use fewer stages"
        )
    each, rest = divmod(num_layers, stages)
    return tuple(each + (stage < rest) for stage in range(stages))


def _require_allowed(run: Settings, dp: int, plain: Facts) -> None:
    """Raises ConfigError for keys that DeepSpeed or the prices refuse beside one another."""
    if run.pp > 1 and run.zero > 1:
        raise ConfigError(
            f"zero_optimization.stage {run.zero} with {run.pp} pipeline stages: DeepSpeed's "
            f"pipeline engine refuses ZeRO 2 and 3",
            hint="use stage 1, or no pipeline",
        )
    if run.cp > 1 and (run.tp > 1 or run.pp > 1):
        raise ConfigError(
            f"sequence_parallel_size {run.cp} with tp {run.tp} and {run.pp} pipeline stages: "
            f"DeepSpeed has ranks for sequences and for data alone",
            hint="divide sequences, or layers and matrices",
        )
    if plain.get("offload_optimizer", False) != plain.get("offload_param", False):
        raise ConfigError(
            "offload_optimizer without offload_param, or the other way round, has no price",
            hint="offload both, or neither",
        )
    if plain.get("offload_param") and run.zero != 3:
        raise ConfigError(
            f"offload_param with zero_optimization.stage {run.zero}: it needs stage 3",
            hint="use stage 3",
        )
    if plain.get("data", dp) != dp:
        raise ConfigError(
            f"data_parallel_size {plain['data']} is not the {dp} of these GPUs",
            hint="change it or --gpus",
        )


def _gradients(run: Settings, plain: Facts) -> Precision:
    """Returns the type in which gradients are added up and reduced. Raises ConfigError."""
    added = plain.get("accumulated", run.precision)
    reduced = plain.get("reduced", added)
    if added is not reduced:
        raise ConfigError(
            f"gradients are added up in {added} and reduced in {reduced}, which has no price",
            hint="use one type in data_types.grad_accum_dtype and communication_data_type",
        )
    assert isinstance(added, Precision), "a row reads it"
    return added


def _with_batch(run: Settings, facts: Facts, plain: Facts) -> Settings:
    """Returns the settings with the sizes of batches that are left out. Raises ConfigError."""
    micro: int = facts.get("micro_batch_size", 0)  # 0 where it is left out
    steps: int = plain.get("accumulation", 0)
    whole: int = facts.get("global_batch_size", 0)
    if "stated_batch_size" in plain:
        whole, steps = plain["stated_batch_size"], 0
    if not whole and not micro:
        raise ConfigError(
            "neither train_batch_size nor train_micro_batch_size_per_gpu is given",
            hint="give one of them, or state it with plan read FILE --micro-batch-size N",
        )
    micro = micro or whole // (run.dp * (steps or 1))
    steps = steps or (whole // (micro * run.dp) if whole and micro else 1)
    whole = whole or micro * steps * run.dp
    if whole != micro * steps * run.dp:
        raise ConfigError(
            f"train_batch_size {whole} is not train_micro_batch_size_per_gpu {micro} x "
            f"gradient_accumulation_steps {steps} x {run.dp} data-parallel ranks",
            hint="change one of them, or --gpus",
        )
    return replace(run, micro_batch_size=micro, global_batch_size=whole)
