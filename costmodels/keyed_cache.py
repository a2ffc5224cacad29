"""A cache that computes each key once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")
_MISSING = object()


class KeyedCache:
    """`once(key, make)` returns the result of `make`, computed at the first call with a key.

    check    called before each computation; may raise if no time is left
    """

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        self._made: dict[Hashable, Any] = {}
        self._check = check

    def __call__(self, key: Hashable, make: Callable[[], T]) -> T:
        value: Any = self._made.get(key, _MISSING)
        if value is _MISSING:
            self._check()
            value = self._made[key] = make()
        made: T = value
        return made
