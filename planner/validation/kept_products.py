"""Selective recompute of operators in torchtitan: the bytes that a block keeps.

Its policy keeps the outputs of fused attention and of every second matrix product, in the order of
Llama's block: queries, keys, values, the output projection, both halves of the gated network and
its last product (pytorch/torchtitan b5bcd76c66 torchtitan/distributed/activation_checkpoint.py).
The operators of a price are fused ones, so that blocks take two levels in turn, which take as long
together (`SELECTIVE_OF`); this module has the bytes that these levels miss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.memory.rank_memory import RankMemory
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.validation.frameworks import RECOMPUTE
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import ModelSpec

EVERY_SECOND = RECOMPUTE["selective op"]
_FP32_BYTES = 4


def kept_bytes_per_token(model: ModelSpec, element_bytes: int, tp: int) -> int:
    """Bytes that one block keeps of a token on a tensor-parallel rank.

    They are its input, the queries, the values, the output of attention with a number in fp32 for
    each head, the first half of the gated network, and the output of its last product.
    """
    heads = model.num_heads * model.head_dim // tp
    values = model.num_kv_heads * model.head_dim // tp
    gated = model.ffn_hidden_size // tp
    elements = 2 * model.hidden_size + 2 * heads + values + gated
    return element_bytes * elements + _FP32_BYTES * model.num_heads // tp


def with_kept_products(
    memory: Sequence[RankMemory],
    levels: tuple[Recompute, ...],
    model: ModelSpec,
    layout: ParallelLayout,
    price_cache: PriceCache,
) -> tuple[RankMemory, ...]:
    """Returns the memory of ranks whose blocks keep every second product, if they do."""
    if levels != EVERY_SECOND or not model.gated_ffn or layout.mesh.pp > 1:
        return tuple(memory)
    training = price_cache.training
    tokens = layout.micro_batch_size * training.seq_length // layout.mesh.cp
    kept = tokens * kept_bytes_per_token(model, training.precision.num_bytes, layout.mesh.tp)
    priced = [
        price_cache.saved_bytes(LayerKind.BLOCK, layout.micro_batch_size, layout.sharding, level)
        for level in levels
    ]
    more = model.num_layers * (kept - sum(priced) / len(priced))
    spare = training.stack.allocator_share * more
    return tuple(
        replace(
            rank,
            activations=rank.activations + more,
            allocator_reserve=rank.allocator_reserve + spare,
        )
        for rank in memory
    )
