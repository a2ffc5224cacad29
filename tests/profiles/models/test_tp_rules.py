"""A dictionary of tensor parallelism: its file, and the calls that its patterns name."""

from __future__ import annotations

import pytest

from parplan.profiles.errors import ConfigError
from parplan.profiles.models.tp_rules import TpRole, TpRules, read_tp_rules

RULES = TpRules(
    column=("h.*.fc1",), row=("h.*.fc2", "h.0.attn.weight"), replicated=("h.1.attn", "*.norm")
)


@pytest.mark.parametrize(
    ("path", "parameters", "role"),
    [
        ("h.0.fc1", (), TpRole.COLUMN),
        ("h.12.fc2", (), TpRole.ROW),
        ("h.0.attn", ("h.0.attn.weight",), TpRole.ROW),
        ("h.1.attn", (), TpRole.REPLICATED),
        ("h.1.attn.out", ("h.1.attn.out.weight",), TpRole.REPLICATED),
        ("h.1.norm", (), TpRole.REPLICATED),
        ("h.1.attention", (), None),
        ("h.0.fc1.inner", (), None),  # a container names only what is replicated
    ],
)
def test_a_pattern_names_a_submodule_or_a_parameter(path, parameters, role):
    found = RULES.role(path, parameters)

    assert (found and found[0]) == role


def test_a_file_has_lists_of_patterns_by_role(tmp_path):
    file = tmp_path / "rules.yaml"
    file.write_text("column: [h.*.fc1]\nvocabulary: [wte, head]\npointwise: [h.*.act]\n")

    rules = read_tp_rules(file)

    assert rules == TpRules(column=("h.*.fc1",), vocabulary=("wte", "head"), pointwise=("h.*.act",))
    assert rules.pointwise_pattern("h.3.act") == "h.*.act"
    assert rules.pointwise_pattern("h.3.fc1") is None


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("columns: [a]\n", "columns"),
        ("column: a\n", "column"),
        ("attributes: [num_heads]\n", "attributes"),
        ("{}\n", "--tp-rules has no pattern"),
        ("column: []\n", "--tp-rules has no pattern"),
    ],
)
def test_files_that_are_no_dictionary_are_errors(tmp_path, text, match):
    file = tmp_path / "rules.yaml"
    file.write_text(text)

    with pytest.raises(ConfigError, match=match):
        read_tp_rules(file)


def test_a_file_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        read_tp_rules(tmp_path / "none.yaml")
