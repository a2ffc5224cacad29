"""Hugging Face `config.json` -> ModelEntry, for the families that the operator graph expresses.

A key that the file leaves out has the default of the family's configuration class in transformers.
Keys that change no cost of the operator graph are listed in `profiles/models/hf/without_cost.py`;
any other key that the family does not read is an error that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from parplan.profiles.documents.ranges import LAYERS
from parplan.profiles.documents.schema import document, parse
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.blocks import QkNorm
from parplan.profiles.models.hf.config_families import ALIASES, FAMILIES, WRAPPERS, Family
from parplan.profiles.models.hf.config_functions import functions_of
from parplan.profiles.models.hf.config_reader import ConfigReader
from parplan.profiles.models.hf.granite_hybrid import granite_hybrid_fields, granite_positions
from parplan.profiles.models.hf.not_described import NOT_DESCRIBED, require_described
from parplan.profiles.models.hf.parts import (
    block_fields,
    falcon_fields,
    feed_forward_fields,
    hybrid_fields,
    latent_fields,
    minimax_fields,
)
from parplan.profiles.models.hf.tower_families import TOWERS, tower_of
from parplan.profiles.models.hf.whisper import WHISPER, decoder_keys, encoder_keys
from parplan.profiles.models.hf.without_cost import (
    TOWER_WITHOUT_COST,
    WITHOUT_COST,
    WRAPPER_WITHOUT_COST,
)
from parplan.profiles.models.spec import ModelEntry, ModelSpec
from parplan.profiles.models.towers import Tower

# a training reaches longer contexts in a short last phase, not in most of its steps
MAX_DEFAULT_SEQ_LENGTH = 8192
# sequences: 4 M tokens at 8,192 a sequence, as Llama 3 starts (arXiv 2407.21783, 3.4.1)
DEFAULT_GLOBAL_BATCH_SIZE = 512

_HIDDEN = ("hidden_size", "n_embd", "d_model")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_CONTEXT = ("max_position_embeddings", "n_positions", "n_ctx")
_EPSILON = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
_ACTIVATION = (
    "hidden_act",
    "hidden_activation",
    "activation_function",
    "activation",
    "mlp_hidden_act",
)
_DROPOUT = (
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
    "hidden_dropout",
    "attention_dropout",
    "dropout",
    "residual_dropout",
    "embedding_dropout",
    "activation_dropout",
)


def is_described_family(config: Mapping[str, Any]) -> bool:
    """Returns True if the operator graph expresses the family that the configuration names.

    A configuration without a family counts as a broken file of such a family, and so does one of a
    family that is known to have other blocks: both have an error that names the key.
    """
    model_type = config.get("model_type")
    known = (*_supported(), *NOT_DESCRIBED)
    return not isinstance(model_type, str) or model_type in known


def entry_from_config(config: Mapping[str, Any], where: str) -> ModelEntry:
    """Returns the model of a Hugging Face configuration.

    Its sequences have the length of the context, at most 8,192 tokens, and its batches have 512 of
    them.
    Raises ConfigError with `where`: an unknown model_type, a missing or wrong key, a key that is
    not understood, an architecture that the graph cannot express.
    """
    require_described(config, where)
    model_type = _model_type(config, where)
    text = _text(config, where, model_type)
    name = _name(config, where)
    family_name = WRAPPERS.get(model_type, ALIASES.get(model_type, model_type))
    family = FAMILIES[family_name]
    reader = ConfigReader(text, where, defaults=family.defaults)
    fields = _fields(reader, family, family_name) | {"name": name}
    _require_understood(reader, WITHOUT_COST, family_name)
    if model_type in TOWERS:
        fields["tower"] = _tower(config, where, model_type, fields["hidden_size"])
    spec = parse(ModelSpec, document(fields), where)
    return ModelEntry(
        spec=spec,
        global_batch_size=DEFAULT_GLOBAL_BATCH_SIZE,
        seq_length=min(spec.max_seq_length - family.extra_positions, MAX_DEFAULT_SEQ_LENGTH),
        source=(
            f"Hugging Face configuration of a {model_type} model; batch and "
            "sequence length are this reader's defaults"
        ),
    )


def _supported() -> tuple[str, ...]:
    return tuple(sorted((*FAMILIES, *ALIASES, *WRAPPERS)))


def _model_type(config: Mapping[str, Any], where: str) -> str:
    model_type, supported = config.get("model_type"), ", ".join(_supported())
    if model_type is None:
        raise ConfigError(
            f"{where}: model_type is missing (supported: {supported})",
            hint="give a Hugging Face config.json",
        )
    if not isinstance(model_type, str):
        raise ConfigError(
            f"{where}: model_type is {model_type!r}, it must be a name", hint="correct model_type"
        )
    if model_type not in _supported():
        raise ConfigError(
            f"{where}: model_type is {model_type!r}, supported are {supported}",
            hint="describe the model in a YAML file, as those in configs/models",
        )
    return model_type


def _text(config: Mapping[str, Any], where: str, model_type: str) -> Mapping[str, Any]:
    """Returns the configuration of the text model."""
    if model_type == WHISPER:
        return decoder_keys(config)
    if model_type not in WRAPPERS:
        return config
    around = ConfigReader(config, where)
    _, text = around.find(("text_config",))
    if text is None:
        inner = WRAPPER_WITHOUT_COST | {"vision_config"}
        return {key: value for key, value in config.items() if key not in inner}
    if not isinstance(text, Mapping):
        raise around.wrong("text_config", text, "a mapping")
    _, tied = around.find(("tie_word_embeddings",))
    return {"tie_word_embeddings": tied, **text}


def _tower(config: Mapping[str, Any], where: str, model_type: str, hidden: int) -> Tower:
    """Returns the tower beside the text model, whose keys and those around both it requires."""
    around = ConfigReader(config, where)
    _, text = around.find(("text_config",))
    _, keys = around.find(("vision_config",))
    if not isinstance(keys or {}, Mapping):
        raise around.wrong("vision_config", keys, "a mapping")
    family, inside = TOWERS[model_type], f"{where}: vision_config"
    if model_type == WHISPER:
        keys, inside = encoder_keys(config), where
    vision = ConfigReader(keys or {}, inside, defaults=family.defaults)
    tower = tower_of(family, vision, around, hidden)
    _require_understood(vision, TOWER_WITHOUT_COST, model_type)
    if text is not None:
        around.find(("tie_word_embeddings",))
        _require_understood(around, WRAPPER_WITHOUT_COST, model_type)
    return tower


def _require_understood(
    reader: ConfigReader, without_cost: frozenset[str], family_name: str
) -> None:
    """Raises ConfigError for the first key of the file that the family does not read."""
    unknown = [key for key in reader.unread() if key not in without_cost]
    if unknown:
        others = f" (and {', '.join(unknown[1:])})" if unknown[1:] else ""
        raise ConfigError(
            f"{reader.where}: {unknown[0]} is not understood in the family {family_name}{others}",
            hint="leave it out if it changes nothing that a step computes; "
            "--trace plans the module itself",
        )


def _fields(reader: ConfigReader, family: Family, family_name: str) -> dict[str, Any]:
    hidden, heads = reader.integer(_HIDDEN), reader.integer(_HEADS)
    activation = _activation(reader, family)
    _check_fixed(reader, family, hidden)
    rotary = reader.rotary()
    fields = {
        "hidden_size": hidden,
        "num_heads": heads,
        **_layers(reader, family, family_name),
        **_attention(reader, family, family_name, hidden, heads),
        "vocab_size": reader.integer(("vocab_size",)),
        "max_seq_length": reader.integer(_CONTEXT) + family.extra_positions,
        "norm": family.norm,
        "positions": family.positions,
        "gated_ffn": family.gated_ffn,
        "norm_layout": family.norm_layout,
        "dropout": max(
            reader.number((name,), family.dropout if name == family.dropout_key else 0.0)
            for name in _DROPOUT
        ),
        "tied_embeddings": reader.flag("tie_word_embeddings", family.tied_embeddings),
        "parallel_residual": reader.flag("use_parallel_residual", family.parallel_residual),
        "rope_theta": rotary.number(("rope_theta", "rotary_emb_base"), 10000.0),
        "rotary_fraction": rotary.number(
            ("partial_rotary_factor", "rotary_pct"), family.rotary_fraction
        ),
        "norm_epsilon": reader.number(_EPSILON, family.epsilon),
        "logit_soft_cap": reader.number(("final_logit_softcapping",), 0.0),
        "attention_soft_cap": reader.number(("attn_logit_softcapping",), 0.0),
        "mtp_layers": reader.integer(("num_nextn_predict_layers",), 0, least=0),
    }
    widths = feed_forward_fields(reader, family, hidden)
    own = _own_fields(reader, family_name, fields)
    functions = functions_of(
        reader,
        family_name,
        activation,
        gated=family.gated_ffn,
        head_dim=fields["head_dim"],
    )
    return {**widths, **fields, **own, "functions": functions}


def _own_fields(reader: ConfigReader, family_name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields that a family has in place of those of all families."""
    if family_name == "falcon":
        return falcon_fields(reader, fields["num_heads"])
    if family_name == "minimax_m2":
        return minimax_fields(reader, fields["head_dim"])
    if family_name == "granitemoehybrid":
        return {"positions": granite_positions(reader)}
    if family_name == "hunyuan_v1_moe":
        _require_one_width(reader)
    return {}


