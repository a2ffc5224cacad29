"""docs/equations.md and the code that cites it: labels are on both sides, and names exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).resolve()
ROOT = next(folder for folder in HERE.parents if (folder / "docs/equations.md").exists())
PAGE = (ROOT / "docs/equations.md").read_text(encoding="utf-8")
KEYS = ("Symbols", "Source", "Code", "Test")

_CITATION = re.compile(
    r"\bEQUATIONS\b(?: ([A-Z]\d*\b(?:, [A-Z]\d*\b)*))?(-| (?:to|and|or) [A-Z]\d)?"
)
_ENTRY = re.compile(
    r"^### (?P<label>[A-Z]\d+)\. (?P<title>.+)\n\n"
    r"```text\n(?P<formula>[^`]+)```\n\n"
    r"(?P<lines>(?:.+\n)+)(?=\n|\Z)",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Entry:
    """One label of the page; `lines` are its four lines by key, each joined to one."""

    label: str
    title: str
    formula: str
    lines: dict[str, str]

    @property
    def code(self) -> list[tuple[str, str]]:
        """Each module that it names, and what in it."""
        return re.findall(r"`([\w/]+\.py)::([\w.]+)`", self.lines["Code"])

    @property
    def tests(self) -> list[str]:
        return re.findall(r"`([\w/]+\.py)`", self.lines["Test"])


def entry_of(found: re.Match[str]) -> Entry:
    joined = found["lines"].replace("\n  ", " ").splitlines()
    pairs = [re.fullmatch(r"- (\w+): (\S.*)", line) for line in joined]
    assert [pair and pair[1] for pair in pairs] == list(KEYS), (
        f"{found['label']} needs the lines {KEYS}, found {joined}"
    )
    return Entry(
        found["label"],
        found["title"],
        found["formula"],
        {pair[1]: pair[2] for pair in pairs if pair},
    )


@cache
def entries() -> list[Entry]:
    return [entry_of(found) for found in _ENTRY.finditer(PAGE)]


def modules() -> list[Path]:
    """Returns every module of the product: those at the root and those of its packages."""
    packages = (
        folder
        for folder in ROOT.iterdir()
        if (folder / "__init__.py").exists() and folder.name != "tests"
    )
    return sorted(
        [*ROOT.glob("*.py"), *(path for folder in packages for path in folder.rglob("*.py"))]
    )


def others() -> list[Path]:
    """Returns the other files that cite labels: tests, benchmarks, configurations and pages."""
    found = [
        *ROOT.glob("tests/**/*.py"),
        *ROOT.glob("benchmarks/**/*.py"),
        *ROOT.glob("configs/**/*.yaml"),
        *ROOT.glob("docs/**/*.md"),
    ]
    return [path for path in found if path not in (HERE, ROOT / "docs/equations.md")]


def cited(text: str) -> Iterator[str]:
    """The labels that a text cites; what is no exact label comes as it stands there."""
    for found in _CITATION.finditer(re.sub(r"\s*\n\s*(?:# ?)?", " ", text)):
        labels, more = found.groups()
        yield from [found[0]] if labels is None or more else labels.split(", ")


@cache
def cited_in(path: Path) -> frozenset[str]:
    return frozenset(cited(path.read_text(encoding="utf-8")))


@cache
def names_in(path: Path) -> frozenset[str]:
    """The functions and classes of a module, and `Class.method`."""
    top = [
        node
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    ]
    classes = [node for node in top if isinstance(node, ast.ClassDef)]
    methods = {
        f"{node.name}.{own.name}"
        for node in classes
        for own in node.body
        if isinstance(own, ast.FunctionDef)
    }
    return frozenset(methods.union(node.name for node in top))


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        pytest.param("t = n / W (EQUATIONS C4).", ["C4"], id="one"),
        pytest.param("(EQUATIONS C1, C2; Thakur 2005)", ["C1", "C2"], id="several"),
        pytest.param(
            "as of the paper (EQUATIONS\nM3) and (EQUATIONS K4)", ["M3", "K4"], id="over-two-lines"
        ),
        pytest.param("x = 1  # of EQUATIONS\n    # O1, SCP", ["O1"], id="in-a-comment"),
        pytest.param("EQUATIONS I4, with virtual stages", ["I4"], id="words-behind"),
        pytest.param(
            "EQUATIONS P, last paragraph", ["P"], id="a-letter-alone-is-a-label-that-no-page-has"
        ),
        pytest.param("(EQUATIONS, last paragraph)", ["EQUATIONS"], id="no-label"),
        pytest.param("EQUATIONS C1-C6", ["EQUATIONS C1-"], id="a-range"),
        pytest.param("EQUATIONS O1 to O6", ["EQUATIONS O1 to O6"], id="a-range-in-words"),
    ],
)
def test_citations_are_exact_labels(text, labels):
    assert list(cited(text)) == labels


def test_every_label_that_is_cited_is_on_the_page():
    known = {entry.label for entry in entries()}

    assert [
        (str(path.relative_to(ROOT)), label)
        for path in (*modules(), *others())
        for label in sorted(cited_in(path) - known)
    ] == []


def test_every_module_that_a_label_names_cites_it():
    product = modules()
    missing = [
        (entry.label, module)
        for entry in entries()
        for module, _ in entry.code
        if ROOT / module not in product or entry.label not in cited_in(ROOT / module)
    ]

    assert missing == []
    assert [entry.label for entry in entries() if not entry.code] == []


def test_every_function_that_a_label_names_exists():
    gone = [
        (entry.label, module, name)
        for entry in entries()
        for module, name in entry.code
        if not (ROOT / module).exists() or name not in names_in(ROOT / module)
    ]

    assert gone == []


def test_every_test_and_every_other_path_on_the_page_exists():
    assert [entry.label for entry in entries() if not entry.tests] == []
    assert [
        path
        for entry in entries()
        for path in entry.tests
        if not Path(path).name.startswith("test_")
    ] == []
    assert (
        sorted(
            {
                path
                for path in re.findall(r"[\w/.]+\.(?:py|md)\b", PAGE)
                if not (ROOT / path).exists()
            }
        )
        == []
    )


def test_every_heading_of_a_label_is_an_entry_with_its_own_place_in_the_table_of_contents():
    listed = re.findall(r"^\| .*$", PAGE.split("## Notation")[0], re.MULTILINE)
    links = [link for row in listed for link in re.findall(r"\[([A-Z]\d+)\]\(#(\S+)\)", row)]
    headings = re.findall(r"^### (.*)$", PAGE, re.MULTILINE)

    assert [f"{entry.label}. {entry.title}" for entry in entries()] == headings
    assert links == [
        (heading.split(".")[0], re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-"))
        for heading in headings
    ]
    assert len({entry.label for entry in entries()}) == len(headings)


def test_labels_are_counted_from_one_under_the_heading_of_their_letter():
    for section in PAGE.split("\n## ")[2:]:
        letter, labels = section[0], re.findall(r"^### ([A-Z]\d+)\.", section, re.MULTILINE)
        assert section[1] == "." or not labels
        assert labels == [f"{letter}{number}" for number in range(1, len(labels) + 1)]


def test_the_page_is_ascii():
    assert PAGE.isascii()
