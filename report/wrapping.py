"""Lines that are broken between words where a terminal is narrow."""

from __future__ import annotations

import os
import re
import shutil
import textwrap
from typing import IO

_CONTINUES = " \\"
_SHELL_WORD = re.compile(r"""(?:[^\s"']|"[^"]*"|'[^']*')+""")


def asked_width() -> int | None:
    """Returns the width in the environment variable COLUMNS, None where it has none."""
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() and int(columns) else None


def width_of(stream: IO[str]) -> int | None:
    """Returns the width that lines on a stream are broken at, None off a terminal."""
    if stream.isatty():
        return shutil.get_terminal_size().columns
    return asked_width()


def broken(text: str, width: int | None) -> str:
    """Returns the text with lines of at most `width`, as far as its words are no longer.

    What a line continues on is indented by two more spaces than the line. A text without a width
    stays as it is.
    """
    if width is None:
        return text
    return "\n".join(_broken_line(line, width) for line in text.split("\n"))


def continued(command: str, width: int | None) -> str:
    """Returns a command of a shell with lines of at most `width`, which a backslash continues.

    Words in quotes stay on one line. A command without a width stays as it is.
    """
    if width is None or len(command) <= width:
        return command
    indent = " " * (len(command) - len(command.lstrip()))
    words = _SHELL_WORD.findall(command)
    lines, line = [], indent + words[0]
    for word in words[1:]:
        if len(line) + 1 + len(word) + len(_CONTINUES) > width:
            lines.append(line + _CONTINUES)
            line = f"{indent}    {word}"
        else:
            line += f" {word}"
    return "\n".join((*lines, line))


def _broken_line(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(
        line,
        width,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
        expand_tabs=False,
    )
