"""Where a number comes from. A sum is only as good as its weakest part."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """How a number was obtained, best first."""

    MEASURED = "measured"
    INTERPOLATED = "interpolated"
    ANALYTIC = "analytic"


_ORDER = (Kind.MEASURED, Kind.INTERPOLATED, Kind.ANALYTIC)


def weakest(kinds: Iterable[Kind]) -> Kind:
    """The least certain of `kinds`; a number with no parts counts as measured (it is exactly zero)."""
    return max(kinds, key=_ORDER.index, default=Kind.MEASURED)


@dataclass(frozen=True, slots=True)
class Seconds:
    """A duration in seconds together with its provenance; zero costs do not weaken a sum."""

    value_s: float
    kind: Kind

    def __add__(self, other: Seconds) -> Seconds:
        if not other.value_s:
            return self
        if not self.value_s:
            return other
        return Seconds(self.value_s + other.value_s, weakest((self.kind, other.kind)))

    def scaled(self, factor: float) -> Seconds:
        """The same duration `factor` times."""
        return Seconds(self.value_s * factor, self.kind)


ZERO = Seconds(0.0, Kind.MEASURED)
