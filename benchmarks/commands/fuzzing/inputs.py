"""One hostile input: the files of a folder, the command that reads them, and its surroundings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Program(StrEnum):
    """The program of an input.

    It is `plan`, `python -m parplan.executor`, or the executor's rules on a plan, without a run.
    """

    PLAN = "plan"
    EXECUTOR = "executor"
    RULES = "rules"


class Stream(StrEnum):
    """The target of standard output or error: a file, nothing, a full disk, or a closed pipe."""

    FILE = "file"
    CLOSED = "closed"
    FULL = "full"
    LEFT = "left"


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One input, whose files lie in the program's working folder.

    `{name}` in arguments is never expanded.

    links         name -> target of a symbolic link
    folders       empty folders
    pipes         named pipes without a writer
    encoding      encoding of standard output
    interrupt_s   the time of SIGINT
    inconsistent  the inconsistency of the plan's parts, for which exit code 0 is wrong; "" without
    outputs       files, and folders of files, that are judged
    """

    kind: str
    number: int
    arguments: tuple[str, ...]
    program: Program = Program.PLAN
    files: Mapping[str, bytes] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    folders: tuple[str, ...] = ()
    pipes: tuple[str, ...] = ()
    environment: Mapping[str, str | None] = field(default_factory=dict)
    stdout: Stream = Stream.FILE
    stderr: Stream = Stream.FILE
    encoding: str = "utf-8"
    interrupt_s: float | None = None
    inconsistent: str = ""
    outputs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name that `--replay` takes."""
        return f"{self.kind}:{self.number}"

    @property
    def size(self) -> int:
        """Bytes of the input's files and arguments."""
        return sum(map(len, self.files.values())) + sum(map(len, self.arguments))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of an input's process.

    code   exit code, minus the signal if one killed it
    peak_bytes  most resident memory of the process
    stack  the output of faulthandler
    """

    code: int
    stdout: str
    stderr: str
    stack: str
    seconds: float
    cpu_s: float
    hung: bool
    peak_bytes: int = 0
    files: Mapping[str, bytes] = field(default_factory=dict)
