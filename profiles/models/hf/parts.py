"""The parts of a block from a configuration: experts, windows, latent attention, state space."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Any

from parplan.profiles.errors import ConfigError
from parplan.profiles.models.blocks import (
    BlockRun,
    DeltaRule,
    LatentAttention,
    Mixer,
    SharedExperts,
    StateSpace,
)
from parplan.profiles.models.hf.config_families import (
    DenseBlocks,
    ExpertKeys,
    Family,
    Shared,
    Windows,
)
from parplan.profiles.models.hf.config_reader import ConfigReader

Fields = dict[str, Any]
_FFN = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
_SHARED_NUMBER = ("n_shared_experts", "moe_num_shared_experts", "num_shared_expert")
_SHARED_WIDTH = ("shared_intermediate_size",)
_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_HYBRID = {
    "linear_attention": BlockRun(mixer=Mixer.STATE_SPACE, feed_forward=False),
    "mamba": BlockRun(mixer=Mixer.STATE_SPACE, feed_forward=False),
    "full_attention": BlockRun(feed_forward=False),
    "attention": BlockRun(feed_forward=False),
    "mlp": BlockRun(mixer=Mixer.NONE),
    "moe": BlockRun(mixer=Mixer.NONE),
}


def feed_forward_fields(reader: ConfigReader, family: Family, hidden: int) -> Fields:
    """Returns the width of the feed-forward network, or number and width of the experts."""
    experts = family.experts
    if experts is None:
        default = None if family.gated_ffn else 4 * hidden
        return {"ffn_hidden_size": reader.integer(_FFN, default)}
    width = reader.integer(experts.width)
    number = reader.agreed(experts.number, least=0 if experts.shared is Shared.WIDTH else 1)
    if not number:
        reader.find(experts.per_token)
        return {"ffn_hidden_size": reader.integer(_SHARED_WIDTH)}
    dense = reader.find(experts.dense_width)[1] if experts.dense is not DenseBlocks.NONE else None
    return {
        "num_experts": number,
        "experts_per_token": reader.agreed(experts.per_token),
        "expert_ffn_hidden_size": width,
        "ffn_hidden_size": dense or 0,
        "shared_experts": _shared(reader, experts, width),
        "expert_bias": experts.bias,
        "router_bias": experts.router_bias,
    }


def _shared(reader: ConfigReader, experts: ExpertKeys, width: int) -> SharedExperts | None:
    if experts.shared is Shared.COUNTED:
        width *= reader.integer(_SHARED_NUMBER, 0, least=0)
    if experts.shared is Shared.WIDTH:
        width = reader.integer(_SHARED_WIDTH, 0, least=0)
    if experts.shared is Shared.GATED:
        width = reader.integer(("shared_expert_intermediate_size",), 0, least=0)
    if experts.shared is Shared.NONE or not width:
        return None
    return SharedExperts(ffn_hidden_size=width, gated=experts.shared is Shared.GATED)


def block_fields(reader: ConfigReader, family: Family, num_layers: int) -> Fields:
    """Returns the runs of unlike blocks, and the width of dense blocks where there are any."""
    experts = _with_experts(reader, family, num_layers)
    dense_width = {"ffn_hidden_size": 0} if family.experts is not None and all(experts) else {}
    if "linear_key_head_dim" in family.defaults:
        return delta_rule_fields(reader, experts) | dense_width
    rotary = _rotary(reader, family, num_layers)
    reach = _reach(reader, family, rotary)
    kinds = [
        BlockRun(window=window, chunk=chunk, rotary=turned, experts=routed)
        for (window, chunk), turned, routed in zip(reach, rotary, experts, strict=True)
    ]
    return {"blocks": runs_of(kinds)} | dense_width


def delta_rule_fields(reader: ConfigReader, experts: list[bool]) -> Fields:
    """Returns the blocks of a Qwen3-Next, of attention in turns, and the shape of the others."""
    interval = reader.integer(("full_attention_interval",))
    names = reader.items(("layer_types",)) or tuple(
        "linear_attention" if (place + 1) % interval else "full_attention"
        for place in range(len(experts))
    )
    mixers = {"linear_attention": Mixer.DELTA_RULE, "full_attention": Mixer.ATTENTION}
    for name in names:
        if name not in mixers:
            raise reader.wrong("layer_types", name, f"made of {', '.join(mixers)}")
    each = _one_each(reader, "layer_types", names, len(experts))
    kinds = [
        BlockRun(mixer=mixers[name], experts=routed)
        for name, routed in zip(each, experts, strict=True)
    ]
    return {
        "blocks": runs_of(kinds),
        "attention_gate": True,
        "delta_rule": DeltaRule(
            key_heads=reader.integer(("linear_num_key_heads",)),
            key_head_dim=reader.integer(("linear_key_head_dim",)),
            value_heads=reader.integer(("linear_num_value_heads",)),
            value_head_dim=reader.integer(("linear_value_head_dim",)),
            conv_kernel=reader.integer(("linear_conv_kernel_dim",)),
        ),
    }


def runs_of(kinds: list[BlockRun]) -> tuple[BlockRun, ...]:
    """Returns the shortest runs that repeat to these kinds, none where all are plain."""
    if all(kind == BlockRun() for kind in kinds):
        return ()
    period = next(
        n
        for n in range(1, len(kinds) + 1)
        if all(kind == kinds[place % n] for place, kind in enumerate(kinds))
    )
    return tuple(
        replace(kind, num_blocks=len(list(alike))) for kind, alike in groupby(kinds[:period])
    )


def _rotary(reader: ConfigReader, family: Family, num_layers: int) -> list[bool]:
    """Returns whether each block's queries and keys have positions."""
    if not family.unrotated:
        return [True] * num_layers
    interval = reader.integer(("no_rope_layer_interval",))
    given = reader.items(("no_rope_layers",))
    if given is None:
        return [(place + 1) % interval != 0 for place in range(num_layers)]
    return [bool(each) for each in _one_each(reader, "no_rope_layers", given, num_layers)]


