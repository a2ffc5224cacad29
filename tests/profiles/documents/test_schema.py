"""Documents become dataclasses, or errors that name the file, the key's path and a near key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import pytest

from parplan.profiles.documents.schema import document, json_schema, parse
from parplan.profiles.errors import ConfigError

_FORBID = {"extra": "forbid"}


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    __pydantic_config__ = _FORBID

    size: int
    colour: Colour = Colour.RED

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"size is {self.size}, it must be at least 1", hint="use 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    __pydantic_config__ = _FORBID

    name: str
    leaves: tuple[Leaf, ...] = ()
    by_name: Mapping[str, Leaf] = field(default_factory=dict)
    best: Leaf | None = None


def test_a_document_becomes_nested_dataclasses():
    body = {"name": "oak", "leaves": [{"size": 1}], "by_name": {"a": {"size": 2, "colour": "red"}}}

    tree = parse(Tree, body, "tree.yaml")

    assert tree == Tree(name="oak", leaves=(Leaf(size=1),), by_name={"a": Leaf(size=2)})


def test_a_dataclass_becomes_plain_values_and_comes_back_equal():
    tree = Tree(name="oak", leaves=(Leaf(size=1),), by_name={"a": Leaf(size=2)}, best=Leaf(size=3))

    body = document(tree)

    assert body == {
        "name": "oak",
        "leaves": [{"size": 1, "colour": "red"}],
        "by_name": {"a": {"size": 2, "colour": "red"}},
        "best": {"size": 3, "colour": "red"},
    }
    assert type(body["best"]["colour"]) is str
    assert parse(Tree, body, "tree.yaml") == tree


@pytest.mark.parametrize(
    ("body", "message", "hint"),
    [
        pytest.param({}, "t.yaml: name is missing", "add name", id="missing-key"),
        pytest.param(
            {"name": "oak", "leafs": []},
            "t.yaml: unknown key leafs",
            "did you mean 'leaves'?",
            id="unknown-key",
        ),
        pytest.param(
            {"nam": "oak"},
            "t.yaml: unknown key nam",
            "did you mean 'name'?",
            id="misspelt-and-so-missing",
        ),
        pytest.param(
            {"name": "oak", "zzzz": 1},
            "t.yaml: unknown key zzzz",
            "known keys: name, leaves, by_name, best",
            id="nothing-near",
        ),
        pytest.param(
            {"name": "oak", "leaves": [{"size": 1}, {"siz": 1}]},
            "t.yaml: unknown key leaves.1.siz",
            "did you mean 'size'?",
            id="path-through-a-list",
        ),
        pytest.param(
            {"name": "oak", "by_name": {"a": {"size": 1, "colr": 1}}},
            "t.yaml: unknown key by_name.a.colr",
            "did you mean 'colour'?",
            id="path-through-a-mapping",
        ),
        pytest.param(
            {"name": "oak", "best": {"sizes": 1}},
            "t.yaml: unknown key best.sizes",
            "did you mean 'size'?",
            id="path-through-none-or",
        ),
        pytest.param(
            {"name": "oak", "best": {"size": 0}},
            "t.yaml: size is 0, it must be at least 1",
            "use 1",
            id="refused-by-the-dataclass",
        ),
        pytest.param(
            None,
            "t.yaml: the document must be a mapping, found nothing",
            "correct that value",
            id="empty-file",
        ),
        pytest.param(
            {"name": "oak", "best": [1]},
            "t.yaml: best must be a mapping, found a list",
            "correct that value",
            id="list-for-mapping",
        ),
    ],
)
def test_a_wrong_document_is_an_error_with_the_path_and_a_hint(body, message, hint):
    with pytest.raises(ConfigError) as caught:
        parse(Tree, body, "t.yaml")

    assert (caught.value.message, caught.value.hint) == (message, hint)


def test_a_wrong_type_says_what_was_found():
    with pytest.raises(
        ConfigError,
        match=r"t\.yaml: leaves\.0\.size: input should be a valid integer.*, found 'big'",
    ):
        parse(Tree, {"name": "oak", "leaves": [{"size": "big"}]}, "t.yaml")


def test_a_value_outside_a_closed_set_says_the_set():
    with pytest.raises(
        ConfigError, match=r"t\.yaml: best\.colour: input should be 'red', found 'blue'"
    ):
        parse(Tree, {"name": "oak", "best": {"size": 1, "colour": "blue"}}, "t.yaml")


def test_the_json_schema_names_the_required_keys_and_forbids_others():
    schema = json_schema(Tree)

    assert schema["required"] == ["name"]
    assert schema["additionalProperties"] is False
