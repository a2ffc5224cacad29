"""The model of a measured row: the shape that its cells state."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from parplan.costmodels.communication.mesh import Mesh
from parplan.planner.validation.frameworks import DROPOUT, LAST_STAGE_OF_REDIS, MORE_IN_FLIGHT
from parplan.planner.validation.row_cells import (
    Row,
    UnpricedError,
    choice,
    is_true,
    numbers,
    source_of,
    whole,
)
from parplan.planner.validation.uneven_divisions import blocks_by_compute, laid_out
from parplan.profiles.models.blocks import (
    BlockRun,
    LatentAttention,
    QkNorm,
    SharedExperts,
    StateSpace,
)
from parplan.profiles.models.hf.parts import lettered_kinds, runs_of
from parplan.profiles.models.spec import ModelSpec, Norm, Positions
from parplan.profiles.stack import AttentionKernel, Stack

_LATENT = ("q_rank", "kv_rank", "nope_head_dim", "rope_head_dim", "value_head_dim")
_ENCODER = re.compile(r"bert", re.IGNORECASE)
_NO_MTP = re.compile(r"w/o MTP")


def model_of(row: Row, stack: Stack, published: ModelSpec | None = None) -> ModelSpec:
    """Returns the model of a row: its `published` one, or the shape that its cells state.

    Raises UnpricedError for a cell that is no number, and ConfigError for a shape that is none.
    """
    if published is not None:
        mtp = whole(row, "mtp_layers", published.mtp_layers)
        return replace(published, mtp_layers=0 if _NO_MTP.search(row["notes"]) else mtp)
    gated = is_true(row, "gated_ffn")
    experts = whole(row, "experts", 1) > 1
    heads = whole(row, "heads")
    hidden = whole(row, "hidden")
    old = stack.attention is AttentionKernel.UNFUSED and source_of(row) != "bloom"
    dropout = DROPOUT if old or "Megatron-LM CI" in row["framework"] else 0.0
    return ModelSpec(
        name=row["model"] or row["id"],
        hidden_size=hidden,
        num_heads=heads,
        **_blocks(row),
        **_heads(row, hidden, heads),
        **_feed_forward(row),
        vocab_size=whole(row, "vocab") // _vocabulary_parts(row),
        max_seq_length=whole(row, "seq_len"),
        dropout=0.0 if row.get("latent") else dropout,
        gated_ffn=gated,
        vocab_multiple=int(row.get("vocab_multiple") or 128),
        norm=Norm.RMS_NORM if gated else Norm.LAYER_NORM,
        positions=_positions(row, gated),
        linear_bias=not gated and not experts,
        qkv_bias=not gated and not experts,
        tied_embeddings=_tied(row, gated),
        qk_norm=choice(row, "qk_norm", QkNorm) or QkNorm.NONE,
        bidirectional=_ENCODER.match(row["model"]) is not None,
        mtp_layers=whole(row, "mtp_layers", 0),
    )


def _vocabulary_parts(row: Row) -> int:
    """Returns the pipeline ranks that divide the vocabulary, 1 where the ends of the model have it.

    Every rank then takes its part of each micro-batch's tokens and logits, so that its time is that
    of the fullest rank of a model with that part of the vocabulary (Yeung et al. 2024, arXiv
    2411.05288). The reductions between the ranks are left out.
    """
    return whole(row, "pp") if divides_vocabulary(row) else 1


def divides_vocabulary(row: Row) -> bool:
    """Returns true where the pipeline ranks divide the token table and the head."""
    return _vocabulary_method(row) is not None


def in_flight_share(row: Row) -> float:
    """Returns micro-batches that a rank holds over those of 1F1B: more with a divided vocabulary.

    They are more by the steps in which the ranks wait for the sum of their parts (arXiv 2411.05288,
    sections 4.2 and 5; interlaced: half as many again, section 2.2).
    """
    number, share = MORE_IN_FLIGHT.get(_vocabulary_method(row) or "", (0, 0.0))
    return 1.0 + number / whole(row, "pp") + share


def _vocabulary_method(row: Row) -> str | None:
    return next((name for name in MORE_IN_FLIGHT if f"method {name}" in row["framework"]), None)


def _heads(row: Row, hidden: int, heads: int) -> dict[str, Any]:
    """Returns the shape of attention, latent where the row states its ranks."""
    if not row.get("latent"):
        return {
            "num_kv_heads": whole(row, "kv_heads", heads),
            "head_dim": whole(row, "head_dim", hidden // heads),
        }
    latent = LatentAttention(**dict(zip(_LATENT, numbers(row, "latent", 5), strict=True)))
    return {"latent": latent, "num_kv_heads": heads, "head_dim": latent.key_head_dim}


def _blocks(row: Row) -> dict[str, Any]:
    """Returns the number of blocks, and the runs of unlike ones."""
    if row.get("layer_pattern"):
        kinds = lettered_kinds(row["layer_pattern"].replace("|", ""))
        if kinds is None:
            raise UnpricedError(f"layer_pattern {row['layer_pattern']!r} is not understood")
        heads, head_dim, state_size, groups = numbers(row, "state_space", 4)
        return {
            "num_layers": len(kinds),
            "blocks": runs_of(kinds),
            "state_space": StateSpace(
                num_heads=heads, head_dim=head_dim, state_size=state_size, num_groups=groups
            ),
        }
    layers, dense = whole(row, "layers"), whole(row, "dense_layers", 0)
    if not dense:
        return {"num_layers": layers}
    runs = BlockRun(num_blocks=dense, experts=False), BlockRun(num_blocks=layers - dense)
    return {"num_layers": layers, "blocks": runs}


def _feed_forward(row: Row) -> dict[str, Any]:
    """Returns the widths of the feed-forward network; every block has experts, or none.

    Megatron's experts are as wide as the feed-forward network unless the row says otherwise.
    """
    experts = whole(row, "experts", 1)
    if experts == 1:
        return {"ffn_hidden_size": whole(row, "ffn_hidden")}
    shared = whole(row, "shared_ffn_hidden", 0)
    return {
        "num_experts": experts,
        "experts_per_token": whole(row, "top_k"),
        "expert_ffn_hidden_size": whole(row, "moe_ffn_hidden", whole(row, "ffn_hidden")),
        "ffn_hidden_size": whole(row, "ffn_hidden") if whole(row, "dense_layers", 0) else 0,
        "shared_experts": SharedExperts(ffn_hidden_size=shared) if shared else None,
    }


def _positions(row: Row, gated: bool) -> Positions:
    """Returns the stated positions, else those that go with the feed-forward network."""
    usual = Positions.ROTARY if gated else Positions.LEARNED
    return choice(row, "positions", Positions) or usual


def _tied(row: Row, gated: bool) -> bool:
    """True if the head shares the embedding's table: per the row, else for ungated models."""
    if row.get("tied"):
        return is_true(row, "tied")
    if "untied" in row["notes"]:
        return False
    return "tied embeddings" in row["notes"] or (
        not gated and "Megatron-LM CI" not in row["framework"]
    )


def stages_of(row: Row, model: ModelSpec, mesh: Mesh) -> tuple[int, ...] | None:
    """Returns the blocks of each virtual stage where the row or its framework says them.

    None: the framework divides them evenly.
    """
    if row.get("pipeline_layout"):
        return laid_out(row["pipeline_layout"])
    if "|" in row.get("layer_pattern", ""):
        return tuple(map(len, row["layer_pattern"].split("|")))
    if "nanotron" in row["framework"] and mesh.pp > 1:
        return blocks_by_compute(model, mesh)
    if "method redis" not in row["framework"]:
        return None
    if model.vocab_size not in LAST_STAGE_OF_REDIS:
        raise UnpricedError("layers moved between stages, how many is not stated")
    last = LAST_STAGE_OF_REDIS[model.vocab_size]
    each, more = divmod(model.num_layers - last, mesh.pp - 1)
    return (*[each] * (mesh.pp - 1 - more), *[each + 1] * more, last)
