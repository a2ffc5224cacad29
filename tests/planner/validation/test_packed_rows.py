"""Measured rows whose sequences are packed: their documents, and their price."""

from __future__ import annotations

import pytest

from parplan.planner.validation.configuration import configuration_of
from parplan.planner.validation.packed_rows import documents_of_row
from parplan.planner.validation.priced_rows import price_row
from parplan.planner.validation.row_cells import OPTIONAL
from parplan.profiles.models.documents import Documents

SFT = dict.fromkeys(OPTIONAL, "") | {
    "id": "nemolauncher-llama2-7b-8-sft",
    "framework": "NeMo 24.05-24.07",
    "gpu": "h100-80g-sxm",
    "n_gpus": "8",
    "gpus_per_node": "8",
    "model": "llama2-7b",
    "layers": "32",
    "hidden": "4096",
    "heads": "32",
    "kv_heads": "32",
    "ffn_hidden": "11008",
    "gated_ffn": "true",
    "vocab": "32000",
    "seq_len": "4096",
    "global_batch": "32",
    "micro_batch": "1",
    "dp": "8",
    "tp": "1",
    "pp": "1",
    "zero_stage": "1",
    "dtype": "fp8",
    "notes": "INCONSISTENT: reported TFLOPs / recomputed (causal-attention) = 0.930",
    "run_type": "sft",
    "derived_step_time_s": "0.96998",
}


@pytest.mark.parametrize(
    ("cells", "mean"),
    [
        pytest.param({"id": "nemolauncher-llama2-7b-8-sft"}, 200, id="squad"),
        pytest.param({"id": "nemolauncher-llama2-7b-8-pt"}, None, id="pretraining"),
        pytest.param({"id": "mbcard-a-sft", "notes": "20 Tulu3 SFT steps"}, 392, id="tulu-3"),
        pytest.param({"id": "mbcard-a-sft", "notes": "packed SFT"}, None, id="not-stated"),
    ],
)
def test_documents_are_those_that_the_source_states(cells, mean):
    assert documents_of_row({"notes": ""} | cells) == (mean and Documents(mean=mean))


def test_a_packed_row_is_priced_near_its_measured_time_and_faster_than_whole_sequences():
    priced = price_row(SFT)
    whole = price_row(SFT | {"id": "nemolauncher-llama2-7b-8-pt", "recompute": "none"})

    assert configuration_of(SFT).training.documents == Documents(mean=200)
    assert priced.error == pytest.approx(0.0, abs=0.1)
    assert priced.predicted_s < 0.95 * whole.predicted_s
