"""Selective recompute of operators: every second product is kept, and in what its fit counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.planner.validation.kept_products import kept_bytes_per_token
from parplan.planner.validation.priced_rows import price_row
from parplan.profiles.models.model_catalog import load_model
from tests.helpers.measured_rows import ROW

LLAMA = load_model("llama3-8b").spec
RUN = {
    **ROW,
    "framework": "torchtitan",
    "gpu": "h100-80g-sxm",
    "n_gpus": "8",
    "gated_ffn": "true",
    "recompute": "selective",
    "dp": "8",
    "tp": "1",
    "pp": "1",
    "zero_stage": "3",
    "sequence_parallel": "",
}


def test_a_block_keeps_every_second_product_by_hand():
    # input, queries, attention's output, the last product; values; gate; a number a head
    elements = 4 * 4096 + 8 * 128 + 14336

    assert kept_bytes_per_token(LLAMA, 2, 1) == 2 * elements + 4 * 32
    assert kept_bytes_per_token(LLAMA, 2, 2) == 2 * (3 * 4096 + 512 + 7168) + 4 * 16
    assert kept_bytes_per_token(replace(LLAMA, num_heads=16, head_dim=256), 2, 1) == (
        2 * (4 * 4096 + 8 * 256 + 14336) + 4 * 16
    )


def test_a_run_that_keeps_products_holds_more_than_its_levels_say():
    def gib(**change):
        return price_row({**RUN, **change, "memory_kind": "allocated"}).predicted_gib

    whole, selective = gib(recompute="full"), gib()
    levels_alone = gib(gated_ffn="false")
    named = gib(recompute="selective op")

    assert whole < selective == pytest.approx(named)
    assert levels_alone != selective
