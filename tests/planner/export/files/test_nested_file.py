"""Keys of JSON and YAML are arguments, each with its line."""

from __future__ import annotations

import pytest

from parplan.planner.export.fields.arguments import Given
from parplan.planner.export.fields.settings import Settings
from parplan.planner.export.files.nested_file import flag, nested, nested_arguments
from parplan.profiles.errors import ConfigError

JSON = """{
\t"train_batch_size": 64,
\t"zero_optimization": {
\t\t"stage": 3,
\t\t"overlap_comm": true, "offload_param": null},
\t"betas": [0.9, 0.95],
\t"rules": [{"name": "a"}]
}"""
YAML = """usual: &usual {bf16: true}
more:
  <<: *usual
  lr: 3.0e-4
"""


def test_each_key_of_a_json_file_has_its_path_and_its_line():
    assert nested_arguments(JSON, "ds.json") == (
        Given("train_batch_size", ("64",), "ds.json:2"),
        Given("zero_optimization.stage", ("3",), "ds.json:4"),
        Given("zero_optimization.overlap_comm", ("true",), "ds.json:5"),
        Given("betas", ("0.9", "0.95"), "ds.json:6"),
        Given("rules.0.name", ("a",), "ds.json:7"),
    )


def test_merged_keys_of_a_yaml_file_have_the_place_of_their_mapping():
    found = {each.name: each for each in nested_arguments(YAML, "a.yaml")}

    assert found["more.bf16"] == Given("more.bf16", ("true",), "a.yaml:2")
    assert found["more.lr"] == Given("more.lr", ("0.0003",), "a.yaml:4")


def test_a_broken_file_is_refused_with_the_line():
    with pytest.raises(ConfigError, match=r"a\.json:2"):
        nested_arguments('{"a":\n ]', "a.json")


def test_arguments_become_the_document_that_says_them():
    pairs = (("zero.stage", ("3",)), ("zero.overlap", ("true",)), ("betas", ("0.9", "1e-3")))

    assert nested(pairs) == {"zero": {"stage": 3, "overlap": True}, "betas": [0.9, 0.001]}


def test_a_flag_is_written_where_it_is_not_the_default():
    row = flag("a.overlap", "overlap", True)

    assert row.write(Settings(overlap=True)) is None
    assert row.write(Settings(overlap=False)) == ("false",)
    assert row.read(("False",), {}) == {"overlap": False}
    with pytest.raises(ValueError, match="true or false"):
        row.read(("auto",), {})


def test_a_file_of_command_line_arguments_is_none_of_nested_keys():
    assert nested_arguments("MODEL_ARGS:\n  --num-layers: 2\n  --num-layers: 2\n", "a.yaml") == ()
