"""Commands in the fenced blocks of README and docs, each with the output shown below it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
PROGRAMS = ("plan", "torchrun", "python", "pip", "pytest")
_NUMBER = re.compile(r"[-+]?\d[\d,]*(\.\d+)?")


@dataclass(frozen=True)
class Documented:
    """A documented command without its comment, its place, and its shown output.

    The output is the lines that are shown after a `$` line.
    """

    command: str
    where: str
    output: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        return shlex.split(self.command)


def documented() -> list[Documented]:
    """Every command of every block, in the order of the files."""
    return [command for path in FILES for block in _blocks(path) for command in _commands(block)]


def _blocks(path: Path) -> Iterator[list[tuple[str, str]]]:
    """The lines of each block that names no other language, each with its place."""
    block: list[tuple[str, str]] | None = None
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.startswith("```"):
            if block is not None:
                block.append((line, f"{path.relative_to(ROOT)}:{number}"))
        elif block is None:
            block = []
            skipped = line[3:].strip() not in ("", "sh", "bash", "console")
        else:
            if not skipped:
                yield block
            block = None


def _commands(block: list[tuple[str, str]]) -> Iterator[Documented]:
    starts = [index for index, (line, _) in enumerate(block) if line.startswith("$ ")]
    for start, end in pairwise([*starts, len(block)]):
        line, where = block[start]
        yield Documented(line[2:], where, tuple(text for text, _ in block[start + 1 : end]))
    for line, where in block if not starts else ():
        for part in re.split(r"\s#\s", line)[0].split("&&"):
            if part.split() and part.split()[0] in PROGRAMS:
                yield Documented(" ".join(part.split()), where)


def shape(lines: Iterator[str] | list[str] | tuple[str, ...]) -> list[str]:
    """The lines without their numbers, and without the blanks that make columns of them."""
    return [" ".join(_NUMBER.sub("#", line).split()) for line in lines]
