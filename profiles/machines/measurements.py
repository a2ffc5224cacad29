"""The cases that a profiler measures, one at a time, and their outcomes.

A case is one operator of a model at one size on one rank, or a figure of the machine itself. It
says what runs (`work`, a name that `executor/measuring` knows), at which sizes, and which point of
which curve each of its passes is. Pure data: the planner makes cases of the operators that it would
price (planner/calibration/profile_cases.py), the profiler measures them (profiles/profiler), and
fits make curves of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

_FORBID = {"extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CasePass:
    """One timed part of a case.

    name   forward, backward, input_gradient, weight_gradient, or time where there is one part
    curve  the curve that it is a point of, empty without one
    sizes  the sizes of that point, in the curve's order
    """

    __pydantic_config__ = _FORBID

    name: str
    curve: str = ""
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One thing to measure. `sizes` by name, in a fixed order; `precision` of its tensors."""

    __pydantic_config__ = _FORBID

    work: str
    sizes: tuple[tuple[str, int], ...]
    precision: str
    passes: tuple[CasePass, ...]

    @property
    def key(self) -> str:
        """A name that tells the case from all others: `linear m=2048 n=6144 k=2048 bf16`."""
        return " ".join(
            (self.work, *(f"{name}={size}" for name, size in self.sizes), self.precision)
        )

    def size(self, name: str) -> int:
        return dict(self.sizes)[name]


class UnsupportedCase(Exception):  # noqa: N818  an outcome, no error
    """The device, or the software on it, cannot run a case; the message says what is missing."""


class CaseOutcome(StrEnum):
    """The outcome of a case. Only MEASURED has figures."""

    MEASURED = "measured"
    OUT_OF_MEMORY = "out_of_memory"
    CRASHED = "crashed"
    HUNG = "hung"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The time of one pass.

    median_us: the median microseconds of `repeats`
    spread: half of their interquartile range over the median
    """

    __pydantic_config__ = _FORBID

    median_us: float
    spread: float
    repeats: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseFigures:
    """Figures of one case: seconds by pass, and bytes.

    saved_bytes      saved between the forward and the backward pass, without parameters
    workspace_bytes  most that a pass held beyond its inputs and results
    figures          all others, by name with unit: copied_bytes_per_s, granularity_bytes, ...
    clock_mhz        clock of the device during the measurement, None where it reports none
    """

    __pydantic_config__ = _FORBID

    times: Mapping[str, Timing] = field(default_factory=dict)
    saved_bytes: int | None = None
    workspace_bytes: int | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    clock_mhz: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A case and its outcome; `detail` says why where there are no figures."""

    __pydantic_config__ = _FORBID

    case: Case
    outcome: CaseOutcome
    measured: CaseFigures | None = None
    detail: str = ""
