"""Bans: single values of the choices that can be pinned, and their text (`tp=8`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from parplan.costmodels.communication.mesh import MeshOrder
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.profiles.documents.numbers import whole_of
from parplan.profiles.documents.ranges import COUNT, Range
from parplan.profiles.errors import ConfigError, unknown_name_error
from parplan.profiles.stack import ContextForm

Value = int | bool | StrEnum
_SWITCH = {"true": True, "false": False}


@dataclass(frozen=True, slots=True)
class Ban:
    """One value that no plan may use; `name` is a field of Constraints."""

    name: str
    value: Value

    def __str__(self) -> str:
        value = str(self.value).lower() if isinstance(self.value, bool) else str(self.value)
        return f"{_flag(self.name)}={value}"


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _whole(name: str, text: str, least: int, most: int | None) -> int:
    requirement = f"a whole number of at least {least}" if most is None else f"{least} to {most}"
    number = whole_of(text, Range(least, COUNT.high if most is None else most))
    if number is None:
        raise ConfigError(
            f"--forbid {_flag(name)}={text}: it must be {requirement}",
            hint=f"for example --forbid {_flag(name)}={most or 8}",
        )
    return number


def _one_of(name: str, text: str, known: Mapping[str, Value]) -> Value:
    if text not in known:
        raise unknown_name_error(_flag(name).replace("-", " "), text, known, where="--forbid")
    return known[text]


_READERS: dict[str, Callable[[str, str], Value]] = {
    **dict.fromkeys(
        ("pp", "dp", "tp", "cp", "ep", "etp", "tp_rows", "micro_batch_size", "virtual_stages"),
        lambda name, text: _whole(name, text, 1, None),
    ),
    **dict.fromkeys(("zero", "tp_overlap"), lambda name, text: _whole(name, text, 0, 3)),
    "schedule": lambda name, text: _one_of(
        name, text, {member.value: member for member in Schedule}
    ),
    "mesh_order": lambda name, text: _one_of(
        name, text, {member.value: member for member in MeshOrder}
    ),
    "context_form": lambda name, text: _one_of(
        name, text, {member.value: member for member in ContextForm}
    ),
    "recompute": lambda name, text: _one_of(
        name, text, {member.value: member for member in Recompute}
    ),
    "sequence_parallel": lambda name, text: _one_of(name, text, _SWITCH),
}
NAMES = tuple(_READERS)


def parse_bans(texts: Iterable[str]) -> tuple[Ban, ...]:
    """Returns the bans in `NAME=VALUE` texts with comma-separated values. Raises ConfigError."""
    return tuple(ban for text in texts for ban in _parse(text))


def _parse(text: str) -> list[Ban]:
    flag, _, values = map(str.strip, text.partition("="))
    if not values:
        raise ConfigError(
            f"--forbid is {text!r}, it must be NAME=VALUE", hint="for example --forbid tp=8"
        )
    if flag not in map(_flag, NAMES):
        raise unknown_name_error("choice", flag, map(_flag, NAMES), where="--forbid")
    name = flag.replace("-", "_")
    return [Ban(name, _READERS[name](name, value.strip())) for value in values.split(",")]
