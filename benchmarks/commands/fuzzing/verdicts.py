"""The verdict on an ended process: fine, or one of the failures, grouped by cause."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path

from benchmarks.commands.fuzzing.injected import injected, obeyed
from benchmarks.commands.fuzzing.inputs import Ended, Input, Program, Stream

FINE = (0, 2, 3, 4, 5, 130)
WITH_ERROR = (2, 3, 4)
MOST_CPU_S = 20.0
MOST_BYTES = 2 * 2**30
READER_LEFT = (120, 141)  # exit codes of a pipe without a reader
_FRAME = re.compile(r'^  File "([^"]+)", line (\d+),? in (\S+)', re.MULTILINE)
_ERROR = re.compile(
    r"^(\w[\w.]*(?:Error|Exception|Interrupt|Exit|Warning)\b.*|[\w.]+: .*)$", re.MULTILINE
)
_WARNING = re.compile(r"^.*\b(\w+Warning: .*)$", re.MULTILINE)
_OWN = re.compile(r"/(?:cli\w*\.py|(?:planner|executor|profiles|costmodels|configs)/)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A verdict.

    failure  the class of failures; "" if the input was handled
    cause    groups the failures
    notes    remarks that are no failures
    """

    failure: str = ""
    cause: str = ""
    notes: tuple[str, ...] = ()


def judge(given: Input, ended: Ended) -> Verdict:
    """Return the first failure, worst first."""
    if given.interrupt_s is not None and _starting(ended):
        return Verdict(notes=("interrupted before the command began",))
    for failure, cause in (
        _death(ended),
        _cost(given, ended),
        _text(ended),
        _code(given, ended),
        _errors(given, ended),
        _silent(given, ended),
        _written(given, ended),
    ):
        if failure:
            return Verdict(failure=failure, cause=cause)
    return Verdict(notes=tuple(_notes(given, ended)))


def _starting(ended: Ended) -> bool:
    """Return True if SIGINT came while Python imported the command, which no command can handle."""
    interrupted = ended.code == 1 and ended.stderr.rstrip().endswith("KeyboardInterrupt")
    return interrupted and "click/core.py" not in ended.stderr


def _death(ended: Ended) -> tuple[str, str]:
    if ended.hung:
        return "hang", _innermost(ended.stack, "no frame")
    if ended.code in (-signal.SIGXCPU, -signal.SIGKILL):  # at the limit of CPU seconds
        return "slow", _innermost(ended.stack, "no frame")
    if ended.code < 0 and -ended.code not in (signal.SIGINT, signal.SIGPIPE):
        return (
            "signal",
            f"{signal.Signals(-ended.code).name} {_innermost(ended.stack, 'no layout')}",
        )
    return "", ""


def _cost(given: Input, ended: Ended) -> tuple[str, str]:
    if ended.cpu_s > MOST_CPU_S:
        return "slow", f"{_command(given)} of {given.kind}"
    if ended.peak_bytes > MOST_BYTES:
        return "memory", f"{_command(given)} of {given.kind}"
    return "", ""


def _text(ended: Ended) -> tuple[str, str]:
    for text in (ended.stderr, ended.stdout):
        if "Traceback (most recent call last)" in text:
            tail = text[text.rindex("Traceback (most recent call last)") :]
            raised = _ERROR.findall(tail)
            kind = (raised[-1] if raised else "?").split(":")[0].rpartition(".")[2]
            return "traceback", f"{kind} {_last(tail)}"
        if "Exception ignored" in text:
            return "traceback", _normal(text[text.index("Exception ignored") :])
        warning = _WARNING.search(text)
        if warning:
            return "warning", _normal(warning[1])
    return "", ""


def _code(given: Input, ended: Ended) -> tuple[str, str]:
    fine = ended.code in FINE or ended.code == -signal.SIGINT
    fine = fine or (
        Stream.LEFT in (given.stdout, given.stderr)
        and (ended.code in READER_LEFT or ended.code == -signal.SIGPIPE)
    )
    return (
        ("", "")
        if fine
        else ("exit code", f"{ended.code} of {_command(given)}: {_normal(_first(ended.stderr))}")
    )