def _require_one_width(reader: ConfigReader) -> None:
    """Raises ConfigError where a Hunyuan names two widths of experts, of which one is used."""
    experts, dense = (
        reader.integer((name,), 0) for name in ("moe_intermediate_size", "intermediate_size")
    )
    if experts and dense and experts != dense:
        needed = f"the intermediate_size {dense}, the width of the shared expert"
        raise reader.wrong("moe_intermediate_size", experts, needed)


def _layers(reader: ConfigReader, family: Family, family_name: str) -> dict[str, Any]:
    """Returns the number of blocks, and the runs of unlike ones."""
    if family_name == "nemotron_h":
        reader.find(_LAYERS)
        return hybrid_fields(reader)
    if family_name == "granitemoehybrid":
        return granite_hybrid_fields(reader, reader.integer(_LAYERS), reader.integer(_HIDDEN))
    num_layers = reader.integer(_LAYERS)
    if num_layers not in LAYERS:  # before a list of them is made
        raise reader.wrong("num_hidden_layers", num_layers, str(LAYERS))
    return {"num_layers": num_layers, **block_fields(reader, family, num_layers)}


def _attention(
    reader: ConfigReader, family: Family, family_name: str, hidden: int, heads: int
) -> dict[str, Any]:
    fields: dict[str, Any] = dict(_biases(reader, family))
    norms = family.qk_norm_key is None or reader.flag(*family.qk_norm_key)
    fields |= {"qk_norm": family.qk_norm if norms else QkNorm.NONE, "sinks": family.sinks}
    if family.latent:
        return fields | latent_fields(reader, heads)
    head_dim = ("head_dim", "attention_head_dim")
    if reader.find(head_dim)[1] is None and hidden % heads:
        raise ConfigError(
            f"{reader.where}: hidden size {hidden} is not a multiple of the {heads} heads",
            hint="add head_dim",
        )
    return fields | {
        "num_kv_heads": reader.integer(("num_key_value_heads", "num_kv_heads"), heads),
        "head_dim": reader.integer(head_dim, hidden // heads),
    }


def _biases(reader: ConfigReader, family: Family) -> dict[str, bool | None]:
    """Returns if the products of a block have a bias: queries and keys, output, feed-forward."""
    linear = reader.flag("mlp_bias", family.linear_bias)
    qkv = family.qkv_bias
    if qkv is None:
        qkv = reader.flag(family.bias_key, family.attention_bias)
    output = qkv if family.output_bias is None else family.output_bias
    return {
        "key_bias": family.key_bias,
        "qkv_bias": qkv,
        "linear_bias": linear,
        "output_bias": None if output == linear else output,
    }


def _activation(reader: ConfigReader, family: Family) -> str | None:
    """Returns the name of the activation in the file. Raises ConfigError for an unknown one."""
    found = None
    for name in _ACTIVATION:
        activation = reader.find((name,))[1]
        if activation is not None and activation not in family.activations:
            raise reader.wrong(
                name, activation, f"one of {', '.join(family.activations)} in this family"
            )
        found = found or activation
    return found


def _check_fixed(reader: ConfigReader, family: Family, hidden: int) -> None:
    """Raises ConfigError for a variant of the family that the operator graph does not have."""
    for name, needed in {**family.fixed, "word_embed_proj_dim": hidden}.items():
        value = reader.find((name,))[1]
        items = value if isinstance(value, list) else [value]  # a list has one for each block
        if value is not None and any(item != needed for item in items):
            raise reader.wrong(
                name, value, f"{needed}, the only one that the operator graph expresses"
            )


def _name(config: Mapping[str, Any], where: str) -> str:
    """Returns the published name of the model, else its folder's name, else its family."""
    published = str(config.get("_name_or_path") or "")
    return PurePath(published).name or PurePath(where).parent.name or str(config["model_type"])
