"""Arguments in nested files: JSON and YAML, each key by its path and with the line that has it.

A key is named by its path with dots, such as `zero_optimization.stage`. The words of a value are
its text, `true` or `false` for a switch, and one word for each element of a list. Mappings inside a
list count from 0: `rules.0.name`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from parplan.planner.export.fields.arguments import Argument, Facts, Given, Words
from parplan.profiles.documents.numbers import real_of, whole_of
from parplan.profiles.documents.ranges import WHOLE
from parplan.profiles.documents.reader import parse_yaml
from parplan.profiles.documents.yaml_text import Path, line_numbers

_ARGUMENTS = re.compile(r"^[ \t]*--[\w.-]+:", re.MULTILINE)  # keys of a YAML of Megatron-LM
_SWITCH = {"true": True, "false": False}


def nested_arguments(text: str, file: str) -> tuple[Given, ...]:
    """Returns the values of a YAML or JSON text, in their order; those that are null are left out.

    file    its name, for places such as `ds_config.json:7`
    Raises ConfigError with the line for a text that is neither.
    """
    if _ARGUMENTS.search(text):  # which `yaml_arguments` reads, also where one is there twice
        return ()
    plain = text.expandtabs(1)  # JSON may be indented with tabs, YAML may not
    document = parse_yaml(plain, file)
    if not isinstance(document, dict):
        return ()
    lines = line_numbers(plain)
    return tuple(
        Given(".".join(map(str, path)), words, f"{file}:{_line(path, lines)}")
        for path, words in _leaves((), document)
    )


def nested(arguments: Iterable[tuple[str, Words]]) -> dict[str, Any]:
    """Returns the document whose keys have these paths; the last of equal paths counts."""
    document: dict[str, Any] = {}
    for path, words in arguments:
        *sections, key = path.split(".")
        section = document
        for name in sections:
            section = section.setdefault(name, {})
        section[key] = True if not words else _value(words)
    return document


def json_text(document: object) -> str:
    return json.dumps(document, indent=2) + "\n"


def flag(name: str, fact: str, default: bool | None = None) -> Argument:
    """Returns the row of a key that is true or false, and left out where that is the default."""

    def write(record: Any) -> Words | None:
        value = getattr(record, fact)
        return None if value is default else (_word(value),)

    return Argument(
        name=name,
        facts=(fact,),
        write=write,
        read=lambda words, _: {fact: read_flag(words)},
    )


def read_flag(words: Words) -> bool:
    """Returns the one switch of these words. Raises ValueError."""
    word = words[0].lower() if len(words) == 1 else ""
    if word not in _SWITCH:
        raise ValueError("true or false is needed")
    return _SWITCH[word]


def unpriced(name: str, *words: str) -> Argument:
    """Returns the row of a key that has a price with these words alone, and is never written."""

    def read(found: Words, _: Facts) -> Facts:
        if " ".join(found).lower() not in words:
            raise ValueError(f"it changes the step and has no price, {' or '.join(words)} has")
        return {}

    return Argument(name=name, facts=(), write=lambda _: None, read=read)


def _leaves(path: Path, value: Any) -> Iterator[tuple[Path, Words]]:
    """Yields the values under a path that are no mappings, each with its path."""
    listed = isinstance(value, list) and any(isinstance(each, dict | list) for each in value)
    if isinstance(value, dict) and value:
        for name, below in value.items():
            yield from _leaves((*path, name), below)
    elif listed:
        for index, below in enumerate(value):
            yield from _leaves((*path, index), below)
    elif value is not None:
        yield path, _words(value)


def _line(path: Path, lines: Mapping[Path, int]) -> int:
    """Returns the line of a path; a merged key has that of the mapping that it is in."""
    return next((lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in lines), 1)


def _words(value: Any) -> Words:
    if isinstance(value, dict | list):
        return tuple(_word(each) for each in value)
    return (_word(value),)


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "null" if value is None else f"{value}"


def _value(words: Words) -> Any:
    """Returns a list for several words, else the number, the switch or the text of one."""
    if len(words) > 1:
        return [_value((word,)) for word in words]
    word = words[0]
    if word in _SWITCH:
        return _SWITCH[word]
    whole = whole_of(word, WHOLE)
    number = real_of(word) if whole is None else whole
    return word if number is None else number
