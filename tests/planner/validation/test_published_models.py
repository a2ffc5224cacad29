"""Rows of public models take the published shape, and their own figures go before it."""

from __future__ import annotations

import pytest

from parplan.planner.validation.published_models import TAKEN, published_name, with_published_shape
from parplan.planner.validation.row_cells import OPTIONAL, UnpricedError
from parplan.profiles.models.model_catalog import load_model

BARE = dict.fromkeys(OPTIONAL, "") | {
    **dict.fromkeys(("layers", "hidden", "heads", "ffn_hidden"), ""),
    "id": "made-1",
    "seq_len": "4096",
    "model": "Mixtral 8x7B",
}


def test_a_row_without_a_shape_is_the_published_model():
    shape = with_published_shape(BARE)

    assert shape.model == load_model("mixtral-8x7b").spec
    assert shape.taken == (TAKEN,)
    assert shape.differing == ()
    assert (shape.row["layers"], shape.row["experts"], shape.row["top_k"]) == ("32", "8", "2")


def test_own_figures_go_before_the_published_ones_and_contradictions_are_named():
    shape = with_published_shape({**BARE, "layers": "16", "vocab": "50000", "hidden": "4096"})

    assert (shape.model.num_layers, shape.model.vocab_size) == (16, 50000)
    assert shape.differing == ("layers", "vocab")


def test_fewer_layers_of_a_truncated_model_are_no_contradiction():
    shape = with_published_shape(
        {**BARE, "model": "mixtral-8x7b truncated to 4 layers", "layers": "4"}
    )

    assert shape.model.num_layers == 4
    assert shape.differing == ()


def test_a_whole_shape_without_experts_is_left_as_it_is():
    row = {**BARE, "model": "llama3-8b", "layers": "4", "hidden": "64", "heads": "4", "vocab": "8"}

    shape = with_published_shape(row)

    assert (shape.row, shape.model, shape.taken) == (row, None, ())


def test_a_model_that_is_not_public_keeps_its_cells():
    assert with_published_shape({**BARE, "model": "gpt-made"}).model is None


def test_a_public_model_that_is_not_listed_is_not_guessed():
    with pytest.raises(UnpricedError, match="plan models does not list deepseek-v4-flash"):
        with_published_shape({**BARE, "model": "DeepSeekV4 Flash"})


@pytest.mark.parametrize(
    ("cell", "name"),
    [
        pytest.param("DeepSeekV3", "deepseek-v3"),
        pytest.param("GPT OSS 120B", "gpt-oss-120b"),
        pytest.param("Qwen3_30B_a3B", "qwen3-30b-a3b"),
        pytest.param("LLAMA3.1_405B", "llama3-405b"),
        pytest.param("Kimi_K2", "kimi-k2"),
        pytest.param("mixtral/mixtral_8x22b_tp2pp8ep8vpp1_release", "mixtral-8x22b"),
        pytest.param("moonlight-16b-a3b (1 dense + 26 MLA-MoE layers)", "moonlight-16b-a3b"),
        pytest.param("deepseekv2 truncated to 4 layers", "deepseek-v2"),
    ],
)
def test_the_names_of_sources_are_known(cell, name):
    assert published_name(cell) == name