def _errors(given: Input, ended: Ended) -> tuple[str, str]:
    """Check for exactly one line that begins with error:.

    Applies if an error occurred and standard error can be read.
    """
    if given.stderr is not Stream.FILE or ended.code not in WITH_ERROR:
        return "", ""
    count = len(_lines(ended.stderr, "error:"))
    if count == 1 or (
        count == 0 and "check" in given.arguments and ended.stdout
    ):  # a check's verdict is a result, no error
        return "", ""
    return f"{count} error lines", f"{_command(given)}: {_normal(_first(ended.stderr))}"


def _silent(given: Input, ended: Ended) -> tuple[str, str]:
    if ended.code == 0 and given.inconsistent:
        return "inconsistent", f"{_command(given)}: {_normal(given.inconsistent)}"
    if ended.code == 0 and given.stdout is Stream.FULL and "--help" not in given.arguments:
        return "lost output", _command(given)
    return "", ""


def _written(given: Input, ended: Ended) -> tuple[str, str]:
    """Check that no name wrote a line of a file, or a control character for the terminal."""
    for name, content in ended.files.items() if given.outputs else ():
        wrong = injected(name, content)
        if wrong:
            return "injected", f"{_command(given)} {Path(name).suffix}: {_normal(wrong)}"
    if given.outputs:
        sign = obeyed(ended.stdout + ended.stderr)
        return ("control", f"{_command(given)}: {sign}") if sign else ("", "")
    return "", ""


def _notes(given: Input, ended: Ended) -> list[str]:
    notes = []
    if (
        given.stderr is Stream.FILE
        and ended.code in (2, 3)
        and _lines(ended.stderr, "error:")
        and not _lines(ended.stderr, "hint:")
    ):
        notes.append("error without a hint")
    if "\x1b" in ended.stderr or "\x1b" in ended.stdout:
        notes.append("escape characters in the output")
    return notes


def _command(given: Input) -> str:
    known = (
        "estimate",
        "show",
        "check",
        "trace",
        "compare",
        "validate",
        "profile",
        "calibrate",
        "tokenize",
        "explain",
        "max-model",
        "read",
        "import",
        "init",
        "export",
        "diff",
    )
    if given.program is not Program.PLAN:
        return given.program.value
    return next((word for word in given.arguments[:1] if word in known), "plan")


def _last(tail: str) -> str:
    frames = _FRAME.findall(tail)
    ours = [frame for frame in frames if _OWN.search(frame[0])]
    if not frames:
        return "no frame"
    shown = _frame(frames[-1])
    return shown if frames[-1] in ours[-1:] or not ours else f"{_frame(ours[-1])} > {shown}"


def _innermost(stack: str, otherwise: str) -> str:
    """Return the innermost of our own frames in a stack of faulthandler, innermost first."""
    frames = _FRAME.findall(stack.partition("Current thread")[2] or stack)
    ours = [frame for frame in frames if _OWN.search(frame[0]) and "fuzzing" not in frame[0]]
    if not frames:
        return otherwise
    return _frame(ours[0]) if ours else _frame(frames[0])


def _frame(frame: tuple[str, str, str]) -> str:
    path, line, name = frame
    for part in ("/site-packages/", "/lib/python3"):
        if part in path:
            return f"{path.rpartition(part)[2]} {name}"
    short = re.sub(
        r"^.*?/((?:planner|executor|profiles|costmodels|configs|benchmarks)/.*|cli\w*\.py)$",
        r"\1",
        path,
    )
    return f"{short}:{line} {name}"


def _lines(text: str, start: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(start)]


def _first(text: str) -> str:
    return next((line for line in text.splitlines() if line.strip()), "nothing on standard error")


def _normal(text: str) -> str:
    """Return a line without the parts that differ between inputs of one cause."""
    line = text.splitlines()[0] if text else ""
    return re.sub(r"'[^']*'|\"[^\"]*\"|-?\d[\d.,e+]*", "_", line)[:110]
