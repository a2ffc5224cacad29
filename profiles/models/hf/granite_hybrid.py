"""The blocks of a Granite 4: state space or attention, each before a feed-forward network.

The network is a mixture of experts with a shared one, or that alone where the file has no experts.
"""

from __future__ import annotations

from typing import Any

from parplan.profiles.errors import ConfigError
from parplan.profiles.models.blocks import BlockRun, Mixer, StateSpace
from parplan.profiles.models.hf.config_reader import ConfigReader
from parplan.profiles.models.hf.parts import runs_of
from parplan.profiles.models.spec import Positions

_SCANS = ("mamba", "linear_attention")
_ATTENDS = ("attention", "full_attention")


def granite_hybrid_fields(reader: ConfigReader, num_layers: int, hidden: int) -> dict[str, Any]:
    """Returns the blocks of a Granite 4, and the shape of their scans."""
    names = reader.items(("layer_types", "layers_block_type")) or (_SCANS[0],) * num_layers
    if len(names) != num_layers:
        raise ConfigError(
            f"{reader.where}: layer_types has {len(names)} items, "
            f"the model has {num_layers} layers",
            hint="correct layer_types",
        )
    for name in names:
        if name not in (*_SCANS, *_ATTENDS):
            needed = f"made of {', '.join((*_SCANS, *_ATTENDS))}"
            raise reader.wrong("layer_types", name, needed)
    kinds = [BlockRun(mixer=Mixer.STATE_SPACE) if n in _SCANS else BlockRun() for n in names]
    state_space = _state_space(reader, hidden)  # files of models without scans have its keys too
    return {
        "num_layers": num_layers,
        "blocks": runs_of(kinds),
        **({"state_space": state_space} if set(names) & set(_SCANS) else {}),
    }


def granite_positions(reader: ConfigReader) -> Positions:
    """Returns the positions of a Granite 4, none where the file names no kind."""
    name, kind = reader.find(("position_embedding_type",))
    if kind not in (None, "nope", "rope"):
        raise reader.wrong(name, kind, "nope or rope")
    return Positions.ROTARY if kind == "rope" else Positions.NONE


def _state_space(reader: ConfigReader, hidden: int) -> StateSpace:
    heads = reader.integer(("mamba_n_heads",))
    expanded = hidden * reader.integer(("mamba_expand",))
    name, given = reader.find(("mamba_d_head",))
    width = expanded // heads if given == "auto" else reader.integer((name,))
    if width * heads != expanded:
        raise reader.wrong(name, given, f"{expanded} / {heads}, the inner width by its heads")
    return StateSpace(
        num_heads=heads,
        head_dim=width,
        state_size=reader.integer(("mamba_d_state",)),
        num_groups=reader.integer(("mamba_n_groups",)),
        conv_kernel=reader.integer(("mamba_d_conv",)),
        chunk_size=reader.integer(("mamba_chunk_size",)),
        conv_bias=reader.flag("mamba_conv_bias", True),
        linear_bias=reader.flag("mamba_proj_bias", False),
    )
