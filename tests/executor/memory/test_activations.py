"""Saved bytes of a block on the ranks of a real world of dp 2, tp 2 and pp 2.

`benchmarks/prices/activations.py` has more plans and sizes.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from benchmarks.prices.activations import gpt_tiny, plans, rows

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"),
]

NAMES = [("megatron-sequence", "chain"), ("ulysses", "selective"), ("batch-feed-forward", "none")]


@cache
def _measured():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # a fork must not inherit a pool of threads
    try:
        legal_plans = plans(gpt_tiny(), 64)
        return {
            (row.plan, row.recompute): row
            for row in rows({name: legal_plans[name] for name in NAMES})
        }
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES, ids=" ".join)
def test_every_rank_keeps_of_a_block_what_the_placements_and_the_recompute_list_say(name):
    row = _measured()[name]

    # 8 bytes a token of each norm are left out
    assert row.measured == pytest.approx(row.rule, rel=0.015)
    if row.model is not None:
        assert row.model == row.rule
