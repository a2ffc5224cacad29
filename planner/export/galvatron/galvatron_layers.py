"""Galvatron's keys: the table of its JSON, whose lists have one number for each block.

Read in PKU-DAIR/Hetu-Galvatron at cea12ff, version 2.4.1: `get_hybrid_parallel_configs_api` of
galvatron/core/runtime/hybrid_parallel_config.py and `config2strategy` of
galvatron/utils/config_utils.py, the defaults of galvatron/core/runtime/args_schema.py.
`dp_types_enc` chooses ZeRO 3 (1) or `default_dp_type` (0), `checkpoint` recomputes a whole block,
and `use_sp` turns the degree of a block into sequences that ranks exchange (Ulysses). The JSON has
no model, no length of sequences and no precision: the program's YAML and its overrides have them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import groupby

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.planner.export.fields.arguments import (
    Argument,
    Facts,
    Words,
    choice,
    number,
    read_whole,
    read_wholes,
    reading,
)
from parplan.planner.export.fields.settings import Settings
from parplan.planner.export.files.nested_file import read_flag
from parplan.profiles.documents.ranges import COUNT, DEVICES
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.spec import Precision
from parplan.profiles.stack import AttentionKernel, ContextForm

_SHARDED = 3
DEFAULT_TYPES = {0: "ddp", 2: "zero2", 3: "zero3"}
_SCHEDULES = {Schedule.ONE_F_ONE_B: "pipedream_flush", Schedule.GPIPE: "gpipe"}
# keys whose values Galvatron reads as text, also where it is one number (str2array)
LISTS = (
    "tp_sizes_enc",
    "tp_consecutive_flags",
    "cp_sizes_enc",
    "dp_types_enc",
    "use_sp",
    "checkpoint",
    "pp_division",
    "ep_sizes_enc",
    "tp_of_ep_sizes_enc",
)
DEFAULTS = Settings(
    precision=Precision.BF16,
    gradient_precision=Precision.BF16,
    sequence_parallel=True,
    overlap=True,
    schedule=Schedule.GPIPE,
)


def zeros_of(settings: Settings) -> tuple[int, ...]:
    """Returns the ZeRO stage of each block."""
    return settings.zero_of_blocks or (settings.zero,) * settings.num_layers


def _usual_zero(settings: Settings) -> int:
    """Returns the ZeRO stage of the blocks that are not fully sharded."""
    return min(zeros_of(settings))


def _recompute_flags(settings: Settings) -> Iterable[int]:
    if settings.recompute_of_blocks is not None:
        return (int(level is Recompute.FULL) for level in settings.recompute_of_blocks)
    return (int(settings.recompute is Recompute.FULL),) * settings.num_layers


def _joined(values: Iterable[int]) -> Words:
    return (",".join(map(str, values)),)


def _exchanges(settings: Settings) -> bool:
    return settings.cp > 1 and settings.context_form is ContextForm.ALL_TO_ALL


def _numbers(words: Words) -> list[int]:
    return list(read_wholes(tuple(part for word in words for part in word.split(","))))


def _alike(name: str, fact: str, write: Callable[[Settings], int | None]) -> Argument:
    """Returns the row of a list that has a price where its numbers are alike.

    write    the number of every block, None where the list is left out
    """

    def written(settings: Settings) -> Words | None:
        value = write(settings)
        return None if value is None else _joined((value,) * settings.num_layers)

    def read(words: Words, _: Facts) -> Facts:
        found = set(_numbers(words))
        if len(found) != 1:
            raise ValueError("blocks of unlike degrees are not priced")
        return {fact: found.pop()}

    return Argument(name=name, facts=(fact,), write=written, read=read)


def _read_zeros(words: Words, facts: Facts) -> Facts:
    usual = facts.get("usual_zero", 0)
    return {"zero_of_blocks": tuple(_SHARDED if one else usual for one in _numbers(words))}


def _read_recompute(words: Words, _: Facts) -> Facts:
    levels = tuple(Recompute.FULL if one else Recompute.NONE for one in _numbers(words))
    return {"recompute_of_blocks": levels}


def _read_type(words: Words, _: Facts) -> Facts:
    by_name = {name: zero for zero, name in DEFAULT_TYPES.items()}
    if words[0] not in by_name:
        raise ValueError(f"one of {', '.join(by_name)} is known")
    return {"usual_zero": by_name[words[0]]}


def _ends(name: str) -> Argument:
    """Returns the row of the embedding and the head: 1 where they are ZeRO 3."""
    return Argument(
        name=name,
        facts=("zero_of_ends",),
        write=lambda run: (f"{int(_zero_of_ends(run) == _SHARDED)}",),
        read=lambda words, facts: {
            "zero_of_ends": _SHARDED if words == ("1",) else facts.get("usual_zero", 0)
        },
    )


def _zero_of_ends(settings: Settings) -> int:
    return settings.zero if settings.zero_of_ends is None else settings.zero_of_ends


FILE_ROWS: tuple[Argument, ...] = (
    number("pp_deg", "pp"),
    _alike("tp_sizes_enc", "degree", lambda run: run.cp if _exchanges(run) else run.tp),
    _alike("tp_consecutive_flags", "consecutive", lambda _: 1),
    _alike(
        "cp_sizes_enc", "cp", lambda run: run.cp if run.cp > 1 and not _exchanges(run) else None
    ),
    Argument(
        name="default_dp_type",
        facts=("zero", "zero_of_blocks"),
        write=lambda run: (DEFAULT_TYPES.get(_usual_zero(run), "zero2"),),
        read=_read_type,
    ),
    Argument(
        name="dp_types_enc",
        facts=("zero", "zero_of_blocks"),
        write=lambda run: _joined(int(zero == _SHARDED) for zero in zeros_of(run)),
        read=_read_zeros,
    ),
    _alike("use_sp", "exchanges", lambda run: int(_exchanges(run))),
    Argument(
        name="checkpoint",
        facts=("recompute", "recompute_of_blocks"),
        write=lambda run: _joined(_recompute_flags(run)),
        read=_read_recompute,
    ),
    _alike("ep_sizes_enc", "ep", lambda run: run.ep if run.has_experts else None),
    _alike("tp_of_ep_sizes_enc", "etp", lambda run: run.etp if run.has_experts else None),
    number("global_bsz", "global_batch_size"),
    Argument(
        name="chunks",
        facts=("micro_batch_size",),
        write=lambda run: (f"{run.num_micro_batches}",),
        read=lambda words, _: {"chunks": read_whole(words, COUNT)},
    ),
    Argument(
        name="pp_division",
        facts=("blocks",),
        write=lambda run: _joined(run.blocks),
        read=lambda words, _: {"blocks": tuple(_numbers(words))},
    ),
    choice("pipeline_type", "schedule", _SCHEDULES),
    Argument(
        name="vtp",
        facts=("tp",),
        write=lambda run: (f"{1 if _exchanges(run) else run.tp}",),
        read=lambda words, _: {"vocabulary_degree": read_whole(words, DEVICES)},
    ),
    Argument(
        name="vsp",
        facts=("context_form",),
        write=lambda run: (f"{int(_exchanges(run))}",),
        read=lambda _, __: {},
    ),
    _ends("embed_sdp"),  # galvatron/core/search_engine/search_engine.py writes this one
    _ends("vocab_sdp"),  # and the runtime reads this one
    reading("vcp", lambda _, __: {}),
)
PRECISIONS = {Precision.BF16: "bf16", Precision.FP16: "fp16", Precision.FP32: "fp32"}


def _reduced(words: Words, facts: Facts) -> Facts:
    """Reads whether gradients are reduced in fp32, or as the products are."""
    wide = Precision.FP32 if read_flag(words) else facts.get("precision", Precision.BF16)
    return {"gradient_precision": wide}


OVERRIDES: tuple[Argument, ...] = (
    choice("parallel.mixed_precision", "precision", PRECISIONS),
    Argument(
        name="parallel.reduce_in_fp32",
        facts=("gradient_precision",),
        write=lambda run: ("true",) if run.gradient_precision is Precision.FP32 else ("false",),
        read=_reduced,
    ),
    Argument(
        name="train.sequence_parallel",
        facts=("sequence_parallel",),
        write=lambda run: ("true",) if run.sequence_parallel or run.tp == 1 else ("false",),
        read=lambda words, _: {"sequence_parallel": read_flag(words)},
    ),
    choice(
        "train.use_flash_attn",
        "attention",
        {AttentionKernel.FLASH: "true", AttentionKernel.UNFUSED: "false"},
    ),
    number("train.seq_length", "seq_length"),
    number("train.global_batch_size", "global_batch_size"),
)
# options of `plan read` for the JSON alone, whose program's YAML and overrides say these facts
PROGRAM = (
    number("--seq-length", "seq_length"),
    choice("--precision", "precision", PRECISIONS, DEFAULTS.precision),
    choice("--gradient-precision", "gradient_precision", PRECISIONS, DEFAULTS.gradient_precision),
    choice(
        "--attention",
        "attention",
        {AttentionKernel.FLASH: "flash", AttentionKernel.UNFUSED: "unfused"},
        AttentionKernel.FLASH,
    ),
)
TABLE: tuple[Argument, ...] = (*FILE_ROWS, *OVERRIDES, *PROGRAM)
_DERIVED = ("degree", "consecutive", "usual_zero", "exchanges", "chunks", "vocabulary_degree")


def finished(facts: Facts, num_gpus: int) -> Settings:
    """Returns the settings that facts say, with what Galvatron derives of them.

    facts   with `num_layers` of the model
    Raises ConfigError where they contradict one another, and for unlike degrees of the vocabulary.
    """
    facts = dict(facts)
    for fact, name in (("degree", "tp_sizes_enc"), ("seq_length", "--seq-length")):
        if fact not in facts:
            raise ConfigError(f"{name} is not said", hint=f"add {name}")
    plain = {name: facts.pop(name) for name in _DERIVED if name in facts}
    settings = replace(DEFAULTS, **facts)
    degree, exchanges = plain["degree"], bool(plain.get("exchanges"))
    if exchanges:
        settings = replace(settings, cp=degree, context_form=ContextForm.ALL_TO_ALL)
    else:
        form = ContextForm.RING if settings.cp > 1 else None
        settings = replace(settings, tp=degree, context_form=form)
    inside = settings.pp * settings.cp * settings.tp
    if num_gpus % inside:
        raise ConfigError(
            f"pp {settings.pp} x cp {settings.cp} x tp {settings.tp} does not divide the "
            f"{num_gpus} GPUs",
            hint="change a degree or --gpus",
        )
    dp = num_gpus // inside
    return replace(
        settings,
        dp=dp,
        micro_batch_size=_micro_batch(settings.global_batch_size, dp, plain.get("chunks", 1)),
        blocks=settings.blocks or _divided(settings),
        etp=settings.etp if settings.has_experts else 1,
        sequence_parallel=settings.sequence_parallel and settings.tp > 1,
        schedule=settings.schedule if settings.pp > 1 else Schedule.ONE_F_ONE_B,
        **_layers(settings),
    )


def _micro_batch(global_batch_size: int, dp: int, chunks: int) -> int:
    """Returns the sequences of a micro-batch. Raises ConfigError for parts of sequences."""
    if global_batch_size % (dp * chunks):
        raise ConfigError(
            f"global_bsz {global_batch_size} is not dp {dp} x chunks {chunks} x a whole number",
            hint="change chunks or global_bsz",
        )
    return global_batch_size // (dp * chunks)


def _divided(settings: Settings) -> tuple[int, ...]:
    """Returns the blocks of stages without pp_division: the last stage has the rest."""
    each = settings.num_layers // settings.pp
    return (*(each,) * (settings.pp - 1), settings.num_layers - each * (settings.pp - 1))


def _layers(settings: Settings) -> Facts:
    """Returns one ZeRO stage and one recompute where the blocks are alike.

    Raises ConfigError for lists of another length than the model.
    """
    facts: Facts = {}
    zeros, levels = settings.zero_of_blocks, settings.recompute_of_blocks
    for name, found in (("dp_types_enc", zeros), ("checkpoint", levels)):
        if found is not None and len(found) != settings.num_layers:
            raise ConfigError(
                f"{name} has {len(found)} blocks, the model has {settings.num_layers}",
                hint="name the model that the file is for",
            )
    if zeros is not None and len(tuple(groupby(zeros))) == 1:
        facts |= {"zero": zeros[0], "zero_of_blocks": None}
    if levels is not None and len(tuple(groupby(levels))) == 1:
        facts |= {"recompute": levels[0], "recompute_of_blocks": None}
    zero = facts.get("zero", min(zeros) if zeros else settings.zero)
    if settings.zero_of_ends == zero and "zero" in facts:
        facts["zero_of_ends"] = None
    return facts | {"zero": zero}
