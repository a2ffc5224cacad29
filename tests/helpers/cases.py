"""Selection of the cases that the plain run has, among many of one kind."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import pytest


def mostly_slow(cases: Iterable[Any], plain: Collection[Any]) -> list[Any]:
    """All cases in their order. Those that are not plain are marked slow."""
    every = list(cases)
    assert all(case in every for case in plain)
    return [
        case
        if case in plain
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in every
    ]


def of_every(cases: Iterable[tuple[Any, ...]]) -> Callable[[Callable[..., None]], Any]:
    """A decorator of tests that take microseconds: all cases are one test.

    To collect and report a test takes milliseconds. A failure names its case.
    """

    def decorate(test: Callable[..., None]) -> Callable[[], None]:
        def of_all() -> None:
            for case in cases:
                try:
                    test(*case)
                except AssertionError as error:
                    error.add_note(f"in the case {case}")
                    raise

        of_all.__name__, of_all.__doc__ = test.__name__, test.__doc__
        of_all.__module__ = test.__module__
        return of_all

    return decorate


def named(cases: Mapping[str, Any], plain: Collection[str]) -> list[Any]:
    """All cases by their names, of which `plain` run by default.

    A case is a value, or a tuple of values. The rest is marked slow.
    """
    assert set(plain) <= set(cases)
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            id=name,
            marks=() if name in plain else pytest.mark.slow,
        )
        for name, case in cases.items()
    ]
