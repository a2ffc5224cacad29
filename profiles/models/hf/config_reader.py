"""Typed access to the keys of a configuration, which remembers the keys that were read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parplan.profiles.errors import ConfigError

Names = tuple[str, ...]


class ConfigReader:
    """The keys of one file under any of their names; a null counts as absent, without a default.

    defaults: the values of keys that the file may leave out
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        where: str,
        *,
        defaults: Mapping[str, Any] | None = None,
        seen: set[str] | None = None,
    ) -> None:
        given = {name: value for name, value in values.items() if value is not None}
        self.given = frozenset(given)
        left_out = {name: value for name, value in (defaults or {}).items() if name not in values}
        self.values = left_out | given
        self.where = where
        self.seen: set[str] = set() if seen is None else seen

    def unread(self) -> list[str]:
        """Returns the keys of the file that nothing has asked for, sorted."""
        return sorted(self.given - self.seen)

    def find(self, names: Names) -> tuple[str, Any]:
        """Returns the first of `names` in the file, or with a default, and its value.

        It is the first name and None where there is no value.
        """
        self.seen.update(names)
        known = [name for name in names if name in self.values]
        name = next((name for name in known if name in self.given), (known or names)[0])
        return name, self.values.get(name)

    def integer(self, names: Names, default: int | None = None, *, least: int = 1) -> int:
        name, value = self.find(names)
        if isinstance(value, list | tuple) and value and all(each == value[0] for each in value):
            value = value[0]  # one for each block
        if value is None and default is not None:
            return default
        if value is None:
            aliases = f" (or {', '.join(names[1:])})" if names[1:] else ""
            raise ConfigError(f"{self.where}: {name} is missing{aliases}", hint=f"add {name}")
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            needed = "a positive integer" if least > 0 else "a whole number"
            if isinstance(value, list | tuple):
                needed = f"{needed}, the same for every block"
            raise self.wrong(name, value, needed)
        return value

    def agreed(self, names: Names, default: int | None = None, *, least: int = 1) -> int:
        """Returns an integer that all of its names in the file must have."""
        name, value = self.find(names)
        for other in names:
            if other in self.given and self.values[other] != value:
                raise ConfigError(
                    f"{self.where}: {name} is {value!r} and {other} is {self.values[other]!r}, "
                    "but they are one number",
                    hint=f"leave out {other}, or correct it",
                )
        return self.integer(names, default, least=least)

    def number(self, names: Names, default: float) -> float:
        name, value = self.find(names)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.wrong(name, value, "a number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.find((name,))[1]
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def items(self, names: Names) -> tuple[Any, ...] | None:
        """Returns the items of a list or the letters of a text, None where there are none."""
        name, value = self.find(names)
        if value is None:
            return None
        if not isinstance(value, list | tuple | str):
            raise self.wrong(name, value, "a list")
        return tuple(value) or None

    def rotary(self) -> ConfigReader:
        """Returns a reader of the rotary settings.

        They are at the top level, or inside `rope_parameters` as newer versions of transformers
        write them, there once for each kind of attention where these differ.
        """
        name, inner = self.find(("rope_parameters",))
        if inner is None:
            return self
        if not isinstance(inner, Mapping):
            raise self.wrong(name, inner, "a mapping")
        full = inner.get("full_attention")
        settings = full if isinstance(full, Mapping) else inner
        return ConfigReader({**self.values, **settings}, f"{self.where}: {name}", seen=self.seen)

    def wrong(self, name: str, value: object, needed: str) -> ConfigError:
        return ConfigError(
            f"{self.where}: {name} is {value!r}, it must be {needed}", hint=f"correct {name}"
        )
