"""The one reader of YAML and JSON: every file from outside is bounded before its values are built.

A document has the types of JSON only. A file is a regular one of at most 64 MiB of UTF-8. A
document is nested at most 64 deep and has at most 2,000,000 values; an alias or a merge key counts
as many values as it stands for. Integers have at most 18 digits, floats are finite, keys are texts
and occur once.

YAML is read event by event, so that its size is known before any recursion or copy of an alias;
this takes half the time of `yaml.load`. A plain scalar has its meaning in YAML 1.1 where JSON has
the type (text, number, true, false, null), `500_000` as 500000; a date is text; `0x10`, `017`,
`1:30`, `.inf`, `.nan` and tags are errors. `1e5`, which has no dot, is text as in YAML 1.1, since a
checksum may look so; a schema that needs a number there takes it for one.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections import Counter
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml

from parplan.profiles.errors import ConfigError
from parplan.profiles.units import MIB

MAX_BYTES = 64 * MIB
MAX_DEPTH = 64
_PARSER_TOO_DEEP = "exceeded maximum nesting depth"  # of libyaml, which may read ahead of MAX_DEPTH
MAX_VALUES = 2_000_000
MAX_DIGITS = 18
SHOWN = 80  # most characters of a text in a message
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # only its parser is used
_BOM = b"\xef\xbb\xbf"
_OTHER_BOMS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"\x00\x00\xfe\xff": "UTF-32"}
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_MEANINGS: dict[str, bool | None] = {
    "": None,
    "~": None,
    "null": None,
    "true": True,
    "yes": True,
    "on": True,
    "false": False,
    "no": False,
    "off": False,
}
_WORDS = {
    spelled: value
    for word, value in _MEANINGS.items()
    for spelled in (word, word.capitalize(), word.upper())
}
_NUMBER_STARTS = frozenset("+-.0123456789")
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+][0-9]+)?")
_GROUPED = re.compile(  # the same with underscores between digits, as YAML 1.1 has them
    r"[-+]?(?:0|[1-9][0-9]*(?:_[0-9]+)*)(?:\.[0-9]*(?:[eE][-+][0-9]+)?)?"
)
_YAML_NUMBER = re.compile(  # numbers of YAML 1.1 that JSON does not have
    r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]+|[1-9][0-9_]*(?::[0-5]?[0-9])*|[0-9][0-9_]*(?::[0-5]?[0-9])+\.[0-9_]*"
    r"|[0-9][0-9_]*\.[0-9_]*(?:[eE][-+][0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))"
)
_DIRECTIVE = re.compile(r"^%(?!YAML)", re.MULTILINE)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, slots=True)
class Hints:
    """The actions for a file that cannot be read, and for one with a wrong content."""

    absent: str = "check the path"
    broken: str = "correct that line"


def read_yaml(source: Path | Traversable, where: str | None = None, hints: Hints = Hints()) -> Any:
    """Returns the content of a YAML file: dicts, lists, texts, numbers, booleans and None.

    where: the file's name in messages, its path by default
    Raises ConfigError with the line: not a readable file, too large, not YAML, or types that JSON
    does not have.
    """
    where = str(source) if where is None else where
    return parse_yaml(read_text(source, where, hints), where, hints)


def read_json(source: Path | Traversable, where: str | None = None, hints: Hints = Hints()) -> Any:
    """Returns the content of a JSON file. Raises ConfigError, as `read_yaml` does."""
    where = str(source) if where is None else where
    return parse_json(read_text(source, where, hints), where, hints)


def read_text(
    source: Path | Traversable,
    where: str | None = None,
    hints: Hints = Hints(),
    *,
    lossy: bool = False,
) -> str:
    """Returns the text of a regular file of UTF-8 without its byte order mark.

    lossy: bytes that are not UTF-8 are replaced
    Raises ConfigError: not there, not readable, not a regular file, too large, not UTF-8, with NUL
    bytes.
    """
    where = str(source) if where is None else where
    body = _content(source, where, hints).removeprefix(_BOM)
    encoding = next((name for mark, name in _OTHER_BOMS.items() if body.startswith(mark)), None)
    if encoding is not None:
        raise ConfigError(
            f"{where}: not UTF-8 text: it is {encoding}", hint="save that file as UTF-8"
        )
    if not lossy and b"\0" in body:
        raise ConfigError(
            f"{where}:{_line_at(body, body.index(0))}: a NUL byte, text has none", hint=hints.broken
        )
    try:
        return body.decode("utf-8", errors="replace" if lossy else "strict")
    except UnicodeDecodeError as error:
        place = f"{where}:{_line_at(body, error.start)}"
        raise ConfigError(
            f"{place}: not UTF-8 text: {error.reason} at byte {error.start}", hint=hints.broken
        ) from None


def parse_yaml(text: str, where: str, hints: Hints = Hints()) -> Any:
    """Returns the content of a YAML text. Raises ConfigError with `where` and the line."""
    directive = _DIRECTIVE.search(text) if "%" in text else None
    if directive is not None:
        line = text.count("\n", 0, directive.start()) + 1
        raise ConfigError(
            f"{where}:{line}: a directive, %YAML alone may be there", hint=hints.broken
        )
    try:
        return _YamlDocument(where, hints).read(_LOADER(text))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}:{mark.line + 1}" if mark else where
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or error
        if problem == _PARSER_TOO_DEEP:
            raise _too_deep(place, hints) from None
        raise ConfigError(f"{place}: not YAML: {problem}", hint=hints.broken) from None


def parse_json(text: str, where: str, hints: Hints = Hints()) -> Any:
    """Returns the content of a JSON text. Raises ConfigError with `where` and the line."""
    numbers = _JsonNumbers(text, where, hints)
    try:
        body = json.loads(
            text,
            parse_int=numbers.integer,
            parse_float=numbers.real,
            parse_constant=numbers.constant,
            object_pairs_hook=numbers.mapping,
        )
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{where}:{error.lineno}: not JSON: {error.msg}", hint=hints.broken
        ) from None
    except RecursionError:
        raise _too_deep(where, hints) from None
    _require_bounded(body, where, hints)
    if _SURROGATE.search(text):
        _require_characters(body, where, hints)
    return body


def _content(source: Path | Traversable, where: str, hints: Hints) -> bytes:
    """Returns the bytes of a regular file.

    The kind of the file is checked before it is read: a pipe would wait for its writer, and a
    device might never end.
    """
    try:
        if not isinstance(source, Path):
            return source.read_bytes()  # a file of the package, perhaps in an archive
        handle = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            _require_regular(os.fstat(handle), where, hints)
            with open(handle, "rb", closefd=False) as file:
                body = file.read(MAX_BYTES + 1)
        finally:
            os.close(handle)
    except OSError as error:
        raise ConfigError(f"cannot read {where}: {error.strerror}", hint=hints.absent) from None
    except ValueError as error:  # a NUL in the name
        raise ConfigError(f"cannot read {where!r}: {error}", hint=hints.absent) from None
    if len(body) > MAX_BYTES:  # it grew, or its stated size is wrong
        raise _too_large(len(body), where, hints)
    return body


def _require_regular(status: os.stat_result, where: str, hints: Hints) -> None:
    """Raises ConfigError for a file that is not regular or is too large."""
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise ConfigError(f"cannot read {where}: {kind}, not a regular file", hint=hints.absent)
    if status.st_size > MAX_BYTES:
        raise _too_large(status.st_size, where, hints)


def _too_large(n_bytes: int, where: str, hints: Hints) -> ConfigError:
    return ConfigError(
        f"cannot read {where}: it has {n_bytes:,} bytes, at most {MAX_BYTES:,} are read",
        hint=hints.absent,
    )


def _line_at(body: bytes, place: int) -> int:
    return body.count(b"\n", 0, place) + 1


def _too_deep(place: str, hints: Hints) -> ConfigError:
    return ConfigError(f"{place}: nested more than {MAX_DEPTH} deep", hint=hints.broken)


def _too_many(place: str, hints: Hints) -> ConfigError:
    return ConfigError(
        f"{place}: more than {MAX_VALUES:,} values, aliases counted as what they stand for",
        hint=hints.broken,
    )


@dataclass(slots=True)
class _Open:
    """A sequence or mapping that is being read.

    first: the number of values before it
    height: the number of levels inside it
    """

    value: Any
    is_mapping: bool
    anchor: str | None
    first: int
    height: int = 0
    key: str | None = None
    merges: bool = False  # the next value is that of a merge key
    merged: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class _Anchored:
    """A value that aliases may name, with its number of values and its levels.

    count: None while the value is being read
    """

    value: Any
    count: int | None
    height: int


class _YamlDocument:
    """One YAML document, built from its events."""

    def __init__(self, where: str, hints: Hints) -> None:
        self._where, self._hints = where, hints
        self._open: list[_Open] = []
        self._anchors: dict[str, _Anchored] = {}
        self._count = 0
        self._root: Any = None

    def read(self, parser: Any) -> Any:
        """Returns the value of the only document. Raises ConfigError, YAMLError."""
        documents = 0
        while (event := parser.get_event()) is not None:
            kind = type(event)
            if kind is yaml.ScalarEvent:
                self._scalar(event)
            elif kind is yaml.MappingStartEvent or kind is yaml.SequenceStartEvent:
                self._start(event, kind is yaml.MappingStartEvent)
            elif kind is yaml.MappingEndEvent or kind is yaml.SequenceEndEvent:
                self._end(event)
            elif kind is yaml.AliasEvent:
                self._alias(event)
            elif kind is yaml.DocumentStartEvent:
                documents += 1
                if documents > 1:
                    raise self._wrong(event, "a second document in one file")
            elif kind is yaml.StreamEndEvent:
                break
        return self._root

    def _wrong(self, event: Any, problem: str, hint: str | None = None) -> ConfigError:
        return ConfigError(
            f"{self._where}:{event.start_mark.line + 1}: {problem}", hint=hint or self._hints.broken
        )

    def _counted(self, event: Any, count: int = 1) -> None:
        self._count += count
        if self._count > MAX_VALUES:
            raise _too_many(f"{self._where}:{event.start_mark.line + 1}", self._hints)

    def _scalar(self, event: Any) -> None:
        self._counted(event)
        if event.tag is not None:
            raise self._wrong(
                event,
                f"the tag {shortened(event.tag)}, a file has only the types of JSON",
                "leave the tag out",
            )
        text: str = event.value
        top = self._open[-1] if self._open else None
        plain = event.implicit[0]
        if top is not None and top.is_mapping and top.key is None:
            self._key(event, top, text, plain=plain)
            return
        value = self._plain(event, text) if plain else text
        if event.anchor is not None:
            self._anchors[event.anchor] = _Anchored(value, 1, 0)
        self._put(event, value, 0)

    def _key(self, event: Any, top: _Open, text: str, *, plain: bool) -> None:
        """Notes the key of the value that follows; a key is never an alias, as in JSON."""
        if text in top.value or (text == "<<" and top.merged is not None):
            raise self._wrong(
                event, f"the key {shortened(text)} is there twice", "leave one of them out"
            )
        if plain and text == "<<":
            top.merges, top.merged = True, []
        top.key = text

    def _plain(self, event: Any, text: str) -> Any:
        """Returns the value of a plain scalar. Raises ConfigError for a number unknown to JSON."""
        if text in _WORDS:
            return _WORDS[text]
        if text[0] not in _NUMBER_STARTS:
            return text
        if _INTEGER.fullmatch(text):
            if len(text.lstrip("+-")) > MAX_DIGITS:
                raise self._wrong(event, _too_long(text))
            return int(text)
        if _FLOAT.fullmatch(text):
            value = float(text)
            if not math.isfinite(value):
                raise self._wrong(event, f"{shortened(text)} is beyond the range of floats")
            return value
        if "_" in text and _GROUPED.fullmatch(text):
            return self._plain(event, text.replace("_", ""))
        if len(text) <= MAX_DIGITS * 4 and _YAML_NUMBER.fullmatch(text):
            raise self._wrong(
                event,
                f"{text} is no number as JSON has them",
                "write a decimal number, or quote it if it is a text",
            )
        return text

    def _start(self, event: Any, is_mapping: bool) -> None:
        self._counted(event)
        if event.tag is not None:
            raise self._wrong(
                event,
                f"the tag {shortened(event.tag)}, a file has only the types of JSON",
                "leave the tag out",
            )
        self._require_value_place(event)
        if len(self._open) >= MAX_DEPTH:
            raise _too_deep(f"{self._where}:{event.start_mark.line + 1}", self._hints)
        value: Any = {} if is_mapping else []
        self._open.append(_Open(value, is_mapping, event.anchor, self._count - 1))
        if event.anchor is not None:
            self._anchors[event.anchor] = _Anchored(value, None, 0)

    def _require_value_place(self, event: Any) -> None:
        """Raises ConfigError where a key is due, since a key must be a text."""
        if self._open and self._open[-1].is_mapping and self._open[-1].key is None:
            raise self._wrong(event, "a key that is no text")

    def _end(self, event: Any) -> None:
        ended = self._open.pop()
        if ended.merged:
            unmerged = dict(ended.value)
            ended.value.clear()
            for merged in reversed(ended.merged):
                ended.value.update(merged)
            ended.value.update(unmerged)
        if ended.anchor is not None:
            self._anchors[ended.anchor] = _Anchored(
                ended.value, self._count - ended.first, ended.height + 1
            )
        self._put(event, ended.value, ended.height + 1)

    def _alias(self, event: Any) -> None:
        """Adds the value that an alias stands for, shared and not copied."""
        self._require_value_place(event)
        anchored = self._anchors.get(event.anchor)
        if anchored is None:
            raise self._wrong(
                event, f"the alias *{shortened(event.anchor)} stands for nothing before it"
            )
        if anchored.count is None:
            raise self._wrong(
                event, f"the alias *{shortened(event.anchor)} stands inside what it stands for"
            )
        self._counted(event, anchored.count)
        if len(self._open) + anchored.height > MAX_DEPTH:
            raise _too_deep(f"{self._where}:{event.start_mark.line + 1}", self._hints)
        self._put(event, anchored.value, anchored.height)

    def _put(self, event: Any, value: Any, height: int) -> None:
        """Adds a value to the sequence or mapping that is open."""
        if not self._open:
            self._root = value
            return
        top = self._open[-1]
        if height > top.height:
            top.height = height
        if not top.is_mapping:
            top.value.append(value)
            return
        if top.merges:
            self._merge(event, top, value)
        else:
            top.value[top.key] = value
        top.key = None

    def _merge(self, event: Any, top: _Open, value: Any) -> None:
        """Notes the value of a merge key: a mapping, or a list of mappings.

        The mapping's own keys come before merged ones, and the first of the list before the rest.
        """
        merged = value if isinstance(value, list) else [value]
        if not all(isinstance(each, dict) for each in merged):
            raise self._wrong(event, "<< takes a mapping, or a list of mappings")
        top.merges, top.merged = False, merged


def shortened(text: str) -> str:
    """Returns the beginning of a text of any length, for a message."""
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _too_long(text: str) -> str:
    digits = len(text.lstrip("+-"))
    return f"{shortened(text)} has {digits} digits, an integer has at most {MAX_DIGITS}"


@dataclass(frozen=True, slots=True)
class _JsonNumbers:
    """The callbacks of json for the numbers and mappings of one text.

    The line of an error is that of the first such number.
    """

    text: str
    where: str
    hints: Hints

    def integer(self, text: str) -> int:
        """Returns an integer of at most MAX_DIGITS digits. Raises ConfigError."""
        if len(text.lstrip("-")) > MAX_DIGITS:
            raise self._wrong(text, _too_long(text))
        return int(text)

    def real(self, text: str) -> float:
        """Returns a finite float. Raises ConfigError."""
        value = float(text)
        if not math.isfinite(value):
            raise self._wrong(text, f"{shortened(text)} is beyond the range of floats")
        return value

    def constant(self, text: str) -> float:
        """Raises ConfigError: JSON has neither NaN nor Infinity."""
        raise self._wrong(text, f"not JSON: {text} is no number of JSON")

    def mapping(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Returns a mapping whose keys occur once. Raises ConfigError."""
        mapping = dict(pairs)
        if len(mapping) != len(pairs):
            twice = next(
                key for key, times in Counter(key for key, _ in pairs).items() if times > 1
            )
            raise ConfigError(
                f"{self.where}: the key {shortened(twice)} is there twice",
                hint="leave one of them out",
            )
        return mapping

    def _wrong(self, text: str, problem: str) -> ConfigError:
        line = self.text.count("\n", 0, self.text.index(text)) + 1
        return ConfigError(f"{self.where}:{line}: {problem}", hint=self.hints.broken)


def _require_bounded(body: Any, where: str, hints: Hints) -> None:
    """Raises ConfigError for more values or levels than a document may have.

    It goes level by level, without recursion.
    """
    level, count = [body], 1
    for _ in range(MAX_DEPTH + 1):
        level = [each for each in level if isinstance(each, dict | list)]
        if not level:
            return
        count += sum(map(len, level))
        if count > MAX_VALUES:
            raise _too_many(where, hints)
        level = [
            inner for each in level for inner in (each.values() if isinstance(each, dict) else each)
        ]
    raise _too_deep(where, hints)


def _require_characters(body: Any, where: str, hints: Hints) -> None:
    """Raises ConfigError for half a character, an escape that no file can store."""
    try:
        json.dumps(body, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(
            f"{where}: half a character, an escape between \\ud800 and \\udfff alone",
            hint=hints.broken,
        ) from None
