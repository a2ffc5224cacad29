"""The rules of plain sentences that a parser can check, in docstrings and in statements."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = (
    "cli.py",
    "commands",
    "configs",
    "costmodels",
    "executor",
    "parplan/__init__.py",
    "planner",
    "profiles",
    "report",
)
BESIDE_IT = ("benchmarks", "docs", "examples", "tests")
# A docstring that opens with one of these is a fragment, which the reader has to complete.
FRAGMENT = re.compile(
    r"(Of|Those|What|That|Whose|Which|Whether|How|Where|As|Also|And)\b", re.IGNORECASE
)
MOST_VALUES = 2  # in one assignment
Documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def offences() -> dict[str, list[str]]:
    """Returns the places that break each rule; every file is read once."""
    broken: dict[str, list[str]] = {"openings": [], "assignments": [], "conditionals": []}
    for part in (*PRODUCT, *BESIDE_IT):
        for path in (ROOT / part, *sorted((ROOT / part).rglob("*.py"))):
            if path.is_file():
                file = path.relative_to(ROOT).as_posix()
                tree = ast.parse(path.read_text(encoding="utf-8"))
                broken["openings"] += fragments(file, [tree, *statements(tree)])
                if part in PRODUCT:
                    nodes = list(ast.walk(tree))
                    broken["assignments"] += assignments_of_many(file, nodes)
                    broken["conditionals"] += nested_conditionals(file, nodes)
    return broken


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yields all statements below a node; expressions hold no docstring."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):
            yield child
            yield from statements(child)


def fragments(file: str, nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        text = (ast.get_docstring(node) or "") if isinstance(node, Documented) else ""
        if FRAGMENT.match(text):
            yield f"{file}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}"


def assignments_of_many(file: str, nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            values = node.value.elts if isinstance(node.value, ast.Tuple) else []
            if len(values) > MOST_VALUES:
                yield f"{file}:{node.lineno}: {len(values)} values"


def nested_conditionals(file: str, nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.IfExp):
            parts = (part for child in ast.iter_child_nodes(node) for part in ast.walk(child))
            if any(isinstance(part, ast.IfExp) for part in parts):
                yield f"{file}:{node.lineno}"


def test_docstrings_open_with_sentences_and_a_statement_of_the_product_says_one_thing():
    """No assignment gives three values at once, and no conditional lies inside another."""
    assert offences() == {"openings": [], "assignments": [], "conditionals": []}
