"""The rows of one launcher's table under the names of another that runs the same code.

Megatron-Bridge and NeMo run Megatron-Core, as Megatron-LM does: their settings are its arguments in
dotted paths with values. A spelling says the path of an argument and how its words are written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from parplan.planner.export.fields.arguments import Argument, Facts, Words

TRUE = ("true",)
FALSE = ("false",)
NULL = ("null",)
_ABSENT = ("null", "None", "none", "")


def listed(words: Words) -> Words:
    """Returns the words of a list such as `[a,b]`, and other words as they are."""
    return tuple(part for word in words for part in word.strip("[]() ").replace(",", " ").split())


def valued(row: Argument, path: str, default: Words | None = None) -> Argument:
    """Returns a row with words under a path.

    default    words that are written where the row leaves its argument out; None: none
    """

    def write(record: Any) -> Words | None:
        words = row.write(record)
        if words is None:
            return default
        return words if len(words) == 1 else (f"[{','.join(words)}]",)

    def read(words: Words, facts: Facts) -> Facts:
        plain = words if "*" in "".join(words) else listed(words)
        return {} if not plain or plain[0] in _ABSENT else row.read(plain, facts)

    return replace(row, name=path, write=write, read=read)


def switched(row: Argument, path: str, *, inverted: bool = False) -> Argument:
    """Returns the row of a switch as `true` or `false` under a path.

    inverted    the path says the opposite of the switch
    """
    on, off = (FALSE, TRUE) if inverted else (TRUE, FALSE)

    def read(words: Words, facts: Facts) -> Facts:
        said = (words[0].lower(),)
        if said not in (TRUE, FALSE, NULL):
            raise ValueError("one of true, false is read")
        return row.read((), facts) if said == on else {}

    return replace(
        row, name=path, write=lambda record: off if row.write(record) is None else on, read=read
    )


def spelled(
    table: Iterable[Argument],
    values: Mapping[str, str],
    switches: Mapping[str, str],
    inverted: Mapping[str, str],
    defaults: Mapping[str, Words],
) -> tuple[Argument, ...]:
    """Returns the rows of a table that have a path, under their paths and in its order.

    values, switches, inverted    paths by the name of a row, by its kind
    defaults                      words by path that stand for an argument that is left out
    """
    return tuple(
        row for one in table for row in _spelled(one, values, switches, inverted, defaults)
    )


def _spelled(
    row: Argument,
    values: Mapping[str, str],
    switches: Mapping[str, str],
    inverted: Mapping[str, str],
    defaults: Mapping[str, Words],
) -> Iterable[Argument]:
    if row.name in values:
        path = values[row.name]
        yield valued(row, path, defaults.get(path))
    if row.name in switches:
        yield switched(row, switches[row.name])
    if row.name in inverted:
        yield switched(row, inverted[row.name], inverted=True)
