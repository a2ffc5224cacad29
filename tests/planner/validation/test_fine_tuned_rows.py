"""The adapters of a row are those that it states, its recipe's, or its framework's."""

from __future__ import annotations

import pytest

from parplan.planner.validation.fine_tuned_rows import fine_tuning_of
from parplan.planner.validation.row_cells import OPTIONAL

ROW = dict.fromkeys(OPTIONAL, "") | {"run_type": "peft"}


def test_a_run_that_trains_all_weights_has_no_adapters():
    assert fine_tuning_of({**ROW, "run_type": "sft"}) is None


@pytest.mark.parametrize(
    ("change", "rank"),
    [
        pytest.param({}, 32, id="the-framework's"),
        pytest.param({"notes": "Only rank-8, alpha-16 LoRA"}, 8, id="noted"),
        pytest.param({"notes": "LoRA dim 16, alpha 32"}, 16, id="noted-as-dim"),
        pytest.param({"notes": "rank-8", "lora_rank": "64"}, 64, id="stated"),
        pytest.param({"notes": "48 rank-local adapters"}, 32, id="no-rank"),
    ],
)
def test_the_rank_is_stated_or_that_of_the_framework(change, rank):
    assert fine_tuning_of({**ROW, **change}).lora_rank == rank


def test_the_targets_are_all_products_unless_they_are_stated():
    assert fine_tuning_of(ROW).lora_targets == ("all-linear",)
    stated = fine_tuning_of({**ROW, "lora_targets": "linear_qkv linear_proj"})
    assert stated.lora_targets == ("linear_qkv", "linear_proj")