def _reach(reader: ConfigReader, family: Family, rotary: list[bool]) -> list[tuple[int, int]]:
    """Returns the window and the chunk of each block, 0 for none."""
    num_layers = len(rotary)
    types = reader.items(("layer_types",))
    if types is None:
        types = _layer_types(reader, family, rotary)
    window = reader.integer(("sliding_window",), 0, least=0)
    chunk = reader.integer(("attention_chunk_size",), 0, least=0)
    reader.find(("sliding_window_pattern",))
    reader.find(("_sliding_window_pattern",))
    reader.find(("use_sliding_window",))
    reader.find(("max_window_layers",))
    reach = {
        "full_attention": (0, 0),
        "sliding_attention": (window, 0),
        "chunked_attention": (0, chunk),
    }
    for name in types:
        if name not in reach:
            raise reader.wrong("layer_types", name, f"made of {', '.join(reach)}")
    return [reach[name] for name in _one_each(reader, "layer_types", types, num_layers)]


def _layer_types(reader: ConfigReader, family: Family, rotary: list[bool]) -> tuple[str, ...]:
    """Returns the kind of attention of each block where the file does not list them."""
    windows, num_layers = family.windows, len(rotary)
    if windows is Windows.CHUNKS:
        local = rotary
    elif windows is Windows.UNROTATED:
        slides = reader.flag("use_sliding_window", False)
        local = [slides and not turned for turned in rotary]
    elif windows is Windows.EVEN:
        local = [place % 2 == 0 for place in range(num_layers)]
    elif windows is Windows.PATTERN:
        pattern = reader.integer(("sliding_window_pattern", "_sliding_window_pattern"))
        local = [(place + 1) % pattern != 0 for place in range(num_layers)]
    elif windows is Windows.LATER:
        slides = reader.flag("use_sliding_window", False)
        first = reader.integer(("max_window_layers",), least=0)
        local = [slides and place >= first for place in range(num_layers)]
    else:
        local = [windows is Windows.ALL] * num_layers
    name = "chunked_attention" if windows is Windows.CHUNKS else "sliding_attention"
    return tuple(name if each else "full_attention" for each in local)


def _with_experts(reader: ConfigReader, family: Family, num_layers: int) -> list[bool]:
    """Returns whether each block has experts."""
    dense = DenseBlocks.NONE if family.experts is None else family.experts.dense
    places = range(num_layers)
    if dense is DenseBlocks.FIRST:
        first = reader.integer(("first_k_dense_replace", "moe_layer_start_index"), 0, least=0)
        last = reader.integer(("moe_layer_end_index",), -1, least=-1)
        return [first <= place and (last < 0 or place <= last) for place in places]
    if dense is DenseBlocks.NAMED:
        step = reader.integer(("decoder_sparse_step",), 1)
        named = reader.items(("mlp_only_layers",)) or ()
        return [place not in named and (place + 1) % step == 0 for place in places]
    if dense is DenseBlocks.BETWEEN:
        step = reader.integer(("interleave_moe_layer_step",))
        routed = reader.items(("moe_layers",)) or tuple(range(step - 1, num_layers, step))
        return [place in routed for place in places]
    return [True] * num_layers


def _one_each(
    reader: ConfigReader, name: str, items: tuple[Any, ...], num_layers: int
) -> tuple[Any, ...]:
    if len(items) != num_layers:
        raise ConfigError(
            f"{reader.where}: {name} has {len(items)} items, the model has {num_layers} layers",
            hint=f"correct {name}",
        )
    return items


def latent_fields(reader: ConfigReader, heads: int) -> Fields:
    """Returns the compressed attention, whose heads have no key of their own in the file."""
    latent = LatentAttention(
        q_rank=reader.integer(("q_lora_rank",), 0, least=0),
        kv_rank=reader.integer(("kv_lora_rank",)),
        nope_head_dim=reader.integer(("qk_nope_head_dim",)),
        rope_head_dim=reader.integer(("qk_rope_head_dim",)),
        value_head_dim=reader.integer(("v_head_dim",)),
    )
    for name in ("head_dim", "qk_head_dim", "num_key_value_heads"):
        reader.find((name,))
    return {"latent": latent, "head_dim": latent.key_head_dim, "num_kv_heads": heads}


