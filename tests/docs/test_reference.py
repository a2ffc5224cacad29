"""The pages of docs/reference repeat the code, and every link of README and docs has a target."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from docs.generate import (
    REFERENCE,
    commands_page,
    fields_page,
    pages,
    split_docstring,
    written_meanings,
)
from tests.helpers.documented import FILES, ROOT

NAMES = ("commands.md", "json.md", "plan-fields.md", "profile-fields.md", "run-fields.md")
LINKING = (*FILES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", ROOT / "CHANGELOG.md")
TOP = (
    *("commands", "report", "executor", "planner", "costmodels", "profiles", "configs"),
    *("tests", "benchmarks", "examples", "docs"),
)
PAGES = (*FILES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", ROOT / "benchmarks/README.md")
SCHEMA = {
    "title": "File",
    "properties": {
        "mesh": {"$ref": "#/$defs/Mesh"},
        "plans": {"additionalProperties": {"$ref": "#/$defs/Mesh"}, "type": "object"},
    },
    "$defs": {
        "Mesh": {
            "title": "Mesh",
            "description": "Degrees.\n\npp   pipeline stages",
            "required": ["pp"],
            "properties": {
                "pp": {"type": "integer"},
                "dp": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
            },
        }
    },
}


@pytest.fixture(scope="module")
def generated():
    return pages()


def test_every_generated_page_is_compared(generated):
    assert set(generated) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_generated_page_is_what_the_code_gives(name, generated):
    written = (REFERENCE / name).read_text(encoding="ascii")

    assert written == generated[name], (
        f"docs/reference/{name} is out of date: run python -m docs.generate"
    )


def test_a_new_option_changes_the_page_of_commands():
    command = click.Command(
        "show", params=[click.Option(["--plot"], metavar="FILE|-", help="Draw it.")]
    )

    page = commands_page({"plan show": command})

    assert "| `--plot FILE\\|-` | Draw it. |" in page


def test_a_page_of_fields_has_their_types_their_defaults_and_their_meanings():
    page = fields_page("test", SCHEMA, "| `mesh.dp` | data parallel ranks |")

    assert "| `mesh` | [Mesh](#mesh) |  |  |" in page
    assert "| `plans` | mapping of [Mesh](#mesh) |  |  |" in page
    assert "| `pp` | integer | required | pipeline stages |" in page
    assert "| `dp` | integer or null | null | data parallel ranks |" in page


def test_the_later_fields_of_a_row_share_the_path_of_the_first():
    assert written_meanings("| `plans.NAME.pp`, `dp` | ranks |", SCHEMA) == {
        ("Mesh", "pp"): "ranks",
        ("Mesh", "dp"): "ranks",
    }


def test_a_page_that_explains_a_field_that_is_gone_is_refused():
    with pytest.raises(KeyError, match="tp"):
        written_meanings("| `mesh.tp` | tensor parallel ranks |", SCHEMA)


def test_a_docstring_is_split_into_its_sentences_and_its_fields():
    docstring = (
        "A mesh.\n\npp, dp   how many ranks\n         each axis has\n"
        "tp: tensor parallel\n\nIt has no names."
    )

    assert split_docstring(docstring, {"pp", "dp", "tp"}) == (
        "A mesh.\n\nIt has no names.",
        {
            "pp": "how many ranks each axis has",
            "dp": "how many ranks each axis has",
            "tp": "tensor parallel",
        },
    )


@pytest.mark.parametrize("path", LINKING, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_has_a_target(path):
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        name, _, fragment = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        assert file.exists(), f"{path.name} links to {target}"
        if fragment:
            assert fragment in _anchors(file.read_text(encoding="utf-8")), (
                f"{path.name} links to {target}"
            )


def _anchors(text: str) -> set[str]:
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE
    )
    return {re.sub(r"[^a-z0-9 _-]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_path_and_module_on_a_page_exists(path):
    text = path.read_text(encoding="utf-8")
    paths = set(re.findall(rf"\b(?:{'|'.join(TOP)})/[\w/.-]*\w\b(?![*<])", text))
    named = re.findall(r"\bparplan(?!\.yaml\b)(?:\.[a-z]\w+)+", text)
    modules = {name.replace(".", "/") for name in named}

    assert sorted(name for name in paths if not (ROOT / name).exists()) == []
    assert sorted(name for name in modules if not _is_module_or_in_one(ROOT / name)) == []


def _is_module_or_in_one(path: Path) -> bool:
    """True for a package, a module, and a name that a module or package defines."""
    if path.is_dir() or path.with_suffix(".py").exists():
        return True
    module = path.parent.with_suffix(".py")
    return (
        module.exists()
        and re.search(
            rf"^(?:def|class) {path.name}\b", module.read_text(encoding="utf-8"), re.MULTILINE
        )
        is not None
    )


def test_the_tree_in_contributing_names_every_room():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    tree = re.search(r"```text\n(cli\.py.*?)```", page, re.DOTALL)
    assert tree
    shown, above = [], []
    for indent, name in re.findall(r"^( *)(\w+)/ {2,}\S", tree[1], re.MULTILINE):
        above = [*above[: len(indent) // 2], name]
        shown.append("/".join(above))

    rooms = {
        path.parent.relative_to(ROOT).as_posix()
        for top in TOP[:7]
        for path in (ROOT / top).rglob("*.py")
    }
    assert sorted(shown) == sorted(rooms)


def test_the_readme_stays_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) < 900
