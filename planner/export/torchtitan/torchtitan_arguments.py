"""torchtitan's options: the table of its command line over a named configuration.

Names and defaults were read in the release torchtitan 0.3.0: torchtitan/config/configs.py unless a
row says otherwise. FSDP2 divides parameters over dp_shard x cp ranks, and gathers them again for
the backward pass (ZeRO 3) or not (ZeRO 2). dp_replicate copies of that are HSDP. Tensor parallelism
has sequence parallelism unless it is turned off. Experts are divided whole, over ranks of cp, tp
and dp (torchtitan/distributed/parallel_dims.py). Context parallelism gathers keys and values, the
default of torch.distributed.tensor.experimental.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.planner.export.fields.arguments import (
    Argument,
    Facts,
    Words,
    choice,
    free,
    number,
    read_number,
    reading,
    switch,
)
from parplan.planner.export.fields.program_facts import require_length
from parplan.planner.export.fields.settings import Settings
from parplan.planner.export.fields.subjects import Subject, subject_of
from parplan.planner.export.files.nested_file import unpriced
from parplan.planner.export.torchtitan.torchtitan_names import SHIPPED
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.spec import Precision
from parplan.profiles.stack import ContextForm
from parplan.profiles.state_precision import StatePrecision

SCHEDULES = {  # torch.distributed.pipelining.schedules.get_schedule_class
    Schedule.ONE_F_ONE_B: "1F1B",
    Schedule.GPIPE: "GPipe",
    Schedule.INTERLEAVED: "Interleaved1F1B",
    Schedule.ZBV: "ZBVZeroBubble",
    Schedule.DUALPIPEV: "DualPipeV",
}
_ONE_STAGE = (Schedule.ONE_F_ONE_B, Schedule.GPIPE)
_RESHARDS = {3: "always", 2: "never"}
_LEVELS = {Recompute.NONE: "none", Recompute.SELECTIVE: "selective", Recompute.FULL: "full"}
# two stages a rank where the schedule has several (torchtitan/distributed/pipeline_parallel.py)
_USUAL_STAGES = 2
_P = "--parallelism."
_T = "--training."
DEFAULTS = Settings(
    zero=3,
    precision=Precision.BF16,
    sequence_parallel=True,
    recompute=Recompute.SELECTIVE,
    full_in_turn=True,
    overlap=True,
)
# Options that change time or memory and have no price here: a file that has one is refused.
REFUSED = (
    "--parallelism.module_fqns_per_model_part",
    "--parallelism.pipeline_parallel_schedule_csv",
    "--parallelism.enable_fsdp_symm_mem",
    "--parallelism.pipeline_parallel_split_points",
    "--compile.enable_async_tensor_parallel",
    "--activation_checkpoint.memory_budget",
    "--activation_checkpoint.force_recompute_mm_shapes_by_fqns",
    "--activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns",
    "--optimizer.early_step_in_backward",
)


def generated_blocks(stages: int, layers: int, first: int, last: int) -> tuple[int, ...] | None:
    """Returns the blocks of stages in which the ends count as `first` and `last` blocks.

    The first stages have the rest, as `_generate_llm_fqn_per_model_part` deals it
    (torchtitan/distributed/pipeline_parallel.py). None where an end does not fit its stage.
    """
    if stages == 1:
        return (layers,)
    each, rest = divmod(layers + first + last, stages)
    if max(first, last) > each or each == 0:
        return None
    blocks = [each + (stage < rest) for stage in range(stages)]
    blocks[0] -= first
    blocks[-1] -= last
    return tuple(blocks)


def partitions(stages: int, layers: int) -> Iterator[tuple[int, ...]]:
    """Yields the blocks of stages that torchtitan says, each once."""
    ends = product(range(-(-layers // stages) + 1), repeat=2)
    dealt = (generated_blocks(stages, layers, first, last) for first, last in ends)
    yield from dict.fromkeys(blocks for blocks in dealt if blocks is not None)


def _ends(settings: Settings) -> tuple[int, int]:
    """Returns the blocks that embedding and head count as, the defaults where none are right."""
    wanted, most = settings.blocks, max(settings.blocks)
    return next(
        (
            (first, last)
            for first, last in product(range(most + 1), repeat=2)
            if generated_blocks(len(wanted), settings.num_layers, first, last) == wanted
        ),
        (1, 1),
    )


def _end(which: int) -> Argument:
    name = ("first", "last")[which]

    def write(settings: Settings) -> Words | None:
        less = _ends(settings)[which]
        return (f"{less}",) if settings.pp > 1 and less != 1 else None

    return Argument(
        name=f"{_P}pipeline_parallel_{name}_stage_less_layers",
        facts=("blocks",),
        write=write,
        read=lambda words, _: {f"{name}_less": read_number(words)},
    )


def _per_stage(settings: Settings) -> Words | None:
    if settings.pp == 1 or settings.virtual_stages in (1, _USUAL_STAGES):
        return None
    return (f"{-(-(settings.num_layers + sum(_ends(settings))) // settings.num_stages)}",)


def _replicas(settings: Settings) -> Words | None:
    if settings.zero == 0:
        return (f"{settings.dp}",) if settings.dp > 1 else None
    ranks = settings.zero_ranks
    return None if ranks is None else (f"{settings.replicas // ranks}",)


def _shards(settings: Settings) -> Words | None:
    if settings.zero == 0:
        return ("1",)
    ranks = settings.zero_ranks or settings.replicas
    return (f"{max(1, ranks // settings.cp)}",)


def _local(settings: Settings) -> Words:
    return (f"{settings.local_batch_size}",)


def _micro(settings: Settings) -> Words | None:
    return (f"{settings.micro_batch_size}",) if settings.pp > 1 else None


def _read_option(words: Words, _: Facts) -> Facts:
    """Reads which blocks recompute: all by the kinds of operators, or every nth whole."""
    if words == ("op",):
        return {"every": None}
    return {"every": int(words[0])}


def _read_config(words: Words, _: Facts) -> Facts:
    """Reads what a named configuration ships. Raises ValueError for one of narrow products."""
    name = words[0]
    subject = Subject.PRECISION if name in _NARROW else subject_of(name)
    if subject is not None:
        raise ValueError(f"this configuration is about {subject}, and has no price")
    return {"shipped": SHIPPED[name].facts} if name in SHIPPED else {}


_NARROW = ("llama3_405b",)  # its linear layers are Float8Linear
_RESHARDING = choice("", "zero", _RESHARDS)
TABLE: tuple[Argument, ...] = (
    Argument(
        name=f"{_P}data_parallel_replicate_degree",
        facts=("zero", "zero_ranks"),
        write=_replicas,
        read=lambda words, _: {"copies": read_number(words)},
    ),
    Argument(
        name=f"{_P}data_parallel_shard_degree",
        facts=("zero", "zero_ranks"),
        write=_shards,
        read=lambda words, _: {"shards": read_number(words)},
    ),
    Argument(
        name=f"{_P}fsdp_reshard_after_forward",
        facts=("zero",),
        write=choice("", "zero", _RESHARDS).write,
        read=lambda words, _: {} if words == ("default",) else _RESHARDING.read(words, {}),
    ),
    number(f"{_P}tensor_parallel_degree", "tp"),  # a configuration may ship another one
    Argument(
        name=f"{_P}no-enable_sequence_parallel",
        facts=("sequence_parallel",),
        write=lambda run: () if run.tp > 1 and not run.sequence_parallel else None,
        read=lambda _, __: {"sequence_parallel": False},
    ),
    number(f"{_P}context_parallel_degree", "cp", 1),
    number(f"{_P}expert_parallel_degree", "ep", 1),
    number(f"{_P}pipeline_parallel_degree", "pp", 1),
    choice(f"{_P}pipeline_parallel_schedule", "schedule", SCHEDULES, when=lambda run: run.pp > 1),
    Argument(
        name=f"{_P}pipeline_parallel_layers_per_stage",
        facts=("virtual_stages",),
        write=_per_stage,
        read=lambda words, _: {"per_stage": read_number(words)},
    ),
    _end(0),
    _end(1),
    Argument(
        name=f"{_P}pipeline_parallel_microbatch_size",
        facts=("micro_batch_size",),
        write=_micro,
        read=lambda words, _: {"micro": read_number(words)},
    ),
    Argument(
        name=f"{_T}local_batch_size",
        facts=("micro_batch_size",),
        write=_local,
        read=lambda words, _: {"local": read_number(words)},
    ),
    number(f"{_T}global_batch_size", "global_batch_size"),
    number(f"{_T}seq_len", "seq_length"),
    reading(f"{_T}max_context_length", lambda words, _: {"seq_length": read_number(words)}),
    reading(
        f"{_T}num_tokens_per_microbatch_per_dp_rank",
        lambda words, _: {"tokens_of_pass": read_number(words)},
    ),
    reading(
        f"{_T}num_tokens_per_train_step", lambda words, _: {"tokens_of_step": read_number(words)}
    ),
    reading(f"{_P}num_pp_microbatches", lambda words, _: {"passes": read_number(words)}),
    unpriced(f"{_T}mixed_precision_param", "bfloat16"),
    unpriced(f"{_P}context_parallel_rotate_method", "allgather"),
    unpriced("--model.converters"),
    unpriced("--optimizer.name", "adamw"),
    unpriced(f"{_P}expert_tensor_parallel_degree", "1"),
    switch(f"{_T}enable_cpu_offload", "states_on_host"),
    choice(
        f"{_T}dtype",
        "state_precision",
        {StatePrecision.BF16: "bfloat16", StatePrecision.FP32: "float32"},
        StatePrecision.FP32,
    ),
    free(f"{_T}disable_cuda_graphs"),  # no price has them, and pipelines and experts refuse them
    free("--compile.enable"),  # the prices are of compiled blocks and of a compiled loss
    Argument(
        name="activation_checkpoint",
        facts=("recompute",),
        write=lambda run: (_LEVELS[run.recompute],),
        read=lambda words, _: {"recompute": _level(words)},
        source="torchtitan/distributed/activation_checkpoint.py",
    ),
    reading("--activation_checkpoint.selective_ac_option", _read_option),
    reading("--config", _read_config),
)


def _level(words: Words) -> Recompute:
    levels = {word: level for level, word in _LEVELS.items()}
    if not words or words[0] not in levels:
        raise ValueError(f"one of {', '.join(levels)} is priced")
    return levels[words[0]]


_DERIVED = (
    "copies",
    "shards",
    "per_stage",
    "first_less",
    "last_less",
    "micro",
    "local",
    "tokens",
    "tokens_of_pass",
    "tokens_of_step",
    "passes",
    "every",
    "shipped",
)


def finished(facts: Facts, num_gpus: int) -> Settings:
    """Returns the settings that options say, with what torchtitan derives of them.

    facts   with `num_layers` of the model
    Raises ConfigError where the options contradict one another.
    """
    facts = dict(facts.get("shipped", {})) | facts
    require_length(facts)
    plain = {name: facts.pop(name) for name in _DERIVED if name in facts}
    settings = replace(DEFAULTS, **facts)
    inside = settings.pp * settings.cp * settings.tp
    if num_gpus % inside:
        raise ConfigError(
            f"pp {settings.pp} x cp {settings.cp} x tp {settings.tp} does not divide the "
            f"{num_gpus} GPUs",
            hint="change a degree or --gpus",
        )
    if "zero" not in facts and settings.pp > 1:  # torchtitan/distributed/fsdp.py
        settings = replace(settings, zero=2)
    dp = num_gpus // inside
    micro, local = _batch(settings, plain)
    whole = plain.get("tokens_of_step", -1)
    settings = replace(
        settings,
        dp=dp,
        context_form=ContextForm.ALL_GATHER if settings.cp > 1 else None,
        etp=settings.tp if settings.has_experts and settings.ep == 1 else 1,
        micro_batch_size=micro,
        global_batch_size=facts.get(
            "global_batch_size", local * dp if whole == -1 else whole // settings.seq_length
        ),
        sequence_parallel=settings.sequence_parallel and settings.tp > 1,
        schedule=settings.schedule if settings.pp > 1 else Schedule.ONE_F_ONE_B,
        **_sharding(settings, dp, plain),
    )
    return _with_levels(_with_stages(settings, plain), plain.get("every"))


def _batch(settings: Settings, plain: Facts) -> tuple[int, int]:
    """Returns the sequences of a micro-batch, and those of a rank's pass through the pipeline.

    Releases until 0.3 count sequences, later ones tokens. Raises ConfigError.
    """
    length = settings.seq_length
    passes = plain.get("passes", 1) if settings.pp > 1 else 1
    tokens = plain.get("tokens_of_pass")
    if tokens is None and "local" not in plain:
        raise ConfigError(
            "the file does not say the sequences of a rank, which its configuration chooses",
            hint="state them with plan read FILE --micro-batch-size N",
        )
    if tokens is None:
        local: int = plain["local"]
        micro = local // passes if "passes" in plain else plain.get("micro", 1)
        return (micro if settings.pp > 1 else local), local
    if tokens % length:
        raise ConfigError(
            f"{tokens} tokens of a rank are no whole sequences of {length}",
            hint="change the context length, or the tokens",
        )
    return tokens // length, tokens // length * passes


def _with_levels(settings: Settings, every: int | None) -> Settings:
    """Returns the settings where every nth block recomputes all, and the others nothing."""
    if every is None or settings.recompute is not Recompute.SELECTIVE:
        return settings
    levels = tuple(
        Recompute.FULL if (block + 1) % every == 0 else Recompute.NONE
        for block in range(settings.num_layers)
    )
    alike = {"recompute": levels[0]} if len(set(levels)) == 1 else {"recompute_of_blocks": levels}
    return replace(settings, **alike)


def _sharding(settings: Settings, dp: int, plain: Facts) -> Facts:
    """Returns the ZeRO stage and the ranks of one copy. Raises ConfigError."""
    copies = plain.get("copies", 1)
    shards = plain.get("shards", -1)
    shards = dp // copies if shards == -1 else shards
    if copies * shards != dp:
        raise ConfigError(
            f"dp_replicate {copies} x dp_shard {shards} is not the dp {dp} of these GPUs",
            hint="change a degree or --gpus",
        )
    if shards * settings.cp == 1:
        return {"zero": 0, "zero_ranks": None}
    return {"zero_ranks": shards * settings.cp if copies > 1 else None}


def _with_stages(settings: Settings, plain: Facts) -> Settings:
    """Returns the settings with the blocks of every stage. Raises ConfigError."""
    first, last = plain.get("first_less", 1), plain.get("last_less", 1)
    virtual = 1 if settings.schedule in _ONE_STAGE else _USUAL_STAGES
    if "per_stage" in plain and settings.pp > 1:
        stages = -(-(settings.num_layers + first + last) // plain["per_stage"])
        virtual = max(1, stages // settings.pp)
    settings = replace(settings, virtual_stages=virtual)
    blocks = generated_blocks(settings.num_stages, settings.num_layers, first, last)
    if blocks is None:
        raise ConfigError(
            f"{settings.num_layers} blocks do not divide into {settings.num_stages} stages whose "
            f"ends count as {first} and {last}",
            hint="change the degrees of the pipeline",
        )
    return replace(settings, blocks=blocks)
