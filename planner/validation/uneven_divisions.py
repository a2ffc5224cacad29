"""Divisions of blocks over pipeline stages by frameworks that do not divide them evenly."""

from __future__ import annotations

import re

from parplan.costmodels.communication.mesh import Mesh
from parplan.planner.validation.row_cells import UnpricedError
from parplan.profiles.errors import shortened
from parplan.profiles.models.spec import ModelSpec

_GROUP = re.compile(r"\(([^()]{0,4096})\)(?:\*([0-9]{1,9}))?")
_LETTER = re.compile(r"([EtmL])(?:\*([0-9]{1,4})(?![0-9]))?")
_LONGEST = 4096  # characters of a layout, with its groups written out


def blocks_by_compute(model: ModelSpec, mesh: Mesh) -> tuple[int, ...]:
    """Returns the number of blocks of each pipeline rank in nanotron.

    A stage ends with the layer that takes it past its share of the compute. The weights of a block
    (4 h^2 and its feed-forward) and of the head count, the embedding and norms do not:
    huggingface/nanotron src/nanotron/models/base.py (build_model), models/llama.py
    (get_block_compute_costs).
    """
    matrices = 3 if model.gated_ffn else 2
    block = (
        4 * model.num_heads * model.head_dim * model.hidden_size
        + matrices * model.ffn_hidden_size * model.hidden_size
    )
    share = (model.num_layers * block + model.vocab_size * model.hidden_size) / mesh.pp
    blocks = [0] * mesh.pp
    rank = 0
    for index in range(model.num_layers):
        blocks[rank] += 1
        if (index + 1) * block > share * (rank + 1):
            rank += 1
    return tuple(blocks)


def laid_out(layout: str) -> tuple[int, ...]:
    """Returns the blocks of each virtual stage of a layout such as `Et*3|(tt|)*29,m|L`.

    The letters are those of Megatron-Core's pipeline_model_parallel_layout: E the embedding, t a
    block, m a module of multi-token prediction, L the loss. A stage of the last two alone has no
    block here: prices have both with the head, in the last stage.
    Raises UnpricedError for a layout that cannot be read.
    """
    text = layout.replace(",", "").replace(" ", "")
    while len(text) <= _LONGEST and (group := _GROUP.search(text)):
        again = group[1] * min(int(group[2] or 1), _LONGEST)
        text = text[: group.start()] + again[: _LONGEST + 1] + text[group.end() :]
    if len(text) > _LONGEST:
        raise UnpricedError(f"pipeline_layout is longer than {_LONGEST:,} letters")
    stages = text.split("|")
    if re.sub(_LETTER, "", "".join(stages)):
        raise UnpricedError(f"pipeline_layout {shortened(layout)!r} is not understood")
    return tuple(
        sum(int(count or 1) for letter, count in _LETTER.findall(stage) if letter == "t")
        for stage in stages
    )


def with_longer_first_stages(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Returns blocks of each virtual stage, as Megatron-Bridge lays out a model of any length.

    All stages are as long as the longest of an even division, and the last has the rest, beside the
    loss; where that is less than none, the first is shorter too:
    src/megatron/bridge/recipes/deepseek/h100/deepseek_v3.py of
    NVIDIA-NeMo/Megatron-Bridge@067f987df0.
    """
    each = -(-num_layers // num_stages)
    rest = num_layers - each * (num_stages - 1)
    return (each + min(0, rest), *[each] * (num_stages - 2), max(0, rest))
