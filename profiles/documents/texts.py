"""Texts from outside: names and words are printable, and nothing else reaches a terminal or a file.

A name goes into scripts, configurations, tables and terminals. A control character in it could
write a line of its own there, and a bidirectional mark could show another name than it is.
"""

from __future__ import annotations

from pathlib import Path

from parplan.profiles.errors import ConfigError, shortened

MOST_NAME = 200  # characters of a name or a key
MOST_TEXT = 1_000_000  # characters of any other text, such as the actions of a pipeline rank
PROSE = frozenset({"source", "detail"})  # keys whose texts may have line breaks
_BREAKS = str.maketrans("", "", "\n\t")


def escaped(text: str, *, keep: str = "") -> str:
    """Returns a text with its control characters and marks escaped, which a terminal would obey.

    keep    characters that stay, such as a line break
    """
    if text.isprintable():
        return text
    return "".join(
        each
        if each.isprintable() or each in keep
        else each.encode("unicode_escape").decode("ascii")
        for each in text
    )


def escaped_lines(text: str) -> str:
    """Returns a text of several lines with all other control characters escaped."""
    return escaped(text, keep="\n")


def require_text(key: str, text: str, where: str, path: str) -> None:
    """Raises ConfigError for a text of a document that is not printable or too long.

    key     its key; texts of `PROSE` may have line breaks
    path    the path of the key, for the message
    """
    if len(text) > MOST_TEXT:
        raise _too_long(where, path, text, MOST_TEXT)
    if text.isprintable() or (key in PROSE and text.translate(_BREAKS).isprintable()):
        return
    wrong = next(each for each in text if not each.isprintable())
    raise ConfigError(
        f"{where}: {shortened(path)} has the character U+{ord(wrong):04X}, which is not printable: "
        f"{shortened(text)!r}",
        hint="take that character out",
    )


def require_name(name: str, where: str, path: str) -> None:
    """Raises ConfigError for a name or a key that is not printable or too long.

    path    the path of its key, for the message
    """
    if len(name) > MOST_NAME:
        raise _too_long(where, path, name, MOST_NAME)
    require_text("name", name, where, path)


def name_of_file(path: Path) -> str:
    """Returns the name that a file gives to what it holds: its own without the suffix.

    Raises ConfigError for a name that is not printable.
    """
    if not path.stem.isprintable():
        raise ConfigError(
            f"{path}: its name becomes that of its content, and has a control character",
            hint="rename the file",
        )
    return path.stem


def _too_long(where: str, path: str, text: str, most: int) -> ConfigError:
    return ConfigError(
        f"{where}: {shortened(path)} has {len(text):,} characters, at most {most:,} are read",
        hint="shorten that text",
    )
