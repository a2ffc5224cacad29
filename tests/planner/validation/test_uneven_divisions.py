"""Stages that are not even: nanotron's, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.communication.mesh import Mesh
from parplan.planner.validation.uneven_divisions import blocks_by_compute
from parplan.profiles.models.model_catalog import load_model

# a block of 41.9 M weights, a head of 102.9 M: 2.45 blocks
OLD_BENCH = replace(
    load_model("llama3-8b").spec,
    num_layers=24,
    hidden_size=2048,
    num_heads=32,
    num_kv_heads=32,
    head_dim=64,
    ffn_hidden_size=4096,
    vocab_size=50257,
)


@pytest.mark.parametrize(
    ("pp", "blocks"),
    [
        (1, (24,)),
        (2, (14, 10)),  # 13.2 blocks of compute a stage
        (4, (7, 7, 6, 4)),  # 6.6
        (8, (4, 3, 3, 4, 3, 3, 4, 0)),  # 3.3: the last stage has the head alone
    ],
)
def test_a_stage_ends_past_its_share_of_the_compute(pp, blocks):
    assert blocks_by_compute(OLD_BENCH, Mesh(pp=pp, dp=1, tp=1)) == blocks


@pytest.mark.parametrize("pp", range(1, 9))
def test_every_block_is_on_one_stage(pp):
    assert sum(blocks_by_compute(OLD_BENCH, Mesh(pp=pp, dp=1, tp=1))) == 24
