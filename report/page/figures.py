"""Numbers of a page: each is text for a reader, with the plan file's value and key beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from parplan.profiles.units import format_number
from parplan.report.text import gib_text, percent, seconds_text

if TYPE_CHECKING:
    from markupsafe import Markup


class Form(StrEnum):
    """The ways in which a number is written."""

    SECONDS = "seconds"
    GIB = "gib"
    SHARE = "share"
    MORE = "more"
    DIFFERENCE = "difference"
    COUNT = "count"
    NUMBER = "number"


def _seconds(value: float) -> str:
    return seconds_text(value) if value > 0 else "0"


def _more(value: float) -> str:
    return f"{100 * value:+.1f} %"


def _difference(value: float) -> str:
    text = seconds_text(abs(value)) if value else "0"
    return f"{'-' if value < 0 else '+'}{text}" if value else text


_TEXTS: Mapping[Form, Callable[[Any], str]] = {
    Form.SECONDS: _seconds,
    Form.GIB: gib_text,
    Form.SHARE: percent,
    Form.MORE: _more,
    Form.DIFFERENCE: _difference,
    Form.COUNT: lambda value: f"{value:,.0f}",
    Form.NUMBER: lambda value: format_number(value, 4),
}


def number(value: float, form: Form, **attributes: str) -> Markup:
    """Returns a number as HTML; `attributes` name where it is from."""
    from markupsafe import Markup

    named = Markup("").join(
        Markup(' data-{}="{}"').format(name, text) for name, text in attributes.items()
    )
    return Markup('<data value="{}"{}>{}</data>').format(
        json.dumps(value), named, _TEXTS[form](value)
    )


class PlanFigures:
    """Numbers of one plan's document by key, such as `predicted.memory_gib.0.total`."""

    def __init__(self, document: Mapping[str, Any], plan: int) -> None:
        self._document = document
        self._plan = str(plan)

    def __call__(self, key: str, form: Form) -> Markup:
        """Returns the number under a key of the document as HTML."""
        return number(value_at(self._document, key), form, plan=self._plan, key=key)

    def derived(self, value: float, form: Form, source: str) -> Markup:
        """Returns a number that follows from others, with the formula as its source."""
        return number(value, form, plan=self._plan, **{"from": source})


def value_at(document: Mapping[str, Any], key: str) -> Any:
    """Returns the value of a document under a key with dots; numbers are places in a list."""
    value: Any = document
    for part in key.split("."):
        value = value[int(part)] if isinstance(value, list | tuple) else value[part]
    return value
