"""Words and comments in the languages of exported files: one function a language.

A text of a plan is data in every file: it ends no line, no comment and no quotes. JSON is written
by `nested_file.json_text`, YAML by `yaml_text` of the documents.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from parplan.profiles.documents.texts import escaped

# Python takes the encoding of a file from the first of its first two lines that names one (PEP 263)
_ENCODING = "# coding: utf-8"


def commented(lines: Iterable[str]) -> list[str]:
    """Returns the lines of a comment in a shell script, a job of Slurm or a YAML file.

    A character that could end the line is escaped.
    """
    return [f"# {escaped(line)}".rstrip() for line in lines]


def python_commented(lines: Iterable[str]) -> list[str]:
    """Returns the lines of a comment at the head of a Python file, which state its encoding."""
    return [_ENCODING, *commented(lines)]


def shell_word(text: str) -> str:
    """Returns a text as one word of bash on one line."""
    if text.isprintable():
        return shlex.quote(text)
    octal = "".join(
        each if _is_plain(each) else "".join(f"\\{byte:03o}" for byte in each.encode())
        for each in text
    )
    return f"$'{octal}'"


def _is_plain(character: str) -> bool:
    """True for a character that stands for itself in `$'..'`."""
    return character.isprintable() and character not in "\\'"
