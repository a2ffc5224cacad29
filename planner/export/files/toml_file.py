"""Arguments in TOML files: each key by its section, with the line that has it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any

from parplan.planner.export.fields.arguments import Given, Words
from parplan.profiles.errors import ConfigError

_SECTION = re.compile(r"^\s*\[+\s*([\w.\-\"]+)\s*\]+")
_KEY = re.compile(r"^\s*([\w.\-\"]+)\s*=")


def toml_arguments(text: str, file: str) -> tuple[Given, ...]:
    """Returns the values of a TOML text as options `--section.key`, in their order.

    Raises ConfigError for a text that is no TOML.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: it is no TOML: {error}", hint="mend that line") from None
    lines = _lines(text)
    return tuple(
        Given(f"--{name}", words, f"{file}:{lines.get(name, 1)}")
        for name, words in _leaves("", document)
    )


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Words]]:
    if isinstance(value, dict):
        for name, below in value.items():
            yield from _leaves(f"{path}.{name}" if path else name, below)
    elif isinstance(value, list) and any(isinstance(each, dict) for each in value):
        for index, below in enumerate(value):
            yield from _leaves(f"{path}.{index}", below)
    else:
        listed = value if isinstance(value, list) else [value]
        yield (
            path,
            tuple(f"{each}".lower() if isinstance(each, bool) else f"{each}" for each in listed),
        )


def _lines(text: str) -> dict[str, int]:
    """Returns the line of each key, by its path."""
    section, found = "", {}
    for number, line in enumerate(text.splitlines(), 1):
        header, key = _SECTION.match(line), _KEY.match(line)
        if header:
            section = header[1].replace('"', "")
        elif key:
            name = key[1].replace('"', "")
            found[f"{section}.{name}" if section else name] = number
    return found
