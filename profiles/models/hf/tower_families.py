"""The tower and the projector of a model from its configuration, by the family of the wrapper.

The number of patches of an image is the published one: that of the image size of the file, or for
Qwen2-VL, which takes images of any size, the largest that its model card recommends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from parplan.profiles.models.blocks import BlockRun
from parplan.profiles.models.hf.config_families import GELU, SILU
from parplan.profiles.models.hf.config_functions import ACTIVATIONS
from parplan.profiles.models.hf.config_reader import ConfigReader
from parplan.profiles.models.hf.parts import runs_of
from parplan.profiles.models.towers import CONVOLVED, Projection, Tower, TowerFunctions

# an image of 1,280 tokens in the language model (Qwen/Qwen2-VL-7B-Instruct, "Image Resolution")
_QWEN_IMAGE_TOKENS = 1280
Fields = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerFamily:
    """The tower of a family of models.

    fields       reads the fields of the tower from its own keys and those around it, for a
                 language model of some width
    activations  the activation functions that it may have
    defaults     values of its keys that the file may leave out
    fixed        keys that would change the architecture, each with the only value that it has here
    epsilon      of the norms, where the file does not say it
    epsilon_key  the key that says it, if there is one
    columns_between   the frequencies of columns of patches lie between those of rows
    """

    fields: Callable[[ConfigReader, ConfigReader, int], Fields]
    activations: tuple[str, ...] = GELU
    defaults: Mapping[str, object] = field(default_factory=dict)
    fixed: Mapping[str, object] = field(default_factory=dict)
    epsilon: float = 1e-6
    epsilon_key: str = ""
    columns_between: bool = False


def tower_of(family: TowerFamily, vision: ConfigReader, around: ConfigReader, hidden: int) -> Tower:
    """Returns the tower of a configuration, whose keys it marks as read. Raises ConfigError."""
    activation = vision.find(("hidden_act",))[1]
    if activation not in family.activations:
        needed = f"one of {', '.join(family.activations)} in this family"
        raise vision.wrong("hidden_act", activation, needed)
    for name, needed_value in family.fixed.items():
        value = vision.find((name,))[1]
        if value is not None and value != needed_value:
            raise vision.wrong(name, value, f"{needed_value}, the only one that is expressed")
    layer = around.integer(("vision_feature_layer",), -1, least=-1)
    if layer != -1:
        raise around.wrong("vision_feature_layer", layer, "-1: the projector reads the last layer")
    for name in ("attention_dropout", "projector_dropout"):
        if vision.number((name,), 0.0):
            raise vision.wrong(name, vision.find((name,))[1], "0: a tower drops nothing out")
    return Tower(
        num_layers=vision.integer(("num_hidden_layers", "depth")),
        num_heads=vision.integer(("num_attention_heads", "num_heads")),
        functions=_functions(family, vision, around, str(activation)),
        **family.fields(vision, around, hidden),
    )


def _functions(
    family: TowerFamily, vision: ConfigReader, around: ConfigReader, activation: str
) -> TowerFunctions:
    """Returns the functions of a tower, whose keys it marks as read."""
    key, behind = family.epsilon_key, around.find(("projector_hidden_act",))[1]
    _, rotary = vision.find(("rope_parameters",))
    nested = rotary.get("rope_theta") if isinstance(rotary, dict) else None
    theta = vision.number(("rope_theta",), 10000.0)
    return TowerFunctions(
        activation=ACTIVATIONS[activation],
        projector_activation=ACTIVATIONS[behind or "gelu"],
        norm_epsilon=vision.number((key,), family.epsilon) if key else family.epsilon,
        rope_theta=theta if nested is None else float(nested),
        columns_between=family.columns_between,
    )


def _qwen2_vl(vision: ConfigReader, _: ConfigReader, hidden: int) -> Fields:
    width = vision.integer(("embed_dim",))
    return {
        **_qwen(vision, width, _out(vision, "hidden_size", hidden)),
        "ffn_hidden_size": width * vision.integer(("mlp_ratio",)),
        "projector_norm": True,
    }


def _qwen2_5_vl(vision: ConfigReader, _: ConfigReader, hidden: int) -> Fields:
    width = vision.integer(("hidden_size",))
    full = vision.items(("fullatt_block_indexes",)) or ()
    side = vision.integer(("window_size",)) // vision.integer(("patch_size",))
    num_layers = vision.integer(("depth",))
    kinds = [BlockRun(window=0 if n in full else side * side) for n in range(num_layers)]
    return {
        **_qwen(vision, width, _out(vision, "out_hidden_size", hidden)),
        "ffn_hidden_size": vision.integer(("intermediate_size",)),
        "rms_norm": True,
        "gated_ffn": True,
        "blocks": runs_of(kinds),
        "projector_rms_norm": True,
    }


def _qwen(vision: ConfigReader, width: int, hidden: int) -> Fields:
    patch, merge = vision.integer(("patch_size",)), vision.integer(("spatial_merge_size",))
    frames = vision.integer(("temporal_patch_size",))
    channels = vision.integer(("in_chans", "in_channels"))
    merged = merge * merge
    return {
        "hidden_size": width,
        "patches": _QWEN_IMAGE_TOKENS * merged,
        "patch_features": channels * frames * patch * patch,
        "rotary": True,
        "merged": merged,
        "projector": (
            Projection(width=width * merged, bias=True, activated=True),
            Projection(width=hidden, bias=True),
        ),
    }


def _gemma3(vision: ConfigReader, around: ConfigReader, hidden: int) -> Fields:
    patches = _patches(vision)
    tokens = around.integer(("mm_tokens_per_image",), 256)
    if patches % tokens:
        raise around.wrong("mm_tokens_per_image", tokens, f"a divisor of the {patches} patches")
    return {
        **_plain(vision),
        "patches": patches,
        "patch_bias": True,
        "fixed_patches": True,
        "position_table": True,
        "norm_last": True,
        "merged": patches // tokens,
        "pooled": True,
        "projector_rms_norm": True,
        "projector": (Projection(width=hidden),),
    }


def _llama4(vision: ConfigReader, _: ConfigReader, hidden: int) -> Fields:
    ratio = vision.number(("pixel_shuffle_ratio",), 0.5)
    merged = round(1 / ratio**2)
    plain = _plain(vision)
    joined, shuffled = plain["hidden_size"] * merged, plain["ffn_hidden_size"]
    if joined != shuffled:
        raise vision.wrong("intermediate_size", shuffled, f"{joined}, the width of joined patches")
    width = vision.integer(("projector_output_dim",))
    for name in ("projector_input_dim", "vision_output_dim"):
        if vision.integer((name,)) != width:
            raise vision.wrong(name, vision.find((name,))[1], f"projector_output_dim, {width}")
    return {
        **plain,
        "patches": _patches(vision),
        "fixed_patches": True,
        "class_token": True,
        "position_table": True,
        "norm_first": True,
        "norm_last": True,
        "rotary": True,
        "merged": merged,
        "projector": (
            Projection(width=width, activated=True),
            Projection(width=width, activated=True),
            Projection(width=hidden),
        ),
    }


def _mistral3(vision: ConfigReader, around: ConfigReader, hidden: int) -> Fields:
    merge = around.integer(("spatial_merge_size",), 2)
    bias = around.flag("multimodal_projector_bias", False)
    plain = _plain(vision)
    head_dim = vision.integer(("head_dim",), 0, least=0)
    if head_dim and head_dim * vision.integer(("num_attention_heads",)) != plain["hidden_size"]:
        raise vision.wrong("head_dim", head_dim, "hidden_size over num_attention_heads")
    return {
        **plain,
        "patches": _patches(vision),
        "norm_first": True,
        "rms_norm": True,
        "gated_ffn": True,
        "linear_bias": False,
        "qkv_bias": False,
        "rotary": True,
        "merged": merge * merge,
        "projector_rms_norm": True,
        "projector": (
            Projection(width=plain["hidden_size"]),
            Projection(width=hidden, bias=bias, activated=True),
            Projection(width=hidden, bias=bias),
        ),
    }


def _whisper(sound: ConfigReader, _: ConfigReader, hidden: int) -> Fields:
    return {
        "name": "audio",
        "attended": True,
        "hidden_size": _out(sound, "hidden_size", hidden),
        "ffn_hidden_size": sound.integer(("intermediate_size",)),
        "patches": sound.integer(("max_source_positions",)),
        "fixed_patches": True,
        "patch_features": CONVOLVED * hidden,
        "frame_features": sound.integer(("num_mel_bins",)),
        "patch_bias": True,
        "position_table": True,
        "fixed_positions": True,
        "key_bias": False,
        "norm_last": True,
    }


def _plain(vision: ConfigReader) -> Fields:
    patch, channels = vision.integer(("patch_size",)), vision.integer(("num_channels",))
    return {
        "hidden_size": vision.integer(("hidden_size",)),
        "ffn_hidden_size": vision.integer(("intermediate_size",)),
        "patch_features": channels * patch * patch,
    }


def _patches(vision: ConfigReader) -> int:
    return (vision.integer(("image_size",)) // vision.integer(("patch_size",))) ** 2


def _out(vision: ConfigReader, name: str, hidden: int) -> int:
    """Returns the width that the projector ends in. Raises ConfigError if it is another."""
    width = vision.integer((name,))
    if width != hidden:
        raise vision.wrong(name, width, f"{hidden}, the width of the language model")
    return width


_SQUARE = {"num_channels": 3, "hidden_act": "gelu"}
_QWEN = {
    "depth": 32,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "hidden_size": 3584,
}
# by the model_type of the configuration around that of the text
TOWERS: Mapping[str, TowerFamily] = {
    "gemma3": TowerFamily(
        fields=_gemma3,
        defaults={
            **_SQUARE,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "image_size": 224,
            "patch_size": 16,
            "vision_use_head": True,
        },
        fixed={"model_type": "siglip_vision_model", "vision_use_head": False},
        epsilon_key="layer_norm_eps",
    ),
    "llama4": TowerFamily(
        fields=_llama4,
        defaults={
            **_SQUARE,
            "hidden_size": 768,
            "intermediate_size": 5632,
            "num_hidden_layers": 34,
            "num_attention_heads": 16,
            "image_size": 448,
            "patch_size": 14,
            "vision_output_dim": 7680,
            "projector_input_dim": 4096,
            "projector_output_dim": 4096,
        },
        fixed={"model_type": "llama4_vision_model", "multi_modal_projector_bias": False},
        epsilon=1e-5,  # torch.nn.LayerNorm's, which transformers' module leaves as it is
    ),
    "mistral3": TowerFamily(
        fields=_mistral3,
        activations=(*GELU, *SILU),
        defaults={
            **_SQUARE,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "image_size": 1540,
            "patch_size": 14,
        },
        fixed={"model_type": "pixtral"},
        epsilon=1e-5,  # PixtralRMSNorm
        columns_between=True,
    ),
    "qwen2_5_vl": TowerFamily(
        fields=_qwen2_5_vl,
        activations=SILU,
        defaults={
            **_QWEN,
            "hidden_act": "silu",
            "intermediate_size": 3420,
            "window_size": 112,
            "out_hidden_size": 3584,
            "fullatt_block_indexes": (7, 15, 23, 31),
        },
    ),
    "qwen2_vl": TowerFamily(
        fields=_qwen2_vl,
        defaults={**_QWEN, "hidden_act": "quick_gelu", "embed_dim": 1280, "mlp_ratio": 4},
    ),
    "whisper": TowerFamily(
        fields=_whisper,
        epsilon=1e-5,  # torch.nn.LayerNorm's
        defaults={
            "hidden_act": "gelu",
            "num_hidden_layers": 4,
            "num_attention_heads": 6,
            "intermediate_size": 1536,
            "hidden_size": 384,
            "max_source_positions": 1500,
            "num_mel_bins": 80,
        },
    ),
}
