"""Settings that a row leaves out come from where they stand; a stated cell is never replaced."""

from __future__ import annotations

import re

import pytest

from parplan.planner.validation.row_cells import NEEDED, OPTIONAL
from parplan.planner.validation.row_completion import OWN_FIGURES, RECIPE, SHIPPED, completed
from parplan.planner.validation.row_recipes import RECIPES
from parplan.planner.validation.step_rows import read_table

ROW = dict.fromkeys(OPTIONAL, "") | {
    "id": "made-1",
    "framework": "NeMo",
    "n_gpus": "16",
    "layers": "8",
    "seq_len": "1024",
    "global_batch": "",
    "dp": "",
    "tp": "2",
    "pp": "2",
    "cp": "2",
}


def test_the_data_parallel_degree_is_what_the_other_axes_leave():
    row, taken = completed(ROW)

    assert row["dp"] == "2"
    assert taken == (OWN_FIGURES,)
    assert completed({**ROW, "dp": "4"})[0]["dp"] == "4"
    assert completed({**ROW, "tp": "3"})[0]["dp"] == ""


def test_the_batch_is_tokens_of_a_step_where_these_are_whole_sequences():
    measured = {"tokens_per_s_per_gpu": "1000", "step_time_s": "2.048"}

    assert completed({**ROW, **measured})[0]["global_batch"] == "32"
    assert completed({**ROW, **measured, "step_time_s": "2.08"})[0]["global_batch"] == ""
    assert completed({**ROW, **measured, "global_batch": "8"})[0]["global_batch"] == "8"


def test_the_step_time_follows_from_tokens_and_batch_unless_it_is_stated():
    rate = {"tokens_per_s_per_gpu": "1000", "global_batch": "32"}

    assert completed({**ROW, **rate})[0]["derived_step_time_s"] == "2.048"
    assert completed({**ROW, **rate, "step_time_s": "3"})[0]["derived_step_time_s"] == ""


def test_a_row_of_the_shipped_table_brings_its_settings_but_no_measurement():
    shipped = next(row for row in read_table() if row["id"] == "tinyllama-1.1b")
    bare = dict.fromkeys(OPTIONAL, "") | {
        "id": shipped["id"],
        "framework": shipped["framework"],
        **dict.fromkeys(("n_gpus", "seq_len", "global_batch", "dp", "tp", "pp"), ""),
        "vocab": "7",
    }

    row, taken = completed(bare)

    assert taken == (SHIPPED,)
    assert (row["global_batch"], row["micro_batch"]) == ("1024", "8")
    assert row["vocab"] == "7"
    assert row["step_time_s"] == ""


def test_the_recipe_of_a_source_fills_the_rest():
    row, taken = completed({**ROW, "id": "nemoA100-5b-1n", "tp": "", "pp": "", "cp": ""})

    assert (row["tp"], row["pp"], row["dp"], row["global_batch"]) == ("1", "1", "16", "2048")
    assert taken == (RECIPE, OWN_FIGURES)


@pytest.mark.parametrize(
    ("row_id", "dtype"),
    [
        pytest.param("mbridge-b200-main-pretrain", "fp8-cs", id="the-figure"),
        pytest.param("mbridge-b200-alt-pretrain", "fp8-cs/mx", id="in-parentheses"),
    ],
)
def test_the_first_figure_of_a_table_of_two_recipes_scales_by_tensor(row_id, dtype):
    assert completed({**ROW, "id": row_id, "dtype": "fp8-cs/mx"})[0]["dtype"] == dtype


def test_of_two_recipes_the_first_goes_before_and_the_second_adds():
    row, _ = completed({**ROW, "id": "mbcard-moonlight-16b-a3b-peft-H100"})

    assert (row["moments"], row["lora_rank"]) == ("bf16", "8")


def test_the_letters_of_a_hybrid_count_its_layers():
    row, _ = completed({**ROW, "layers": "", "layer_pattern": "M-|M*"})

    assert row["layers"] == "4"


@pytest.mark.parametrize(("pattern", "settings"), RECIPES, ids=lambda each: str(each)[:40])
def test_a_recipe_has_cells_that_rows_have(pattern, settings):
    re.compile(pattern)
    assert settings.keys() <= {*NEEDED, *OPTIONAL}
