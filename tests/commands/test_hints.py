"""Every option and command that a hint of the program may name is there.

test_printed_commands.py follows what commands print.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from parplan.commands import train
from parplan.profiles import profile_comm
from tests.helpers.printed_commands import (
    Mention,
    commands,
    launchers_arguments,
    mentions,
    options_in,
    options_of,
)

ROOT = Path(__file__).parents[2]
ROOMS = ("commands", "report", "executor", "planner", "costmodels", "profiles")
# Options in the hints about other programs than ours: numactl, nsys, nvidia-smi and torchrun.
OF_OTHERS = frozenset(
    (
        "--format",
        "--hardware",
        "--max-restarts",
        "--nproc-per-node",
        "--report",
        "--trace",
        "--type",
    )
)
QUOTED = re.compile(r"(?:[`'(]|with: )plan ([a-z][a-z-]*)")
NAMES = re.compile(rf"hint=|plan [a-z -]*--|{QUOTED.pattern}")  # in a module to read
HINTS, BEHIND_COMMANDS = 200, 20  # at least as many are found


@dataclass(frozen=True, slots=True)
class Text:
    """A string of the source that is no docstring; what is put into it stands as X."""

    where: str
    text: str
    is_hint: bool


@cache
def sentences() -> tuple[Text, ...]:
    """The strings of the source that may name a command or an option."""
    paths = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    return tuple(text for path in paths for text in _texts_of(path))


def _texts_of(path: Path) -> Iterator[Text]:
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source if NAMES.search(source) else "")
    passed_over, of_hints = set(), set()
    for node in ast.walk(tree):  # a node comes before those inside it
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            passed_over.add(node.value)
        elif isinstance(node, ast.keyword) and node.arg == "hint":
            of_hints.add(node)
        inside = ast.iter_child_nodes(node)
        if node in of_hints:
            of_hints.update(inside)
        text = None
        if isinstance(node, ast.JoinedStr):
            passed_over.update(node.values)
            parts = (each.value if isinstance(each, ast.Constant) else "X" for each in node.values)
            text = "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = None if node in passed_over else node.value
        if text is not None and ("plan " in text or "--" in text):
            yield Text(f"{path.relative_to(ROOT)}:{node.lineno}", text, node in of_hints)


def known(mention: Mention) -> bool:
    if mention.command is not None:
        return mention.option in options_of(mention.command)
    ours = (*map(options_of, commands()), *map(options_in, (train.main, profile_comm.main)))
    return mention.option in OF_OTHERS.union(launchers_arguments(), *ours)


def test_every_option_that_a_hint_names_is_there():
    hints = [each for each in sentences() if each.is_hint]

    assert len(hints) > HINTS
    assert not [each for each in hints if not all(map(known, mentions(each.text)))]


def test_every_option_that_stands_behind_a_command_is_one_of_that_command():
    behind = [
        (mention, each.where)
        for each in sentences()
        for mention in mentions(each.text)
        if mention.command is not None
    ]

    assert len(behind) > BEHIND_COMMANDS
    assert not [each for each in behind if not known(each[0])]


def test_every_command_that_a_sentence_quotes_is_there():
    quoted = [(name, each.where) for each in sentences() for name in QUOTED.findall(each.text)]

    assert len(quoted) > BEHIND_COMMANDS
    assert not [each for each in quoted if each[0] not in commands()]
