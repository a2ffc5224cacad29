"""Documents (YAML, JSON) -> frozen dataclasses, with errors that name file, key and nearest key."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_type_hints

from parplan.profiles.documents.plain import NotPlainError, plain
from parplan.profiles.documents.ranges import require_values
from parplan.profiles.errors import ConfigError, did_you_mean, shortened

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic_core import ErrorDetails

T = TypeVar("T")
MAX_ERRORS = 1000
_UNKNOWN = ("unexpected_keyword_argument", "extra_forbidden")


def parse(cls: type[T], document: object, where: str) -> T:
    """Returns `document` as an instance of the dataclass `cls`.

    Raises ConfigError with `where` (a file) and the key's path when a key is unknown, missing, of
    the wrong type or out of its range.
    """
    try:
        instance = plain(cls, document)
    except NotPlainError:
        instance = _validated(cls, document, where)
    except ConfigError as error:
        raise _of_file(error, where) from None
    require_values(instance, where)
    return instance


def _validated(cls: type[T], document: object, where: str) -> T:
    """Returns a document as an instance of `cls`, with values converted to the fields' types."""
    from pydantic import ValidationError

    try:
        return cast(T, _adapter(cast(Hashable, cls)).validate_python(document))
    except ValidationError as error:
        if error.error_count() > MAX_ERRORS:  # listing them would take minutes
            raise ConfigError(
                f"{where}: {error.error_count():,} of its values are not what they must be",
                hint="correct that file",
            ) from None
        # an unknown key first: it is often the misspelling of a key that is missing too
        errors = error.errors(include_url=False)
        first = min(errors, key=lambda details: details["type"] not in _UNKNOWN)
        raise _config_error(cls, first, where) from None
    except ConfigError as error:
        raise _of_file(error, where) from None


def _of_file(error: ConfigError, where: str) -> ConfigError:
    """Returns the error of a `__post_init__`, which does not know the file, with the file."""
    return ConfigError(f"{where}: {error.message}", hint=error.hint)


@functools.cache
def _adapter(cls: Hashable) -> TypeAdapter[Any]:
    """Returns the validator of a dataclass; making it costs more than a validation."""
    from pydantic import TypeAdapter

    return TypeAdapter(cast(Any, cls))


def kind_text(value: object) -> str:
    """Returns the words for the kind of a value that is no mapping, such as `a list`."""
    words = {type(None): "nothing", list: "a list", str: "text", bool: "true or false"}
    return words.get(type(value), "a number")


def _config_error(cls: type, details: ErrorDetails, where: str) -> ConfigError:
    loc, code = details["loc"], details["type"]
    value = details.get("input")
    path = ".".join(shortened(str(part)) for part in loc if part != "[key]") or "the document"
    if code in _UNKNOWN:
        known = _known_keys(cls, loc[:-1])
        hint = did_you_mean(str(loc[-1]), known) or f"known keys: {', '.join(known)}"
        return ConfigError(f"{where}: unknown key {path}", hint=hint)
    if code in ("missing_argument", "missing"):
        return ConfigError(f"{where}: {path} is missing", hint=f"add {loc[-1]}")
    if code in ("dataclass_type", "dataclass_exact_type"):
        return ConfigError(
            f"{where}: {path} must be a mapping, found {kind_text(value)}",
            hint="correct that value",
        )
    text = details["msg"][0].lower() + details["msg"][1:]
    shown = "" if isinstance(value, Mapping | list | tuple) else f", found {shortened(repr(value))}"
    return ConfigError(f"{where}: {path}: {text}{shown}", hint="correct that value")


def _known_keys(cls: type, loc: tuple[int | str, ...]) -> list[str]:
    """Returns the fields of the dataclass at `loc`, or nothing where `loc` leaves dataclasses."""
    for part in loc:
        if (
            dataclasses.is_dataclass(cls)
            and isinstance(part, str)
            and part in (hints := get_type_hints(cls))
        ):
            cls = _inner_dataclass(hints[part])
    return (
        [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
    )


def _inner_dataclass(hint: Any) -> type:
    """Returns the dataclass inside `tuple[X, ...]`, `Mapping[str, X]` or `X | None`."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return hint
    inner = [
        _inner_dataclass(argument)
        for argument in getattr(hint, "__args__", ())
        if argument is not Ellipsis
    ]
    return next((each for each in inner if dataclasses.is_dataclass(each)), object)


def document(instance: object) -> Any:
    """Returns a dataclass and its fields as plain dicts, lists, strings and numbers.

    The keys are in the order of the fields.
    """
    if dataclasses.is_dataclass(instance):
        return {
            field.name: document(getattr(instance, field.name))
            for field in dataclasses.fields(instance)
        }
    if isinstance(instance, Mapping):
        return {str(key): document(value) for key, value in instance.items()}
    if isinstance(instance, tuple | list):
        return [document(value) for value in instance]
    if isinstance(instance, str):
        return str(instance)
    return instance


def json_schema(cls: Any) -> dict[str, Any]:
    """Returns the JSON Schema of the documents that `parse` takes for `cls`."""
    from pydantic import TypeAdapter

    schema: dict[str, Any] = TypeAdapter(cls).json_schema()
    return schema


def output_schema(cls: Any) -> dict[str, Any]:
    """Returns the JSON Schema of what `document` makes of `cls`: all keys are there, and no more.

    cls    a dataclass, or a union of several
    """
    schema: dict[str, Any] = _complete(json_schema(cls))
    return schema


def _complete(schema: Any) -> Any:
    """Returns a schema whose mappings need all their keys and take no others."""
    if isinstance(schema, list):
        return [_complete(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    body = {
        keyword: {name: _complete(each) for name, each in value.items()}
        if keyword in ("properties", "$defs")
        else _complete(value)
        for keyword, value in schema.items()
        if keyword != "default"
    }
    if "properties" in body:
        body |= {"required": list(body["properties"]), "additionalProperties": False}
    return body
