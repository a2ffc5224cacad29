"""Documents whose values have exactly the types of a dataclass's fields, built directly.

Such a document needs no validator, whose import and preparation take longer than a small search.
A document with any other value is left to the validator (profiles/documents/schema.py), which
converts the value or explains it. This module accepts nothing that the validator refuses.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

T = TypeVar("T")
Builder = Callable[[Any], Any]


class NotPlainError(Exception):
    """A value does not have the type of its field."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a finite number in an annotation, which the validator reads as its own."""

    __is_annotated_types_grouped_metadata__: ClassVar[Literal[True]] = True

    gt: float | None = None
    ge: float | None = None

    def __contains__(self, number: float) -> bool:
        above = self.gt is None or number > self.gt
        return above and (self.ge is None or number >= self.ge) and math.isfinite(number)

    def __iter__(self) -> Iterator[object]:
        from pydantic import Field

        yield from Field(gt=self.gt, ge=self.ge, allow_inf_nan=False).metadata


def plain(cls: type[T], document: object) -> T:
    """Returns the instance of the dataclass `cls` that a document describes.

    Raises NotPlainError where a key is unknown or missing, or a value needs a conversion.
    """
    return cast(T, _record(cls, document))


@functools.cache
def _builder(hint: Any) -> Builder:
    """Returns the function from a value of a document to a value of the type `hint`."""
    arguments = get_args(hint)
    match get_origin(hint):
        case origin if origin is Annotated:
            return _limited(_builder(arguments[0]), arguments[1:])
        case origin if origin is Literal:
            return functools.partial(_one_of, arguments)
        case origin if origin in (Union, types.UnionType):
            return _optional(arguments)
        case origin if origin is tuple and arguments[1:] == (...,):
            return functools.partial(_items, _builder(arguments[0]))
        case origin if origin is Mapping:
            return functools.partial(_pairs, _builder(arguments[0]), _builder(arguments[1]))
    if hint is float:
        return _real
    if hint in (str, bool, int):
        return functools.partial(_exact, hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return functools.partial(_member, {member.value: member for member in hint})
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return functools.partial(_record, hint)
    return _never


def _never(value: Any) -> Any:
    raise NotPlainError


def _exact(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise NotPlainError
    return value


def _real(value: Any) -> float:
    if type(value) is not float and type(value) is not int:
        raise NotPlainError
    return float(value)


def _one_of(values: tuple[Any, ...], value: Any) -> Any:
    if type(value) is not str or value not in values:
        raise NotPlainError
    return value


def _member(members: Mapping[str, Enum], value: Any) -> Enum:
    if type(value) is not str or value not in members:
        raise NotPlainError
    return members[value]


def _limited(build: Builder, metadata: tuple[Any, ...]) -> Builder:
    if not all(isinstance(each, Limits) for each in metadata):
        return _never

    def build_limited(value: Any) -> Any:
        number = build(value)
        if not all(number in limits for limits in metadata):
            raise NotPlainError
        return number

    return build_limited


def _optional(kinds: tuple[Any, ...]) -> Builder:
    """Returns the builder of `kind | None`; a union of several kinds needs the validator."""
    inner = [kind for kind in kinds if kind is not type(None)]
    if len(inner) != 1 or len(kinds) != 2:
        return _never
    build = _builder(inner[0])
    return lambda value: None if value is None else build(value)


def _items(build: Builder, value: Any) -> tuple[Any, ...]:
    if type(value) is not list and type(value) is not tuple:
        raise NotPlainError
    return tuple([build(each) for each in value])


def _pairs(build_key: Builder, build: Builder, value: Any) -> dict[Any, Any]:
    if type(value) is not dict:
        raise NotPlainError
    return {build_key(key): build(each) for key, each in value.items()}


@functools.cache
def _fields(cls: type) -> tuple[dict[str, Builder], frozenset[str]]:
    """Returns the builders of the fields of a dataclass, and the names without a default."""
    hints = get_type_hints(cls, include_extras=True)
    fields = dataclasses.fields(cls)
    required = (
        field.name
        for field in fields
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    )
    builders = {field.name: _builder(hints[field.name]) for field in fields if field.init}
    return builders, frozenset(required)


def _record(cls: type, value: Any) -> Any:
    if type(value) is not dict:
        raise NotPlainError
    builders, required = _fields(cls)
    if not required <= value.keys() <= builders.keys():
        raise NotPlainError
    return cls(**{key: builders[key](each) for key, each in value.items()})
