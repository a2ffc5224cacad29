"""The model of a measured row: the shape that its cells state."""

from __future__ import annotations

from typing import Any

from parplan.costmodels.communication.mesh import Mesh
from parplan.planner.validation.frameworks import DROPOUT, LAST_STAGE_OF_REDIS
from parplan.planner.validation.row_cells import Row, UnpricedError, is_true, source_of, whole
from parplan.planner.validation.uneven_divisions import blocks_by_compute
from parplan.profiles.models.spec import ModelSpec, Norm, Positions
from parplan.profiles.stack import AttentionKernel, Stack


def model_of(row: Row, stack: Stack, published: ModelSpec | None = None) -> ModelSpec:
    """Returns the model of a row: its `published` one, or the shape that its cells state.

    Raises UnpricedError for a cell that is no number, and ConfigError for a shape that is none.
    """
    if published is not None:
        return published
    gated = is_true(row, "gated_ffn")
    experts = whole(row, "experts", 1) > 1
    heads = whole(row, "heads")
    hidden = whole(row, "hidden")
    old = stack.attention is AttentionKernel.UNFUSED and source_of(row) != "bloom"
    dropout = DROPOUT if old or "Megatron-LM CI" in row["framework"] else 0.0
    return ModelSpec(
        name=row["model"] or row["id"],
        num_layers=whole(row, "layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=whole(row, "kv_heads", heads),
        head_dim=whole(row, "head_dim", hidden // heads),
        **_feed_forward(row),
        vocab_size=whole(row, "vocab"),
        max_seq_length=whole(row, "seq_len"),
        dropout=dropout,
        gated_ffn=gated,
        vocab_multiple=int(row.get("vocab_multiple") or 128),
        norm=Norm.RMS_NORM if gated else Norm.LAYER_NORM,
        positions=Positions.ROTARY if gated else Positions.LEARNED,
        linear_bias=not gated and not experts,
        qkv_bias=not gated and not experts,
        tied_embeddings=_tied(row, gated),
    )


def _feed_forward(row: Row) -> dict[str, Any]:
    """Returns the widths of the feed-forward network; every block has experts, or none.

    Megatron's experts are as wide as the feed-forward network unless the row says otherwise.
    """
    experts = whole(row, "experts", 1)
    if experts == 1:
        return {"ffn_hidden_size": whole(row, "ffn_hidden")}
    return {
        "num_experts": experts,
        "experts_per_token": whole(row, "top_k"),
        "expert_ffn_hidden_size": whole(row, "moe_ffn_hidden", whole(row, "ffn_hidden")),
    }


def _tied(row: Row, gated: bool) -> bool:
    """True if the head shares the embedding's table: per the notes, else for ungated models."""
    if "untied" in row["notes"]:
        return False
    return "tied embeddings" in row["notes"] or (
        not gated and "Megatron-LM CI" not in row["framework"]
    )


def blocks_of(row: Row, model: ModelSpec, mesh: Mesh) -> tuple[int, ...] | None:
    """Returns blocks of each pipeline rank, None when the framework divides them evenly."""
    if "nanotron" in row["framework"] and mesh.pp > 1:
        return blocks_by_compute(model, mesh)
    if "method redis" not in row["framework"]:
        return None
    if model.vocab_size not in LAST_STAGE_OF_REDIS:
        raise UnpricedError("layers moved between stages, how many is not stated")
    last = LAST_STAGE_OF_REDIS[model.vocab_size]
    each, more = divmod(model.num_layers - last, mesh.pp - 1)
    return (*[each] * (mesh.pp - 1 - more), *[each + 1] * more, last)
