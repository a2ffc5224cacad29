"""Texts of documents are printable, or the error says where and which character is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from parplan.planner.plan.plan_file import any_plan_from_document, plan_to_document
from parplan.profiles.documents.texts import (
    MOST_NAME,
    PROSE,
    escaped,
    escaped_lines,
    name_of_file,
)
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.machine_catalog import cluster_from_document, load_stack
from parplan.profiles.models.model_catalog import load_model
from tests.helpers.laid_out_plans import laid_out

CONFIGS = Path(__file__).parents[3] / "configs"
UNPRINTABLE = ("\n", "\t", "\x1b", "\u2028", "\u202e")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain 日本 é", "plain 日本 é"),
        ("a\nb\r", "a\\nb\\r"),
        ("\x1b[2J\x07", "\\x1b[2J\\x07"),
        ("\u202eevil\u2028", "\\u202eevil\\u2028"),
        ("back\\slash", "back\\slash"),
    ],
)
def test_characters_that_a_terminal_obeys_are_escaped(text, shown):
    assert escaped(text) == shown
    assert escaped(shown) == shown


def test_lines_stay_lines():
    assert escaped_lines("a\x1b\n\u202eb\n") == "a\\x1b\n\\u202eb\n"


def texts_of(body: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the paths of the texts in a document."""
    if isinstance(body, str):
        yield path
    elif isinstance(body, dict | list):
        for key, value in body.items() if isinstance(body, dict) else enumerate(body):
            yield from texts_of(value, (*path, key))


def with_text(body: Any, path: tuple[Any, ...], text: str) -> Any:
    """Returns a document with another text at a path."""
    if not path:
        return text
    key, *rest = path
    items = body.items() if isinstance(body, dict) else enumerate(body)
    changed = {k: with_text(v, tuple(rest), text) if k == key else v for k, v in items}
    return changed if isinstance(body, dict) else list(changed.values())


def plan_document() -> Any:
    return yaml.safe_load(yaml.safe_dump(plan_to_document(laid_out(pp=2, dp=2, tp=2))))


def packaged(path: str) -> Any:
    return yaml.safe_load((CONFIGS / path).read_text())


def read_by(load: Callable[[str], object], folder: Path) -> Callable[[Any], object]:
    def read(body: Any) -> object:
        path = folder / "file.yaml"
        path.write_text(yaml.safe_dump(body))
        return load(str(path))

    return read


@pytest.mark.parametrize(
    ("body", "load"),
    [
        pytest.param(
            plan_document, lambda _: lambda body: any_plan_from_document(body, "p"), id="plan"
        ),
        pytest.param(
            lambda: packaged("clusters/h100-80gb.yaml"),
            lambda _: lambda body: cluster_from_document(body, "c"),
            id="cluster",
        ),
        pytest.param(
            lambda: packaged("models/llama3-8b.yaml"), lambda f: read_by(load_model, f), id="model"
        ),
        pytest.param(
            lambda: packaged("stacks/nemo.yaml"), lambda f: read_by(load_stack, f), id="stack"
        ),
    ],
)
def test_no_text_of_a_document_may_have_a_control_character(body, load, tmp_path):
    document, read = body(), load(tmp_path)
    by_name = {path[-1]: path for path in texts_of(document)}
    assert by_name
    read(document)
    for name, path in by_name.items():
        for character in UNPRINTABLE:
            if name in PROSE and character in "\n\t":
                continue
            with pytest.raises(ConfigError) as raised:
                read(with_text(document, path, f"a{character}b"))
            assert raised.value.hint, path


def test_the_error_names_the_key_and_the_character():
    with pytest.raises(ConfigError) as raised:
        any_plan_from_document(with_text(plan_document(), ("model", "name"), "a\nb"), "plan.yaml")

    assert "U+000A" in raised.value.message
    assert raised.value.hint == "take that character out"


def test_a_key_of_a_mapping_is_a_name():
    document = plan_document()
    document["layer_plans"] = {f"{key}\nx": value for key, value in document["layer_plans"].items()}
    for stage in document["stages"]:
        for run in stage["layers"]:
            run["plan"] += "\nx"

    with pytest.raises(ConfigError, match=r"U\+000A"):
        any_plan_from_document(document, "plan.yaml")


def test_a_name_has_a_bounded_length():
    document = with_text(plan_document(), ("model", "name"), "x" * (MOST_NAME + 1))

    with pytest.raises(ConfigError, match=f"has {MOST_NAME + 1} characters"):
        any_plan_from_document(document, "plan.yaml")


def test_the_name_of_a_file_is_that_of_its_content_if_it_is_printable():
    assert name_of_file(Path("folder/model.sh")) == "model"
    with pytest.raises(ConfigError, match="control character"):
        name_of_file(Path("a\nb.sh"))
