"""The keys of fsdp2.yaml, the settings of the exported training program of PyTorch's own parts.

The keys are the fields of the dataclasses in configs/launchers/fsdp2_settings.py, which refuse
others. Every key is written, also where it has its default.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import groupby
from typing import TypeVar

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.planner.export.fields.arguments import (
    Argument,
    Facts,
    Given,
    Words,
    choice,
    number,
    read_arguments,
    read_number,
)
from parplan.planner.export.fields.settings import Settings
from parplan.planner.export.files.nested_file import flag, read_flag
from parplan.planner.export.megatron.megatron_model import unsaid_parts
from parplan.profiles.documents.numbers import whole_of
from parplan.profiles.documents.ranges import LAYERS
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.functions import PLAIN_FUNCTIONS, Activations
from parplan.profiles.models.spec import ModelSpec, Norm, Positions, Precision
from parplan.profiles.stack import ContextForm
from parplan.profiles.state_precision import StatePrecision

V = TypeVar("V")
STAGES = "pipeline.stage_blocks"
SCHEDULES = {  # torch.distributed.pipelining.schedules.get_schedule_class
    Schedule.ONE_F_ONE_B: "1F1B",
    Schedule.GPIPE: "GPipe",
    Schedule.INTERLEAVED: "Interleaved1F1B",
}
_TYPES = {Precision.BF16: "bfloat16", Precision.FP32: "float32"}
_STATES = {StatePrecision.FP32: "float32", StatePrecision.BF16: "bfloat16"}
_ACTIVATIONS = {
    Activations.GELU_TANH: "gelu_tanh",
    Activations.GELU: "gelu",
    Activations.RELU: "relu",
    Activations.SILU: "silu",
}
DEFAULTS = Settings(zero=3, sequence_parallel=True, precision=Precision.BF16, overlap=True)


_RESHARDS = {"true": 3, "false": 2}
_LEVELS = {f"{level}": level for level in Recompute}


def _reshards(zero: int) -> str:
    return "true" if zero == 3 else "false"


def _runs(values: Iterable[str]) -> Words:
    """Returns the one value of all blocks, or each with its number of blocks, such as `12 full`."""
    runs = [(value, len(tuple(group))) for value, group in groupby(values)]
    if len(runs) == 1:
        return (f"{runs[0][0]}",)
    return tuple(f"{count} {value}" for value, count in runs)


def _of_blocks(words: Words, facts: Facts, values: Mapping[str, V]) -> tuple[V, ...]:
    """Returns the value of every block. Raises ValueError."""
    blocks = sum(facts.get("blocks", ()))
    runs = [(f"{blocks} {word}" if word in values else word).split() for word in words]
    right = all(len(run) == 2 and run[1] in values for run in runs)
    counts = [whole_of(run[0], LAYERS) or 0 for run in runs if right]
    if not right or not all(counts) or sum(counts) != blocks:
        known = " or ".join(values)
        raise ValueError(f"{known} is needed, or a list of numbers of blocks with one of them")
    return tuple(
        values[word] for count, (_, word) in zip(counts, runs, strict=True) for _ in range(count)
    )


def _activation(model: ModelSpec) -> Activations:
    usual = Activations.SILU if model.gated_ffn else Activations.GELU_TANH
    return model.functions.activation or usual


def _schedule(settings: Settings) -> Words | None:
    # torch's 1F1B refuses fewer micro-batches than stages, and then runs in the order of GPipe
    short = settings.num_micro_batches < settings.pp and settings.virtual_stages == 1
    name = SCHEDULES.get(Schedule.GPIPE if short else settings.schedule)
    return None if name is None else (name,)


def _read_stages(words: Words, _: Facts) -> Facts:
    blocks = tuple(whole_of(word, LAYERS) or 0 for word in words)
    if not all(blocks):
        raise ValueError("the blocks of every stage are needed, such as [8, 9, 9, 6]")
    return {"blocks": blocks}


SHAPE: tuple[Argument, ...] = (
    *(
        number(f"shape.{name}", name)
        for name in (
            "num_layers",
            "hidden_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "ffn_hidden_size",
            "vocab_size",
            "vocab_multiple",
            "max_seq_length",
        )
    ),
    choice("shape.norm", "norm", {each: f"{each}" for each in Norm}),
    number("shape.norm_epsilon", "norm_epsilon"),
    choice("shape.positions", "positions", {each: f"{each}" for each in Positions}),
    number("shape.rope_theta", "rope_theta"),
    number("shape.rotary_fraction", "rotary_fraction"),
    flag("shape.gated_ffn", "gated_ffn"),
    Argument(
        name="shape.activation",
        facts=("functions",),
        write=lambda model: (_ACTIVATIONS.get(_activation(model), f"{_activation(model)}"),),
        read=lambda words, _: {"activation": words[0]},
    ),
    flag("shape.linear_bias", "linear_bias"),
    flag("shape.qkv_bias", "qkv_bias"),
    flag("shape.tied_embeddings", "tied_embeddings"),
    number("shape.dropout", "dropout"),
)
TABLE: tuple[Argument, ...] = (
    number("mesh.pipeline", "pp"),
    Argument(
        name="mesh.replicate",
        facts=("zero", "zero_ranks"),
        write=lambda run: (f"{_copies(run)}",),
        read=lambda words, _: {"copies": read_number(words)},
    ),
    Argument(
        name="mesh.shard",
        facts=("zero", "zero_ranks"),
        write=lambda run: (f"{run.dp // _copies(run)}",),
        read=lambda words, _: {"shards": read_number(words)},
    ),
    number("mesh.context", "cp"),
    number("mesh.tensor", "tp"),
    Argument(
        name="pipeline.schedule",
        facts=("schedule",),
        write=_schedule,
        read=choice("pipeline.schedule", "schedule", SCHEDULES).read,
    ),
    Argument(
        name=STAGES,
        facts=("blocks", "virtual_stages"),
        write=lambda run: tuple(f"{count}" for count in run.blocks),
        read=_read_stages,
    ),
    Argument(
        name="sharding.reshard_after_forward",
        facts=("zero", "zero_of_blocks"),
        write=lambda run: _runs(map(_reshards, run.zero_of_blocks or (run.zero,))),
        read=lambda words, facts: {"zero_of_blocks": _of_blocks(words, facts, _RESHARDS)},
    ),
    Argument(
        name="sharding.reshard_ends",
        facts=("zero", "zero_of_ends"),
        write=lambda run: (_reshards(run.zero if run.zero_of_ends is None else run.zero_of_ends),),
        read=lambda words, _: {"zero_of_ends": 3 if read_flag(words) else 2},
    ),
    flag("sharding.cpu_offload", "states_on_host"),
    flag("sharding.sequence_parallel", "sequence_parallel"),
    number("batch.micro_batch_size", "micro_batch_size"),
    number("batch.global_batch_size", "global_batch_size"),
    number("batch.seq_length", "seq_length"),
    choice("precision.compute", "precision", _TYPES),
    choice("precision.gradients", "gradient_precision", _TYPES),
    choice("precision.states", "state_precision", _STATES),
    Argument(
        name="recompute",
        facts=("recompute", "recompute_of_blocks"),
        write=lambda run: _runs(run.recompute_of_blocks or (run.recompute,)),
        read=lambda words, facts: {"recompute_of_blocks": _of_blocks(words, facts, _LEVELS)},
    ),
)
_KNOWN = frozenset(row.name for row in (*SHAPE, *TABLE))


def _copies(settings: Settings) -> int:
    """Returns the copies of the states among data-parallel ranks."""
    if settings.zero == 0:
        return settings.dp
    return 1 if settings.zero_ranks is None else settings.replicas // settings.zero_ranks


def finished(given: tuple[Given, ...], model: ModelSpec, facts: Facts) -> Settings:
    """Returns the settings that keys say.

    facts   of the model
    Raises ConfigError for a key that the program refuses, and where the keys contradict.
    """
    unknown = next((each for each in given if each.name not in _KNOWN), None)
    if unknown is not None:
        raise ConfigError(
            f"{unknown.where}: {unknown.name} is no key of the program", hint="take it out"
        )
    found = read_arguments(TABLE, given) | facts
    copies, shards = found.pop("copies", 1), found.pop("shards", 1)
    shared = _alike(found)
    settings = replace(DEFAULTS, **found, **shared)
    ranks = shards * settings.cp
    settings = replace(
        settings,
        dp=copies * shards,
        zero=0 if ranks == 1 else settings.zero,
        zero_of_blocks=None if ranks == 1 else settings.zero_of_blocks,
        zero_of_ends=None if ranks == 1 else settings.zero_of_ends,
        zero_ranks=ranks if copies > 1 and ranks > 1 else None,
        context_form=ContextForm.ALL_TO_ALL if settings.cp > 1 else None,
        sequence_parallel=settings.sequence_parallel and settings.tp > 1,
        virtual_stages=max(1, len(settings.blocks) // settings.pp),
    )
    return _checked(settings, model)


def _alike(found: Facts) -> Facts:
    """Takes the values that all blocks share out of the facts, and returns them as those of all."""
    facts: Facts = {}
    levels = found.pop("recompute_of_blocks", (DEFAULTS.recompute,))
    facts |= {"recompute": levels[0]} if len(set(levels)) == 1 else {"recompute_of_blocks": levels}
    zeros = found.pop("zero_of_blocks", (DEFAULTS.zero,))
    ends = found.pop("zero_of_ends", DEFAULTS.zero)
    facts["zero"] = min(zeros)
    facts["zero_of_blocks"] = zeros if len(set(zeros)) > 1 else None
    facts["zero_of_ends"] = None if ends == min(zeros) else ends
    return facts


def _checked(settings: Settings, model: ModelSpec) -> Settings:
    """Returns the settings. Raises ConfigError for those that the program cannot run."""
    reason = None
    if model.num_kv_heads % settings.tp:
        reason = f"tensor {settings.tp} does not divide the {model.num_kv_heads} key-value heads"
    elif (model.num_heads // settings.tp) % settings.cp:
        reason = f"context {settings.cp} does not divide the {model.num_heads} heads of a rank"
    elif (settings.schedule is Schedule.INTERLEAVED) != (settings.virtual_stages > 1):
        reason = (
            f"{SCHEDULES[settings.schedule]} does not run {settings.virtual_stages} stages a rank"
        )
    if reason is not None:
        raise ConfigError(reason, hint="change that setting")
    return settings


def shape_of(given: tuple[Given, ...], name: str, where: str) -> ModelSpec:
    """Returns the model that the keys say. Raises ConfigError for one that is missing."""
    facts = read_arguments(SHAPE, given)
    missing = next((row.name for row in SHAPE if not facts.keys() & _facts_of(row)), None)
    if missing is not None:
        raise ConfigError(
            f"{where}: {missing} is missing", hint=f"add it, or plan read {where} --model NAME"
        )
    activation = facts.pop("activation")
    known = {word: value for value, word in _ACTIVATIONS.items()}
    if activation not in known:
        raise ConfigError(
            f"{where}: shape.activation is {activation}", hint=f"use one of {', '.join(known)}"
        )
    functions = replace(PLAIN_FUNCTIONS, activation=known[activation])
    return ModelSpec(name=name, functions=functions, **facts)


def _facts_of(row: Argument) -> set[str]:
    return {"activation"} if row.facts == ("functions",) else set(row.facts)


def require_said(model: ModelSpec, given: tuple[Given, ...]) -> None:
    """Raises ConfigError for a model that the keys do not say."""
    parts = ("experts",) if model.num_experts else _unsaid(model, given)
    if parts:
        raise ConfigError(
            f"{model.name} has {', '.join(parts)}, which the program does not build",
            hint="choose another target",
        )


def _unsaid(model: ModelSpec, given: tuple[Given, ...]) -> tuple[str, ...]:
    plain = replace(model.functions, activation=None) == PLAIN_FUNCTIONS
    if not plain or _activation(model) not in _ACTIVATIONS:
        return ("functions",)
    return unsaid_parts(model, shape_of(given, model.name, "the plan"))