def falcon_fields(reader: ConfigReader, heads: int) -> Fields:
    """Returns the heads of keys, the biases and the norms of a Falcon."""
    is_new = reader.flag("new_decoder_architecture", False)
    has_one_key = reader.flag("multi_query", True)
    kv_heads = reader.integer(("num_kv_heads", "n_head_kv", "num_key_value_heads"), heads)
    bias = reader.flag("bias", False)
    parallel = reader.flag("parallel_attn", True)
    norms = reader.integer(("num_ln_in_parallel_attn",), 2 if is_new else 1)
    if not is_new:
        kv_heads = 1 if has_one_key else heads
    return {
        "num_kv_heads": kv_heads,
        "qkv_bias": bias,
        "linear_bias": bias,
        "output_bias": None,
        "parallel_residual": parallel,
        "norm_layout": "shared" if parallel and norms == 1 else "pre",
    }


def minimax_fields(reader: ConfigReader, head_dim: int) -> Fields:
    """Returns the rotated part of a head and the multi-token prediction of a MiniMax-M2."""
    modules = reader.integer(("num_mtp_modules",), 0, least=0)
    each = reader.integer(("mtp_transformer_layers",), 1)
    rotated = reader.integer(("rotary_dim",), head_dim)
    return {
        "rotary_fraction": rotated / head_dim,
        "mtp_layers": modules * each if reader.flag("use_mtp", False) else 0,
    }


def _hybrid_names(reader: ConfigReader) -> list[str]:
    """Returns the names of the blocks of a model of blocks of one part each."""
    name, _ = reader.find(("hybrid_override_pattern", "layers_block_type", "layer_types"))
    items = reader.items(("hybrid_override_pattern", "layers_block_type", "layer_types"))
    if items is None:
        raise ConfigError(f"{reader.where}: {name} is missing", hint=f"add {name}")
    names = [_LETTERS.get(item, item) for item in items]
    for each in names:
        if each not in _HYBRID:
            raise reader.wrong(name, each, f"made of {', '.join(_HYBRID)}")
    return names


def lettered_kinds(letters: str) -> list[BlockRun] | None:
    """Returns the blocks that the letters of Megatron-LM's --hybrid-layer-pattern name.

    M is a state-space block, * attention, - a dense feed-forward network, E a mixture of experts.
    None for another letter.
    """
    if set(letters) - set(_LETTERS):
        return None
    return _hybrid([_LETTERS[letter] for letter in letters])


def _hybrid(names: list[str]) -> list[BlockRun]:
    """Returns the blocks of these names; a dense network is another kind beside experts alone."""
    kinds = dict(_HYBRID)
    if "moe" in names:
        kinds["mlp"] = replace(kinds["mlp"], experts=False)
    return [kinds[name] for name in names]


def hybrid_fields(reader: ConfigReader) -> Fields:
    """Returns the blocks of a Nemotron-H, and the shape of its state-space blocks."""
    names = _hybrid_names(reader)
    kinds = _hybrid(names)
    if reader.find(("mamba_proj_bias",))[1]:
        raise reader.wrong("mamba_proj_bias", True, "false: use_bias is the key that counts")
    return {
        "num_layers": len(kinds),
        "blocks": runs_of(kinds),
        **_hybrid_experts(reader, names),
        "state_space": StateSpace(
            num_heads=reader.integer(("mamba_num_heads",)),
            head_dim=reader.integer(("mamba_head_dim",)),
            state_size=reader.integer(("ssm_state_size",)),
            num_groups=reader.integer(("n_groups", "mamba_n_groups")),
            conv_kernel=reader.integer(("conv_kernel", "mamba_d_conv")),
            chunk_size=reader.integer(("chunk_size", "mamba_chunk_size")),
            conv_bias=reader.flag("use_conv_bias", True),
            linear_bias=reader.flag("use_bias", False),
        ),
    }


def _hybrid_experts(reader: ConfigReader, names: list[str]) -> Fields:
    """Returns the experts of a Nemotron-H; files of models without any have their keys as well."""
    number = reader.integer(("n_routed_experts",), 0, least=0)
    per_token = reader.integer(("num_experts_per_tok",), 0, least=0)
    width = reader.integer(("moe_intermediate_size",), 0, least=0)
    shared = reader.integer(("moe_shared_expert_intermediate_size",), 0, least=0)
    latent = reader.integer(("moe_latent_size",), 0, least=0)
    for name in ("sliding_window", "n_shared_experts"):
        reader.find((name,))
    if "moe" not in names:
        return {}
    return {
        "num_experts": number,
        "experts_per_token": per_token,
        "expert_ffn_hidden_size": width,
        "expert_latent_size": latent,
        "shared_experts": SharedExperts(ffn_hidden_size=shared) if shared else None,
        **({} if "mlp" in names else {"ffn_hidden_size": 0}),
    }
