"""A small model with the structure of a large one, of some of its blocks.

It has the kinds of these blocks, its norms, positions and functions, grouped heads, latent
attention, experts, state spaces, delta rules and tower, all of small sizes. Windows are shorter
than a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from parplan.profiles.models.blocks import BlockRun, DeltaRule, LatentAttention, StateSpace
from parplan.profiles.models.fine_tuning import FineTuning
from parplan.profiles.models.spec import ModelSpec
from parplan.profiles.models.towers import CONVOLVED, Tower

SEQ_LENGTH = 16
HEADS = 4
HEAD_DIM = 8
WIDE_HEAD_DIM = 32  # rows of weights in 8 bits are whole blocks of 64, on each of two ranks
FFN = 64
VOCAB = 100
PADDED = 128
EXPERTS = 4
WINDOW = 6
PATCHES = 16  # of an image
MERGED = 4  # patches of a token, and of a window
MOST_IMAGES = 2
PATCH_FEATURES = 12
PART = 4  # tokens of the parts of a sequence that attention stays within


def small_model(model: ModelSpec, kept: Sequence[int], tuning: FineTuning | None) -> ModelSpec:
    """Return the small model.

    kept    the blocks of the large model that it has, by their numbers, layers of a tower first
    tuning  the trained part of the large model
    """
    eight_bits = tuning is not None and tuning.base_bits == 8
    head_dim = WIDE_HEAD_DIM if eight_bits else HEAD_DIM
    grouped = model.num_kv_heads != model.num_heads
    kv_heads = HEADS // 2 if grouped else HEADS
    if model.num_kv_heads == 1:
        kv_heads = 1
    width = HEADS * head_dim
    padded = model.padded_vocab_size > model.vocab_size
    shared = model.shared_experts
    ffn = 2 * FFN if eight_bits else FFN
    latent = _latent(model.latent)
    hidden = width if model.q_size == model.hidden_size else width * 3 // 2
    kinds = [model.block_kinds[block] for block in text_blocks(model, kept)]
    return replace(
        model,
        name=f"{model.name}, shrunk",
        num_layers=len(kinds),
        hidden_size=hidden,
        num_heads=HEADS,
        num_kv_heads=kv_heads,
        head_dim=head_dim if latent is None else latent.key_head_dim,
        num_experts=min(model.num_experts, EXPERTS),
        experts_per_token=min(model.experts_per_token, EXPERTS // 2),
        ffn_hidden_size=ffn if model.ffn_hidden_size else 0,
        expert_ffn_hidden_size=ffn if model.num_experts else 0,
        shared_experts=None if shared is None else replace(shared, ffn_hidden_size=ffn),
        vocab_size=VOCAB if padded else PADDED,
        max_seq_length=SEQ_LENGTH,
        dropout=0.0,
        vocab_multiple=PADDED if padded else 1,
        blocks=tuple(map(_short, kinds)) if model.blocks else (),
        latent=latent,
        state_space=_state_space(model.state_space),
        delta_rule=_delta_rule(model.delta_rule),
        tower=_tower(model.tower, kept, hidden) if model.tower else None,
    )


def text_blocks(model: ModelSpec, kept: Sequence[int]) -> list[int]:
    """Return the numbers of the kept blocks among those of the language model."""
    before = model.num_blocks - model.num_layers
    return [block - before for block in kept if block >= before]


def _tower(tower: Tower, kept: Sequence[int], width: int) -> Tower:
    """Return the small tower, which ends in `width` features."""
    blocks = [block - 1 for block in kept if 0 < block <= tower.num_layers]
    kinds = [tower.block_kinds[block] for block in blocks]
    small = replace(
        tower,
        num_layers=len(blocks),
        hidden_size=width if tower.attended else HEADS * HEAD_DIM,
        num_heads=HEADS,
        ffn_hidden_size=FFN,
        patches=PATCHES if tower.merged > 1 else PATCHES // MERGED,
        images=min(tower.images, MOST_IMAGES),
        patch_features=PATCH_FEATURES,
        merged=min(tower.merged, MERGED),
        blocks=tuple(
            replace(kind, num_blocks=1, window=min(kind.window, MERGED)) for kind in kinds
        ),
        projector=tuple(replace(each, width=FFN) for each in tower.projector[:-1])
        + tuple(replace(each, width=width) for each in tower.projector[-1:]),
    )
    if not tower.frame_features:
        return small
    return replace(small, frame_features=PATCH_FEATURES, patch_features=CONVOLVED * width)


def small_tuning(tuning: FineTuning | None, kept: Sequence[int]) -> FineTuning | None:
    """Return the trained part of a small model, whose frozen blocks are those of the large one."""
    if tuning is None:
        return None
    others = tuple(part for part in tuning.freeze if not part.startswith("blocks"))
    frozen = (place for place, block in enumerate(kept) if tuning.freezes_block(block))
    return replace(tuning, freeze=(*others, *(f"blocks:{place}" for place in frozen)))


def _short(kind: BlockRun) -> BlockRun:
    return replace(kind, num_blocks=1, window=min(kind.window, WINDOW), chunk=min(kind.chunk, PART))


def _latent(latent: LatentAttention | None) -> LatentAttention | None:
    if latent is None:
        return None
    alike = latent.value_head_dim == latent.nope_head_dim
    return LatentAttention(
        q_rank=12 if latent.q_rank else 0,
        kv_rank=16,
        nope_head_dim=HEAD_DIM,
        rope_head_dim=HEAD_DIM // 2,
        value_head_dim=HEAD_DIM if alike else HEAD_DIM - 2,
    )


def _state_space(shape: StateSpace | None) -> StateSpace | None:
    if shape is None:
        return None
    groups = min(shape.num_groups, HEADS)
    return replace(
        shape, num_heads=2 * HEADS, head_dim=4, state_size=8, num_groups=groups, chunk_size=6
    )


def _delta_rule(shape: DeltaRule | None) -> DeltaRule | None:
    if shape is None:
        return None
    each = shape.value_heads // shape.key_heads
    return replace(
        shape, key_heads=HEADS, key_head_dim=6, value_heads=HEADS * each, value_head_dim=8
    )
