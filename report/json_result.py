"""The head of every result that `--json` prints."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonResult:
    """A result as `--json` prints it; all of its keys are always there.

    version   of the document; it changes where a key is renamed or removed, or its meaning changes
    """

    version: Literal[1] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KindedNumber:
    """A predicted number.

    kind   measured, interpolated or analytic: how it was made
    """

    value: float
    kind: str


def fields_of(record: DataclassInstance) -> dict[str, Any]:
    """Returns the fields of a record, for one that has them and more."""
    return {field.name: getattr(record, field.name) for field in fields(record)}
