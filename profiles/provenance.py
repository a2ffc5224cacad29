"""The provenance of a number: measured, interpolated or analytic.

A sum is as good as its weakest part, unless that part is too small to matter.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from parplan.profiles.elementwise import Number

NEGLIGIBLE_SHARE = 0.05  # a part below this share of a sum does not decide the sum's kind


class Kind(StrEnum):
    """The ways in which a number was obtained, best first."""

    MEASURED = "measured"
    INTERPOLATED = "interpolated"
    ANALYTIC = "analytic"


_ORDER = tuple(Kind)
_NUMBERS = {kind: number for number, kind in enumerate(_ORDER)}
Kinds: TypeAlias = "Kind | npt.NDArray[np.int64]"  # of one number, or by number in `_ORDER`


def kinds_where(condition: Number, first: Kinds, second: Kinds) -> Kinds:
    """Returns `first` where the condition holds, `second` elsewhere."""
    if not isinstance(condition, np.ndarray):
        return first if condition else second
    numbers = (_NUMBERS[kind] if isinstance(kind, Kind) else kind for kind in (first, second))
    return np.where(condition, *numbers)


def weakest_kind(kinds: Iterable[Kind]) -> Kind:
    """Returns the least certain of `kinds`.

    A number without parts counts as measured, since it is exactly zero.
    """
    return max(kinds, key=_NUMBERS.__getitem__, default=Kind.MEASURED)


class Seconds:
    """An immutable duration with its measured, interpolated and analytic parts.

    The parts may be arrays, the durations of many operators at once, of which `at` returns some.
    """

    __slots__ = ("parts_s",)
    parts_s: tuple[Number, ...]

    def __init__(self, value_s: Number, kind: Kinds) -> None:
        parts_s: list[Number]
        if isinstance(kind, np.ndarray):
            parts_s = [np.where(kind == number, value_s, 0.0) for number in range(len(_ORDER))]
        else:
            parts_s = [0.0] * len(_ORDER)
            parts_s[_NUMBERS[kind]] = value_s
        _SET_PARTS_S(self, tuple(parts_s))

    @classmethod
    def of_parts(cls, parts_s: tuple[Number, ...]) -> Seconds:
        """Returns a duration of a measured, an interpolated and an analytic part."""
        seconds = _NEW(cls)
        _SET_PARTS_S(seconds, parts_s)
        return seconds

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"Seconds is immutable, cannot set {name}")

    @property
    def value_s(self) -> float:
        measured_s, interpolated_s, analytic_s = self.parts_s
        total_s: float = measured_s + interpolated_s + analytic_s
        return total_s

    @property
    def kind(self) -> Kind:
        """The least certain kind that makes up at least 5 % of the duration."""
        enough_s = NEGLIGIBLE_SHARE * self.value_s
        return weakest_kind(
            kind
            for kind, part_s in zip(_ORDER, self.parts_s, strict=True)
            if part_s and part_s >= enough_s
        )

    def at(self, index: Any) -> Seconds:
        """Returns the durations at an index of the arrays."""
        return Seconds.of_parts(
            tuple(part[index] if isinstance(part, np.ndarray) else part for part in self.parts_s)
        )

    def of_sizes(self, number: int) -> list[Seconds]:
        """Returns the duration of each of `number` micro-batch sizes, the first axis of arrays."""
        if not any(isinstance(part, np.ndarray) for part in self.parts_s):
            return [self] * number
        columns = (np.broadcast_to(part, (number, 1))[:, 0].tolist() for part in self.parts_s)
        return [Seconds.of_parts(parts_s) for parts_s in zip(*columns, strict=True)]

    def __add__(self, addend: Seconds) -> Seconds:
        measured_s, interpolated_s, analytic_s = self.parts_s
        added = addend.parts_s
        return Seconds.of_parts(
            (measured_s + added[0], interpolated_s + added[1], analytic_s + added[2])
        )

    def scaled(self, factor: Number) -> Seconds:
        """Returns the duration times `factor`."""
        measured_s, interpolated_s, analytic_s = self.parts_s
        return Seconds.of_parts((factor * measured_s, factor * interpolated_s, factor * analytic_s))

    def __eq__(self, value: object) -> bool:
        return isinstance(value, Seconds) and self.parts_s == value.parts_s

    def __hash__(self) -> int:
        return hash(self.parts_s)

    def __repr__(self) -> str:
        return f"Seconds({self.value_s!r}, {self.kind!r})"


_NEW = object.__new__
_SET_PARTS_S = Seconds.__dict__["parts_s"].__set__
ZERO = Seconds(0.0, Kind.MEASURED)
