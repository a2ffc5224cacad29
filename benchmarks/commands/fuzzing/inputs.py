"""One hostile input: the files of a folder, the command that reads them, and what its process finds
around it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Program(StrEnum):
    """What is run: `plan`, `python -m parplan.executor`, or the rules by which the executor refuses
    a plan, without a run.
    """

    PLAN = "plan"
    EXECUTOR = "executor"
    RULES = "rules"


class Stream(StrEnum):
    """Where standard output or standard error lead: to a file, to nothing, to a full disk, to a
    reader that has left.
    """

    FILE = "file"
    CLOSED = "closed"
    FULL = "full"
    LEFT = "left"


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One input. Files lie in the folder in which the program runs; `{name}` in arguments is never
    expanded.

    links: name -> target of a symbolic link; folders: empty ones; encoding: of standard output;
    interrupt_s: when SIGINT arrives
    inconsistent: why a plan's parts do not fit together, so that exit code 0 is wrong; empty where
    they do
    """

    kind: str
    number: int
    arguments: tuple[str, ...]
    program: Program = Program.PLAN
    files: Mapping[str, bytes] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    folders: tuple[str, ...] = ()
    environment: Mapping[str, str | None] = field(default_factory=dict)
    stdout: Stream = Stream.FILE
    stderr: Stream = Stream.FILE
    encoding: str = "utf-8"
    interrupt_s: float | None = None
    inconsistent: str = ""

    @property
    def name(self) -> str:
        """The name by which `--replay` takes it."""
        return f"{self.kind}:{self.number}"

    @property
    def size(self) -> int:
        """Bytes of the files that were made for it and of its arguments."""
        return sum(map(len, self.files.values())) + sum(map(len, self.arguments))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How the process of an input ended. code: exit code, minus the signal where one killed it;
    stack: what faulthandler wrote.
    """

    code: int
    stdout: str
    stderr: str
    stack: str
    seconds: float
    cpu_s: float
    hung: bool
    files: Mapping[str, bytes] = field(default_factory=dict)
