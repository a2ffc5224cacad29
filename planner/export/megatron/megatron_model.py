"""The shape of a model in Megatron-LM's arguments.

Names and defaults were read in NVIDIA/Megatron-LM at d98e8a64dd: megatron/training/arguments.py and
the fields of `TransformerConfig` and `MLATransformerConfig` (megatron/core/transformer/
transformer_config.py), which its argument parser takes over. Both dropouts are 0.1 by default.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import groupby
from typing import Any

from parplan.planner.export.fields.arguments import (
    Argument,
    Facts,
    Given,
    Words,
    choice,
    number,
    read_arguments,
    read_number,
    reading,
    switch,
)
from parplan.planner.export.fields.released_models import vocabulary
from parplan.planner.validation.frameworks import RELEASE_TEST_VOCAB
from parplan.profiles.documents.numbers import whole_of
from parplan.profiles.documents.ranges import LAYERS
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.blocks import BlockRun, LatentAttention, QkNorm, SharedExperts
from parplan.profiles.models.functions import PLAIN_FUNCTIONS, Activations, RouterScores
from parplan.profiles.models.spec import ModelSpec, Norm, Positions

MOST_BLOCKS = int(LAYERS.high)
_PATTERN_PART = re.compile(r"\(?\[([01](?:,[01])*)\]\)?(?:\*([0-9]{1,9}))?")


def _latent(field: str) -> Callable[[ModelSpec], Words | None]:
    def write(spec: ModelSpec) -> Words | None:
        return None if spec.latent is None else (f"{getattr(spec.latent, field)}",)

    return write


def _latent_row(name: str, field: str) -> Argument:
    return Argument(
        name=name,
        facts=("latent",),
        write=_latent(field),
        read=lambda words, _: {f"latent.{field}": read_number(words)},
    )


def _groups(spec: ModelSpec) -> Words | None:
    grouped = spec.latent is None and spec.num_kv_heads != spec.num_heads
    return (f"{spec.num_kv_heads}",) if grouped else None


def _q_rank(spec: ModelSpec) -> Words | None:
    return (f"{spec.latent.q_rank}",) if spec.latent is not None and spec.latent.q_rank else None


def _kv_channels(spec: ModelSpec) -> Words | None:
    usual = spec.latent is not None or spec.head_dim * spec.num_heads == spec.hidden_size
    return None if usual else (f"{spec.head_dim}",)


def _experts_at(spec: ModelSpec) -> Words | None:
    """Returns which blocks have experts, None where all have."""
    kinds = [int(kind.experts) for kind in spec.block_kinds]
    if not spec.num_experts or all(kinds):
        return None
    parts = (f"[{value}]*{len(tuple(run))}" for value, run in groupby(kinds))
    return (f"({'+'.join(parts)})",)


def _read_experts_at(words: Words, _: Facts) -> Facts:
    text = "".join(words).strip("'\"")
    every = whole_of(text, LAYERS)
    if every is not None:
        return {"experts_at": None if every == 1 else ("every", every)}
    found: list[int] = []
    for part in _PATTERN_PART.finditer(text):
        once = [int(value) for value in part[1].split(",")]
        found += once * min(int(part[2] or 1), MOST_BLOCKS + 1)
        if len(found) > MOST_BLOCKS:
            raise ValueError(f"a model has at most {MOST_BLOCKS:,} blocks")
    if not found:
        raise ValueError("write it as an integer, or as ([0]*3+[1]*58)")
    return {"experts_at": tuple(found)}


def _read_window(words: Words, _: Facts) -> Facts:
    """Reads the tokens before one that it reads; the tokens behind it are 0 in a causal model."""
    before, _after = _numbers(words)
    return {"window": before + 1}


def _read_full_attention_at(words: Words, _: Facts) -> Facts:
    """Reads which blocks read all tokens: every nth, from the nth on."""
    found = _numbers(words)
    if len(found) != 1:
        raise ValueError("one number is priced")
    return {"full_every": found[0]}


def _numbers(words: Words) -> list[int]:
    return [int(word) for word in re.findall(r"-?[0-9]{1,18}", " ".join(words))]


def _tokenizer_vocabulary(words: Words, _: Facts) -> Facts:
    """Returns the vocabulary of a tokenizer whose type, file or released name tells its size."""
    if words == ("GPT2BPETokenizer",):
        return {"vocab_size": RELEASE_TEST_VOCAB}
    size = vocabulary(words[0]) if words else None
    return {} if size is None else {"vocab_size": size}


def _dropout(spec: ModelSpec) -> Words:
    return (f"{spec.dropout:g}",)


_LAYERS: tuple[Argument, ...] = (
    number("--num-layers", "num_layers"),
    number("--hidden-size", "hidden_size"),
    number("--num-attention-heads", "num_heads"),
    Argument(
        name="--group-query-attention",
        facts=("num_kv_heads",),
        write=lambda spec: () if _groups(spec) else None,
        read=lambda _, __: {"grouped": True},
    ),
    Argument(
        name="--num-query-groups",
        facts=("num_kv_heads",),
        write=_groups,
        read=lambda words, facts: (
            {"num_kv_heads": read_number(words)} if facts.get("grouped") else {}
        ),
    ),
    Argument(
        name="--kv-channels",
        facts=("head_dim",),
        write=_kv_channels,
        read=lambda words, _: {"head_dim": read_number(words)},
    ),
    number("--ffn-hidden-size", "ffn_hidden_size", 0),
    reading("--tokenizer-type", _tokenizer_vocabulary),
    reading("--tokenizer-model", _tokenizer_vocabulary),
    reading("--merge-file", lambda _, __: {"vocab_size": RELEASE_TEST_VOCAB}),  # GPT-2's alone
    number("--vocab-size", "vocab_size"),
    number("--make-vocab-size-divisible-by", "vocab_multiple", 128),
    number("--max-position-embeddings", "max_seq_length"),
    choice("--normalization", "norm", {Norm.RMS_NORM: "RMSNorm", Norm.LAYER_NORM: "LayerNorm"}),
    number("--norm-epsilon", "norm_epsilon", 1e-5),
    choice(
        "--position-embedding-type",
        "positions",
        {Positions.LEARNED: "learned_absolute", Positions.ROTARY: "rope", Positions.NONE: "none"},
    ),
    reading("--use-rotary-position-embeddings", lambda _, __: {"positions": Positions.ROTARY}),
    number("--rotary-base", "rope_theta", 10000),
    number("--rotary-percent", "rotary_fraction", 1.0),
    switch("--swiglu", "gated_ffn"),
    Argument(
        name="--squared-relu",
        facts=("functions",),
        write=lambda spec: () if spec.functions.activation is Activations.RELU_SQUARED else None,
        read=lambda _, __: {"activation": Activations.RELU_SQUARED},
    ),
    switch("--disable-bias-linear", "linear_bias", False),
    switch("--add-qkv-bias", "qkv_bias", when=lambda spec: not spec.linear_bias),
    switch("--qk-layernorm", "qk_norm", QkNorm.HEAD),
    switch("--untie-embeddings-and-output-weights", "tied_embeddings", False),
    Argument(
        name="--attention-dropout",
        facts=("dropout",),
        write=_dropout,
        read=lambda words, _: {"dropout": read_number(words)},
    ),
    Argument(
        name="--hidden-dropout",
        facts=("dropout",),
        write=_dropout,
        read=lambda words, facts: {"dropout": max(read_number(words), facts.get("dropout", 0.1))},
    ),
    number("--mtp-num-layers", "mtp_layers", 0),
    reading("--window-size", _read_window),
    reading("--window-attn-skip-freq", _read_full_attention_at),
)
_LATENT: tuple[Argument, ...] = (
    Argument(
        name="--multi-latent-attention",
        facts=("latent",),
        write=lambda spec: None if spec.latent is None else (),
        read=lambda _, __: {"is_latent": True},
    ),
    Argument(
        name="--q-lora-rank",
        facts=("latent",),
        write=_q_rank,
        read=lambda words, _: {"latent.q_rank": read_number(words)},
    ),
    _latent_row("--kv-lora-rank", "kv_rank"),
    _latent_row("--qk-head-dim", "nope_head_dim"),
    _latent_row("--qk-pos-emb-head-dim", "rope_head_dim"),
    _latent_row("--v-head-dim", "value_head_dim"),
)
_EXPERTS: tuple[Argument, ...] = (
    number("--num-experts", "num_experts", 0),
    Argument(
        name="--moe-router-topk",
        facts=("experts_per_token",),
        write=lambda spec: (f"{spec.experts_per_token}",) if spec.num_experts else None,
        read=lambda words, _: {"experts_per_token": read_number(words)},
    ),
    number("--moe-ffn-hidden-size", "expert_ffn_hidden_size", 0),
    Argument(name="--moe-layer-freq", facts=("blocks",), write=_experts_at, read=_read_experts_at),
    Argument(
        name="--moe-shared-expert-intermediate-size",
        facts=("shared_experts",),
        write=lambda spec: (
            (f"{spec.shared_experts.ffn_hidden_size}",) if spec.shared_experts else None
        ),
        read=lambda words, _: {"shared": read_number(words)},
    ),
    Argument(
        name="--moe-shared-expert-gate",
        facts=("shared_experts",),
        write=lambda spec: () if spec.shared_experts and spec.shared_experts.gated else None,
        read=lambda _, __: {"shared_gate": True},
    ),
    Argument(
        name="--moe-router-score-function",
        facts=("functions",),
        write=lambda spec: (
            ("sigmoid",) if spec.functions.router_scores is RouterScores.SIGMOID else None
        ),
        read=lambda words, _: {
            "router_scores": RouterScores.SIGMOID if words == ("sigmoid",) else RouterScores.SOFTMAX
        },
    ),
    Argument(
        name="--moe-router-topk-scaling-factor",
        facts=("functions",),
        write=lambda spec: (
            (f"{spec.functions.router_factor:g}",) if spec.functions.router_factor != 1.0 else None
        ),
        read=lambda words, _: {"router_factor": read_number(words)},
    ),
)
MODEL_TABLE: tuple[Argument, ...] = (*_LAYERS, *_LATENT, *_EXPERTS)
_NEEDED = {
    "num_layers": "--num-layers",
    "hidden_size": "--hidden-size",
    "num_heads": "--num-attention-heads",
    "max_seq_length": "--max-position-embeddings",
    "vocab_size": "--vocab-size",
}


def read_model(given: tuple[Given, ...], name: str, where: str) -> ModelSpec:
    """Returns the model of Megatron-LM's arguments.

    name    its name in reports
    where   the file, for errors
    Raises ConfigError for a size that is missing, and as `read_arguments` does.
    """
    return model_of_facts(read_arguments(MODEL_TABLE, given), name, where)


def model_of_facts(facts: Facts, name: str, where: str) -> ModelSpec:
    """Returns the model of facts as the rows of `MODEL_TABLE` read them. Raises ConfigError."""
    missing = next((argument for fact, argument in _NEEDED.items() if fact not in facts), None)
    if missing:
        raise ConfigError(
            f"{where}: {missing} is not among its arguments",
            hint=f"add {missing}, or name the model: plan read FILE --model NAME",
        )
    heads, hidden = facts["num_heads"], facts["hidden_size"]
    gated: bool = facts.get("gated_ffn", False)
    biased: bool = facts.get("linear_bias", True)
    experts = facts.get("num_experts", 0)
    # arguments.py: 4 h, and of a gated network 4 h 2/3 in whole multiples of 64
    usual = hidden * 4 * 2 // 3 // 64 * 64 if gated else 4 * hidden
    kinds = _blocks_of(facts)
    dense = not experts or bool(kinds)
    return ModelSpec(
        name=name,
        num_layers=facts["num_layers"],
        hidden_size=hidden,
        num_heads=heads,
        ffn_hidden_size=facts.get("ffn_hidden_size", usual) if dense else 0,
        vocab_size=facts["vocab_size"],
        max_seq_length=facts["max_seq_length"],
        blocks=kinds,
        norm=facts.get("norm", Norm.LAYER_NORM),
        positions=facts.get("positions", Positions.LEARNED),
        linear_bias=biased,
        qkv_bias=facts.get("qkv_bias", biased),
        dropout=facts.get("dropout", 0.1),
        tied_embeddings=facts.get("tied_embeddings", True),
        gated_ffn=gated,
        **{"num_kv_heads": heads, "head_dim": hidden // heads}
        | {key: facts[key] for key in _PLAIN if key in facts}
        | _parts(facts, usual),
    )


_PLAIN = (
    "num_kv_heads",
    "head_dim",
    "vocab_multiple",
    "norm_epsilon",
    "rope_theta",
    "rotary_fraction",
    "qk_norm",
    "mtp_layers",
)


def _blocks_of(facts: Facts) -> tuple[BlockRun, ...]:
    """Returns the runs of blocks with and without experts and windows, () where all are alike."""
    layers = facts["num_layers"]
    experts = [1] * layers
    if "experts_at" in facts and facts.get("num_experts"):
        experts = _at(facts["experts_at"], layers)
    windows = [1 if "window" in facts else 0] * layers
    if "window" in facts and "full_every" in facts:
        windows = [int((layer + 1) % facts["full_every"] != 0) for layer in range(layers)]
    kinds = list(zip(experts, windows, strict=True))
    if all(kind == (1, 0) for kind in kinds):
        return ()
    return tuple(
        BlockRun(
            num_blocks=len(tuple(run)),
            experts=bool(value[0]),
            window=facts["window"] if value[1] else 0,
        )
        for value, run in groupby(kinds)
    )


def _at(pattern: tuple[Any, ...], layers: int) -> list[int]:
    """Returns 1 for each block that a pattern has: every nth from the first, or as listed."""
    if pattern[0] == "every":
        return [int(layer % pattern[1] == 0) for layer in range(layers)]
    return [int(value) for value in pattern]


def _parts(facts: Facts, usual: int) -> Facts:
    """Returns the nested parts of a model: latent attention, experts, functions.

    usual    width of a feed-forward network whose width no argument says
    """
    parts: Facts = {}
    if facts.get("is_latent"):
        latent = LatentAttention(
            q_rank=facts.get("latent.q_rank", 0),
            kv_rank=facts.get("latent.kv_rank", 512),
            nope_head_dim=facts.get("latent.nope_head_dim", 128),
            rope_head_dim=facts.get("latent.rope_head_dim", 64),
            value_head_dim=facts.get("latent.value_head_dim", 128),
        )
        heads = facts["num_heads"]
        parts |= {"latent": latent, "head_dim": latent.key_head_dim, "num_kv_heads": heads}
        parts["qk_norm"] = QkNorm.NONE  # latent attention has norms of its own
    if facts.get("num_experts"):
        width = facts.get("expert_ffn_hidden_size", facts.get("ffn_hidden_size", usual))
        parts |= {
            "num_experts": facts["num_experts"],
            "experts_per_token": facts.get("experts_per_token", 2),
            "expert_ffn_hidden_size": width,
        }
    if facts.get("shared"):
        parts["shared_experts"] = SharedExperts(
            ffn_hidden_size=facts["shared"], gated=facts.get("shared_gate", False)
        )
    names = ("activation", "router_scores", "router_factor")
    functions = {name: facts[name] for name in names if name in facts}
    return parts | {"functions": replace(PLAIN_FUNCTIONS, **functions)}


# of these fields prices know nothing
_FREE = ("name", "left_out", "functions", "max_seq_length")


def unsaid_parts(model: ModelSpec, read: ModelSpec) -> tuple[str, ...]:
    """Returns the fields of a model that its arguments do not say, as they were read back."""
    return tuple(
        field.name
        for field in fields(ModelSpec)
        if field.name not in _FREE
        and getattr(model, field.name) != getattr(read, field.name)
        and not (field.name == "blocks" and model.block_kinds == read.block_kinds)
    )
