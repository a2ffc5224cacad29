"""Stages that are not even: nanotron's, Megatron-Core's layouts and Megatron-Bridge's, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.communication.mesh import Mesh
from parplan.planner.validation.row_cells import UnpricedError
from parplan.planner.validation.uneven_divisions import (
    blocks_by_compute,
    laid_out,
    with_longer_first_stages,
)
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


@pytest.mark.parametrize(
    ("layout", "blocks"),
    [
        ("Et*3|(tt|)*6mL", (3, 2, 2, 2, 2, 2, 2, 0)),
        ("Et*2|(tt|)*5t|tmL", (2, 2, 2, 2, 2, 2, 1, 1)),
        ("Et*3|(tt|)*2,m|L", (3, 2, 2, 0, 0)),
        ("Ettt|t*4L", (3, 4)),
    ],
)
def test_a_layout_counts_the_blocks_of_each_stage(layout, blocks):
    assert laid_out(layout) == blocks


@pytest.mark.parametrize("layout", ["E(t|tL", "Etx|tL", "Et*|tL"])
def test_a_layout_that_cannot_be_read_is_refused(layout):
    with pytest.raises(UnpricedError, match="is not understood"):
        laid_out(layout)


@pytest.mark.parametrize(
    ("num_stages", "blocks"),
    [
        (4, (16, 16, 16, 13)),
        (16, (*[4] * 15, 1)),
        (32, (1, *[2] * 30, 0)),  # Et|(tt|)*30mL
    ],
)
def test_the_61_blocks_of_deepseek_v3_lie_as_its_recipes_say(num_stages, blocks):
    assert with_longer_first_stages(61, num_stages) == blocks
