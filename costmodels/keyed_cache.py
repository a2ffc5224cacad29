"""What is asked for often and made once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class KeyedCache:
    """`once(key, make)`: what `make` gives, made at the first call with a key.

    check: called before anything is made; may raise, when there is no time left for it
    """

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        self._made: dict[Hashable, Any] = {}
        self._check = check

    def __call__(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self._made:
            self._check()
            self._made[key] = make()
        found: T = self._made[key]
        return found
