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
    PART_S = "part in s"
    PART_MS = "part in ms"
    MORE_S = "difference in s"
    MORE_MS = "difference in ms"
    COUNT = "count"
    NUMBER = "number"


def _seconds(value: float) -> str:
    return seconds_text(value) if value > 0 else "0"


def _more(value: float) -> str:
    return f"{100 * value:+.1f} %"


_TEXTS: Mapping[Form, Callable[[Any], str]] = {
    Form.SECONDS: _seconds,
    Form.GIB: gib_text,
    Form.SHARE: percent,
    Form.MORE: _more,
    Form.PART_S: lambda value: f"{value:.3f} s",
    Form.PART_MS: lambda value: f"{1e3 * value:.3f} ms",
    Form.MORE_S: lambda value: f"{value:+.3f} s",
    Form.MORE_MS: lambda value: f"{1e3 * value:+.3f} ms",
    Form.COUNT: lambda value: f"{value:,.0f}",
    Form.NUMBER: lambda value: format_number(value, 4),
}


def part_forms(step_s: float) -> tuple[Form, Form]:
    """Returns the forms of a part of a step and of a difference, so that a table has one unit."""
    return (Form.PART_S, Form.MORE_S) if step_s >= 1 else (Form.PART_MS, Form.MORE_MS)


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
