"""Strategies whose blocks are in chunks, and the smallest budget that a rank says it needs."""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import replace

import pytest

from parplan.costmodels.chunks.chunk_schedule import rank_chunks
from parplan.costmodels.host.state_location import Access, Eviction, StateLocation
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.strategy import Strategy
from parplan.profiles.errors import InfeasibleError
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import Precision
from tests.helpers.uniform_strategies import TINY, TRAINING, book_of, frame_of, uniform

DEV = StateLocation.DEVICE
OPT = StateLocation.OPTIMIZER
HOST = StateLocation.HOST
HALF = replace(TRAINING, precision=Precision.FP16, gradient_precision=Precision.FP16)
MIXED = replace(HALF, gradient_precision=Precision.FP32)
FULL = replace(MIXED, precision=Precision.FP32)
BOOKS = {
    name: book_of(TINY, 8, training)
    for name, training in {"half": HALF, "mixed": MIXED, "full": FULL}.items()
}


def chunked(homes, *, dp=1, recompute=Recompute.FULL, ends=True, access=Access.BLOCK, **layout):
    """One block of each of `homes`, in model order, on equal stages."""
    plain = uniform(
        frame_of(dp=dp, **layout),
        len(homes),
        recompute=recompute,
        zero=3 if dp > 1 else 0,
        ends=ends,
    )
    left = iter(homes)
    stages = tuple(
        tuple(
            replace(layer, home=next(left)) if layer.kind is LayerKind.BLOCK else layer
            for layer in stage
        )
        for stage in plain.stages
    )
    return Strategy(layout=replace(plain.layout, chunked=True, access=access), stages=stages)


def smallest_bytes(strategy, rank, prices):
    """Smallest budget, as named by the error of a rank that has no memory."""
    with pytest.raises(InfeasibleError, match="need at least") as caught:
        rank_chunks(strategy, rank, prices, eviction=Eviction.OPT, device_bytes=0)
    match = re.search(r"at least ([\d,]+) bytes", caught.value.message)
    return int(match[1].replace(",", ""))


def schedule(strategy, rank=0, prices=None, *, more=0.0, eviction=Eviction.OPT, **options):
    """The schedule with the smallest budget, and `more` of that."""
    prices = prices or BOOKS["half"]
    budget = int(smallest_bytes(strategy, rank, prices) * (1 + more))
    return rank_chunks(strategy, rank, prices, eviction=eviction, device_bytes=budget, **options)


@contextmanager
def chunks_of_blocks(share):
    """Groups as large as so many blocks, but never smaller than a tensor.

    Blocks thus share groups and have several.
    """

    def elements(blocks, ranks, cluster, width_bytes=2, *, by_part=False):
        block = blocks[0]
        return -(-max(max(block), int(share * sum(block))) // ranks) * ranks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("parplan.costmodels.chunks.chunk_schedule.common_group_size", elements)
        yield
