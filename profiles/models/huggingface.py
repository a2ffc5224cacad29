"""Hugging Face `config.json` -> ModelEntry, for the families that the operator graph expresses.

A key that the file leaves out has the default of the family's configuration class in transformers.
Left out, because it changes no cost of the operator graph: the scaling of rotary positions and of
embeddings, initialisation, token ids, the choice of activation function. Attention windows shorter
than the sequence are planned as full attention: an upper bound in time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from parplan.profiles.documents.schema import parse
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.spec import ModelEntry, ModelSpec, Norm, Positions

# a training reaches longer contexts in a short last phase, not in most of its steps
MAX_DEFAULT_SEQ_LENGTH = 8192
# sequences: 4 M tokens at 8,192 a sequence, as Llama 3 starts (arXiv 2407.21783, 3.4.1)
DEFAULT_GLOBAL_BATCH_SIZE = 512

_HIDDEN = ("hidden_size", "n_embd", "d_model")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")
_EXPERT_FFN = ("moe_intermediate_size", "intermediate_size")
_NOT_EVERY_BLOCK = (
    "n_shared_experts",
    "first_k_dense_replace",
)  # keys of other families of experts
_FFN = ("intermediate_size", "n_inner", "ffn_dim")
_CONTEXT = ("max_position_embeddings", "n_positions", "n_ctx")
_EPSILON = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
_DROPOUT = (
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
    "hidden_dropout",
    "attention_dropout",
    "dropout",
    "residual_dropout",
    "embedding_dropout",
)
_GELU = ("gelu", "gelu_new", "gelu_fast", "gelu_python", "gelu_pytorch_tanh", "quick_gelu")
_SILU = ("silu", "swish")
_RELU = ("relu",)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """The architecture of a model_type, and the defaults for keys that a file may leave out.

    qkv_bias         None: the key attention_bias decides (`attention_bias` where it is absent)
    extra_positions  rows of the position table that no token of a sequence uses
    fixed            keys that would change the architecture, each with the only value that the
                     graph expresses
    dropout_key      the key whose default `dropout` is
    """

    norm: Norm
    positions: Positions
    gated_ffn: bool
    tied_embeddings: bool
    epsilon: float
    linear_bias: bool = False
    qkv_bias: bool | None = None
    attention_bias: bool = False
    parallel_residual: bool = False
    rotary_fraction: float = 1.0
    dropout: float = 0.0
    num_kv_heads: int | None = None
    rope_theta: float = 10000.0
    num_experts: int = 0
    experts_per_token: int = 0
    activations: tuple[str, ...] = _GELU
    extra_positions: int = 0
    head_dim: int | None = None
    dropout_key: str = "resid_pdrop"
    fixed: Mapping[str, object] = field(default_factory=dict)


_LLAMA = _Family(
    norm=Norm.RMS_NORM,
    positions=Positions.ROTARY,
    gated_ffn=True,
    tied_embeddings=False,
    epsilon=1e-6,
    activations=_SILU,
)
_LLAMA_WITHOUT_BIAS = replace(_LLAMA, qkv_bias=False, epsilon=1e-5)
_FAMILIES = {
    "gemma": _Family(
        norm=Norm.RMS_NORM,
        positions=Positions.ROTARY,
        gated_ffn=True,
        tied_embeddings=True,
        epsilon=1e-6,
        qkv_bias=False,
        num_kv_heads=16,
        head_dim=256,
        fixed={"attention_bias": False, "use_bidirectional_attention": False},
    ),
    "gpt2": _Family(
        norm=Norm.LAYER_NORM,
        positions=Positions.LEARNED,
        gated_ffn=False,
        tied_embeddings=True,
        epsilon=1e-5,
        linear_bias=True,
        qkv_bias=True,
        dropout=0.1,
    ),
    "gpt_neox": _Family(
        norm=Norm.LAYER_NORM,
        positions=Positions.ROTARY,
        gated_ffn=False,
        tied_embeddings=False,
        epsilon=1e-5,
        linear_bias=True,
        attention_bias=True,
        parallel_residual=True,
        rotary_fraction=0.25,
    ),
    "llama": _LLAMA,
    "mistral": _Family(
        norm=Norm.RMS_NORM,
        positions=Positions.ROTARY,
        gated_ffn=True,
        tied_embeddings=False,
        epsilon=1e-6,
        qkv_bias=False,
        num_kv_heads=8,
        activations=_SILU,
    ),
    "mixtral": _Family(
        norm=Norm.RMS_NORM,
        positions=Positions.ROTARY,
        gated_ffn=True,
        tied_embeddings=False,
        epsilon=1e-5,
        activations=_SILU,
        qkv_bias=False,
        num_kv_heads=8,
        rope_theta=1e6,
        num_experts=8,
        experts_per_token=2,
    ),
    "opt": _Family(
        norm=Norm.LAYER_NORM,
        positions=Positions.LEARNED,
        gated_ffn=False,
        tied_embeddings=True,
        epsilon=1e-5,
        linear_bias=True,
        qkv_bias=True,
        dropout=0.1,
        activations=_RELU,
        extra_positions=2,
        dropout_key="dropout",
        fixed={
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
            "layerdrop": 0.0,
        },
    ),
    "phi3": _LLAMA_WITHOUT_BIAS,
    "qwen2": _Family(
        norm=Norm.RMS_NORM,
        positions=Positions.ROTARY,
        gated_ffn=True,
        tied_embeddings=False,
        epsilon=1e-6,
        qkv_bias=True,
        activations=_SILU,
    ),
    "stablelm": _Family(
        norm=Norm.LAYER_NORM,
        positions=Positions.ROTARY,
        gated_ffn=True,
        tied_embeddings=False,
        epsilon=1e-5,
        rotary_fraction=0.25,
        activations=_SILU,
        qkv_bias=False,
        fixed={"use_qkv_bias": False, "qk_layernorm": False, "use_parallel_residual": False},
    ),
    "starcoder2": _Family(
        norm=Norm.LAYER_NORM,
        positions=Positions.ROTARY,
        gated_ffn=False,
        tied_embeddings=True,
        epsilon=1e-5,
        linear_bias=True,
        qkv_bias=True,
        num_kv_heads=2,
        fixed={"use_bias": True},
    ),
}


def is_described_family(config: Mapping[str, Any]) -> bool:
    """Returns True if the operator graph expresses the family that the configuration names.

    A configuration without a family counts as a broken file of such a family.
    """
    model_type = config.get("model_type")
    return not isinstance(model_type, str) or model_type in _FAMILIES


def entry_from_config(config: Mapping[str, Any], where: str) -> ModelEntry:
    """Returns the model of a Hugging Face configuration.

    Its sequences have the length of the context, at most 8,192 tokens, and its batches have 512 of
    them.
    Raises ConfigError with `where`: an unknown model_type, a missing or wrong key, an architecture
    that the graph cannot express.
    """
    reader = _Reader(config, where)
    family = _family(reader)
    spec = _spec(reader, family)
    return ModelEntry(
        spec=spec,
        global_batch_size=DEFAULT_GLOBAL_BATCH_SIZE,
        seq_length=min(spec.max_seq_length - family.extra_positions, MAX_DEFAULT_SEQ_LENGTH),
        source=(
            f"Hugging Face configuration of a {config['model_type']} model; batch and "
            "sequence length are this reader's defaults"
        ),
    )


class _Reader:
    """Typed access to the keys of one file under any of their names; a null counts as absent."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def find(self, names: tuple[str, ...]) -> tuple[str, Any]:
        """Returns the first of `names` with a value, and the value; else the first and None."""
        return next(
            ((name, self.values[name]) for name in names if self.values.get(name) is not None),
            (names[0], None),
        )

    def integer(self, names: tuple[str, ...], default: int | None = None) -> int:
        name, value = self.find(names)
        if value is None and default is not None:
            return default
        if value is None:
            aliases = f" (or {', '.join(names[1:])})" if names[1:] else ""
            raise ConfigError(f"{self.where}: {name} is missing{aliases}", hint=f"add {name}")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(name, value, "a positive integer")
        return value

    def number(self, names: tuple[str, ...], default: float) -> float:
        name, value = self.find(names)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.wrong(name, value, "a number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.find((name,))[1]
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def rotary(self) -> _Reader:
        """Returns a reader of the rotary settings.

        They are at the top level, or inside `rope_parameters` as newer versions of transformers
        write them.
        """
        name, inner = self.find(("rope_parameters",))
        if inner is None:
            return self
        if not isinstance(inner, Mapping):
            raise self.wrong(name, inner, "a mapping")
        return _Reader({**self.values, **inner}, f"{self.where}: {name}")

    def wrong(self, name: str, value: object, needed: str) -> ConfigError:
        return ConfigError(
            f"{self.where}: {name} is {value!r}, it must be {needed}", hint=f"correct {name}"
        )


def _family(reader: _Reader) -> _Family:
    model_type = reader.find(("model_type",))[1]
    supported = ", ".join(sorted(_FAMILIES))
    if model_type is None:
        raise ConfigError(
            f"{reader.where}: model_type is missing (supported: {supported})",
            hint="give a Hugging Face config.json",
        )
    if not isinstance(model_type, str):
        raise reader.wrong("model_type", model_type, "a name")
    if model_type not in _FAMILIES:
        raise ConfigError(
            f"{reader.where}: model_type is {model_type!r}, supported are {supported}",
            hint="describe the model in a YAML file, as those in configs/models",
        )
    return _FAMILIES[model_type]


def _spec(reader: _Reader, family: _Family) -> ModelSpec:
    hidden, heads = reader.integer(_HIDDEN), reader.integer(_HEADS)
    qkv_bias, linear_bias = _biases(reader, family)
    _check_activation(reader, family)
    _check_fixed(reader, family, hidden)
    rotary = reader.rotary()
    fields = {
        "name": _name(reader),
        "num_layers": reader.integer(_LAYERS),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": reader.integer(("num_key_value_heads",), family.num_kv_heads or heads),
        "head_dim": _head_dim(reader, hidden, heads, family.head_dim),
        **_feed_forward(reader, family, hidden),
        "vocab_size": reader.integer(("vocab_size",)),
        "max_seq_length": reader.integer(_CONTEXT) + family.extra_positions,
        "norm": family.norm,
        "positions": family.positions,
        "gated_ffn": family.gated_ffn,
        "linear_bias": linear_bias,
        "qkv_bias": qkv_bias,
        "dropout": max(
            reader.number((name,), family.dropout if name == family.dropout_key else 0.0)
            for name in _DROPOUT
        ),
        "tied_embeddings": reader.flag("tie_word_embeddings", family.tied_embeddings),
        "parallel_residual": reader.flag("use_parallel_residual", family.parallel_residual),
        "rope_theta": rotary.number(("rope_theta", "rotary_emb_base"), family.rope_theta),
        "rotary_fraction": rotary.number(
            ("partial_rotary_factor", "rotary_pct"), family.rotary_fraction
        ),
        "norm_epsilon": reader.number(_EPSILON, family.epsilon),
    }
    return parse(ModelSpec, fields, reader.where)


def _feed_forward(reader: _Reader, family: _Family, hidden: int) -> dict[str, int]:
    """Returns the width of the feed-forward network, or number and width of the experts."""
    if not family.num_experts:
        return {"ffn_hidden_size": reader.integer(_FFN, None if family.gated_ffn else 4 * hidden)}
    for name in _NOT_EVERY_BLOCK:
        if reader.find((name,))[1]:
            raise reader.wrong(
                name,
                reader.values[name],
                "0: shared experts and dense blocks among those of experts are not supported",
            )
    return {
        "num_experts": reader.integer(_EXPERTS, family.num_experts),
        "experts_per_token": reader.integer(("num_experts_per_tok",), family.experts_per_token),
        "expert_ffn_hidden_size": reader.integer(_EXPERT_FFN),
    }


def _head_dim(reader: _Reader, hidden: int, heads: int, default: int | None) -> int:
    if reader.find(("head_dim",))[1] is None and default is None and hidden % heads:
        raise ConfigError(
            f"{reader.where}: hidden size {hidden} is not a multiple of the {heads} heads",
            hint="add head_dim",
        )
    return reader.integer(("head_dim",), default or hidden // heads)


def _biases(reader: _Reader, family: _Family) -> tuple[bool, bool]:
    """Returns if the qkv product has a bias, and if the other three linear layers of a block do.

    attention_bias covers qkv and the attention output, so it must agree with the bias of the
    feed-forward layers.
    """
    linear = reader.flag("mlp_bias", family.linear_bias)
    if family.qkv_bias is not None:
        return family.qkv_bias, linear
    attention = reader.flag("attention_bias", family.attention_bias)
    if attention != linear:
        raise ConfigError(
            f"{reader.where}: attention_bias is {attention} and the feed-forward bias is {linear}: "
            "the operator graph has one flag for the attention output and the feed-forward layers",
            hint="set attention_bias and mlp_bias alike",
        )
    return attention, linear


def _check_activation(reader: _Reader, family: _Family) -> None:
    name, activation = reader.find(("hidden_act", "activation_function"))
    if activation is not None and activation not in family.activations:
        raise reader.wrong(
            name, activation, f"one of {', '.join(family.activations)} in this family"
        )


def _check_fixed(reader: _Reader, family: _Family, hidden: int) -> None:
    """Raises ConfigError for a variant of the family that the operator graph does not have."""
    for name, needed in {**family.fixed, "word_embed_proj_dim": hidden}.items():
        value = reader.find((name,))[1]
        if value is not None and value != needed:
            raise reader.wrong(
                name, value, f"{needed}, the only one that the operator graph expresses"
            )


def _name(reader: _Reader) -> str:
    """Returns the published name of the model, else its folder's name, else its family."""
    published = str(reader.find(("_name_or_path",))[1] or "")
    return (
        PurePath(published).name
        or PurePath(reader.where).parent.name
        or str(reader.values["model_type"])
    )
