"""Divisions of blocks over pipeline stages by frameworks that do not divide them evenly."""

from __future__ import annotations

from parplan.costmodels.communication.mesh import Mesh
from parplan.profiles.models.spec import ModelSpec


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
