"""The user's options become the request for a traced module, with a phrase for every default."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parplan.commands.options.layout_options import LayoutOptions
from parplan.commands.options.pin_options import PinOptions
from parplan.commands.options.search_options import SearchFlags
from parplan.commands.options.target_options import TargetOptions
from parplan.commands.requests.layouts import offload_by_hand
from parplan.commands.requests.machine import TrainingDefaults, cluster_and_training
from parplan.commands.requests.requests import constraints_of, offload_phrase
from parplan.planner.request import TRACED_OFFLOAD, Constraints, ModuleRequest, PlanRequest
from parplan.planner.search.estimate import ChunkRequest
from parplan.planner.stage_recompute import two_recomputes_error
from parplan.profiles.documents.numbers import whole
from parplan.profiles.documents.ranges import COUNT
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.model_catalog import find_config
from parplan.profiles.models.module_source import ModuleSource

if TYPE_CHECKING:
    from parplan.planner.plan.traced_plan import TracedPlan

GLOBAL_BATCH_SIZE = 512  # sequences or samples; the default of a described Hugging Face model too
LONGEST_SEQ_LENGTH = 8192
EXECUTORS_STACK = "parplan"  # no other runs a module as it was traced
SEQ_LENGTH = 1024  # of a module that says no number of positions
_POSITIONS = ("max_position_embeddings", "n_positions")
_WHOLE = "tensor parallelism of a traced module is inside a node and as its matrices allow"
_ONLY_STATES = "the host holds the states of a traced module, no activations"
ANY_NUMBER = 10**6  # of shards in chunks, which only the trace knows
_WHOLE_SHARDS = "a shard is one function to the executor, and all of it is used at once"
_REFUSED = {  # options that a traced module cannot have, and why
    "module": "the traced module is what runs",
    "fp8": "products of a traced module run in --precision",
    "narrow_weights": "products of a traced module run in --precision",
    "base_weights": "frozen weights of a traced module are in the precision of training",
    "document_lengths": "a traced module reads its sequences as it does",
    **dict.fromkeys(
        ("images_per_sequence", "image_tokens"), "the inputs of a traced module are its own"
    ),
    "robust": "a traced module is planned without runners-up that are priced again",
    "prefer": "the error band of a traced module is unknown, and so are its ties",
    "cp": _WHOLE,
    "context_form": _WHOLE,
    "ep": _WHOLE,
    "etp": _WHOLE,
    "tp_rows": _WHOLE,
    "sequence_parallel": _WHOLE,
    "tp_overlap": _WHOLE,
    "tp_across_nodes": _WHOLE,
    "megatron_sharding": _WHOLE,
    "weights_over_data": _WHOLE,
    "zero_ranks": "all data parallel ranks hold one copy of a traced module's states",
    "chunk_access": _WHOLE_SHARDS,
    "zero_by_operator": "all operators of a stage of a traced module have one ZeRO stage",
}
_BY_HAND_REFUSED = {  # options of a layout by hand that a traced module cannot have
    "cp": _WHOLE,
    "context_form": _WHOLE,
    "ep": _WHOLE,
    "etp": _WHOLE,
    "tp_rows": _WHOLE,
    "schedule_file": "the stages of a traced module run a named schedule",
    "sequence_parallel": _WHOLE,
    "tp_overlap": _WHOLE,
    "zero_ranks": _REFUSED["zero_ranks"],
    "own_zero": "all operators of a stage of a traced module have one ZeRO stage",
    "keep_on_host": _ONLY_STATES,
    "chunk_access": _WHOLE_SHARDS,
}


def traced_source(model: str | None, *, trace: bool) -> ModuleSource | None:
    """Returns the module of --model if it has to be traced, else None.

    That is a function, or a config.json of a family that is not described; with `trace` also of a
    described one. Raises ConfigError for a model that is no module and for files that cannot be
    read.
    """
    if model is not None and re.fullmatch(r"[\w.]+:\w+", model) and not Path(model).exists():
        return ModuleSource(factory=model)
    config = find_config(model) if model is not None else None
    if config is not None:
        from parplan.profiles.models.huggingface import is_described_family

        if trace or not is_described_family(config):
            return ModuleSource(huggingface=dict(config))
    if trace:
        raise ConfigError(
            f"--trace needs a module, --model is {model}",
            hint="give a config.json or package.module:function",
        )
    return None


def module_request(
    source: ModuleSource,
    target: TargetOptions,
    pins: PinOptions,
    flags: SearchFlags,
) -> ModuleRequest:
    """Returns the request for a traced module, without the limits of its search.

    Raises ConfigError as `request_of` does, and for options that no traced module has.
    """
    _require_plain(target, pins, flags)
    defaults = TrainingDefaults(
        global_batch_size=GLOBAL_BATCH_SIZE,
        seq_length=_seq_length(source.huggingface or {}),
        whose="a default",
        stack=EXECUTORS_STACK,
    )
    cluster, training, assumed = cluster_and_training(target, defaults)
    # the module itself says what of it is trained
    source = replace(source, fine_tuning=training.fine_tuning)
    training = replace(training, fine_tuning=None)
    return PlanRequest(
        model=source,
        cluster=cluster,
        training=training,
        constraints=constraints_of(pins, target, TRACED_OFFLOAD),
        assumed=assumed,
    )


def estimate_request(
    source: ModuleSource, target: TargetOptions, by_hand: LayoutOptions
) -> tuple[ModuleRequest, ChunkRequest | None]:
    """Returns the request whose pins are the layout by hand, and the states in chunks.

    Counts of shards on the host beyond those of a rank are all of them. Raises ConfigError as
    `module_request` does, and for choices of described models.
    """
    _require_known(by_hand, _BY_HAND_REFUSED)
    if by_hand.recompute_first_stage and by_hand.recompute != "none":
        raise two_recomputes_error(by_hand.recompute)
    whole, chunks = offload_by_hand(by_hand, ANY_NUMBER)
    pins = PinOptions(
        pp=(by_hand.pp,),
        dp=None if by_hand.dp is None else (by_hand.dp,),
        tp=(by_hand.tp,),
        micro_batch_size=(by_hand.micro_batch_size,),
        virtual_stages=(by_hand.virtual_stages,),
        schedule=(by_hand.schedule or ("interleaved" if by_hand.virtual_stages > 1 else "1f1b"),),
        zero=(by_hand.zero,),
        recompute=None if by_hand.recompute_first_stage else (by_hand.recompute,),
        recompute_first_stage=by_hand.recompute_first_stage,
        offload=whole,
    )
    return module_request(source, target, pins, SearchFlags()), chunks


def with_assumed_of(plan: TracedPlan, request: ModuleRequest) -> ModuleRequest:
    """Returns the request with the defaults that matter to its plan: samples have no length."""
    if plan.training.seq_length == request.training.seq_length:
        return request
    return replace(
        request,
        assumed=tuple(text for text in request.assumed if not text.startswith("--seq-length ")),
    )


def offload_assumed(constraints: Constraints, plan: TracedPlan) -> tuple[str, ...]:
    """Returns a phrase where a plan uses the host's memory and no option asked for it."""
    needed = (plan.offload or plan.chunks) and constraints.offload is None
    return (offload_phrase(TRACED_OFFLOAD),) if needed else ()


def _require_plain(target: TargetOptions, pins: PinOptions, flags: SearchFlags) -> None:
    for record in (target, pins, flags):
        _require_known(record, _REFUSED)


def _require_known(
    options: TargetOptions | PinOptions | SearchFlags | LayoutOptions, refused: Mapping[str, str]
) -> None:
    """Raises ConfigError for an option of `refused` that is given."""
    defaults = {field.name: field.default for field in fields(options)}
    for name, why in refused.items():
        if getattr(options, name, None) not in (None, False, (), defaults.get(name)):
            raise ConfigError(f"--{name.replace('_', '-')}: {why}", hint="leave it out")


def _seq_length(config: Mapping[str, Any]) -> int:
    """The positions of a Hugging Face config, at most LONGEST_SEQ_LENGTH. Raises ConfigError."""
    name = next((name for name in _POSITIONS if isinstance(config.get(name), int)), None)
    if name is None:
        return SEQ_LENGTH
    return min(whole(config[name], name, "config.json", COUNT), LONGEST_SEQ_LENGTH)
