"""Where a number comes from. A sum is as good as its weakest part, unless that part is too small to
matter.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

NEGLIGIBLE_SHARE = 0.05  # of a sum: a part below it does not decide the sum's kind


class Kind(StrEnum):
    """How a number was obtained, best first."""

    MEASURED = "measured"
    INTERPOLATED = "interpolated"
    ANALYTIC = "analytic"


_ORDER = tuple(Kind)


def weakest(kinds: Iterable[Kind]) -> Kind:
    """The least certain of `kinds`; a number with no parts counts as measured (it is exactly
    zero).
    """
    return max(kinds, key=_ORDER.index, default=Kind.MEASURED)


class Seconds:
    """A duration that remembers how much of it was measured, interpolated and computed.
    Immutable.
    """

    __slots__ = ("parts_s",)
    parts_s: tuple[float, ...]

    def __init__(self, value_s: float, kind: Kind) -> None:
        object.__setattr__(
            self, "parts_s", tuple(value_s if kind is own else 0.0 for own in _ORDER)
        )

    @classmethod
    def _of(cls, parts_s: tuple[float, ...]) -> Seconds:
        made = cls.__new__(cls)
        object.__setattr__(made, "parts_s", parts_s)
        return made

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"Seconds is immutable, cannot set {name}")

    @property
    def value_s(self) -> float:
        return sum(self.parts_s)

    @property
    def kind(self) -> Kind:
        """The least certain kind that makes up at least 5 % of the duration."""
        enough_s = NEGLIGIBLE_SHARE * self.value_s
        return weakest(
            kind
            for kind, part_s in zip(_ORDER, self.parts_s, strict=True)
            if part_s and part_s >= enough_s
        )

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds._of(tuple(map(sum, zip(self.parts_s, other.parts_s, strict=True))))

    def scaled(self, factor: float) -> Seconds:
        """The same duration `factor` times."""
        return Seconds._of(tuple(factor * part_s for part_s in self.parts_s))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Seconds) and self.parts_s == other.parts_s

    def __hash__(self) -> int:
        return hash(self.parts_s)

    def __repr__(self) -> str:
        return f"Seconds({self.value_s!r}, {self.kind!r})"


ZERO = Seconds(0.0, Kind.MEASURED)
