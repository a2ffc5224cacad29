"""A cache that computes each key once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import fields
from typing import Any, TypeVar, cast

T = TypeVar("T")


class KeyedCache:
    """`once(key, make)` returns the result of `make`, computed at the first call with a key.

    check    called before each computation; may raise if no time is left
    """

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        self._made: dict[Hashable, Any] = {}
        self._check = check

    def __call__(self, key: Hashable, make: Callable[[], T]) -> T:
        try:
            made: T = self._made[key]
        except KeyError:
            self._check()
            made = self._made[key] = make()
        return made


class RecentCache(KeyedCache):
    """A cache of the results that were asked for last; older ones are computed again.

    most     number of results that it holds
    """

    def __init__(self, most: int, check: Callable[[], None] = lambda: None) -> None:
        super().__init__(check)
        self._most = most

    def __call__(self, key: Hashable, make: Callable[[], T]) -> T:
        value = super().__call__(key, make)
        self._made[key] = self._made.pop(key)  # a dict is in the order of its entries
        if len(self._made) > self._most:
            del self._made[next(iter(self._made))]
        return value

    def __len__(self) -> int:
        return len(self._made)


class HashedOnce:
    """A frozen dataclass that finds its hash once: caches look it up in long keys.

    A subclass says `__hash__ = HashedOnce.__hash__`, else its decorator makes another.
    """

    __slots__ = ("_hash",)
    _hash: int

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            values = tuple(getattr(self, each.name) for each in fields(cast(Any, self)))
            object.__setattr__(self, "_hash", hash(values))
            return self._hash
