"""Factors that correct a machine's prices by its own runs, one for each cause of a step's time.

A factor is measured seconds over priced seconds. It multiplies the price of every operator or
message of its cause, before any overlap, so that a search prices every candidate with it. `plan
calibrate` finds them (planner/calibration/run_factors.py); a cluster carries them, and so does
every plan made for it.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

from parplan.profiles.errors import ConfigError
from parplan.profiles.provenance import Kind, Seconds

_FORBID = {"extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """One factor of a price.

    measured: True if runs measured it; otherwise it is 1
    source: which runs measured it, or why none did
    """

    __pydantic_config__ = _FORBID

    value: float = 1.0
    measured: bool = False
    source: str = "no run exercised it"

    def __post_init__(self) -> None:
        if not 0.0 < self.value < math.inf:
            raise ConfigError(
                f"calibration: a factor is {self.value}, it must be a positive number",
                hint="calibrate again",
            )

    def corrected(self, seconds: Seconds) -> Seconds:
        """Returns a price times the factor; a measured factor makes it INTERPOLATED."""
        if not self.measured:
            return seconds
        return Seconds(self.value * seconds.value_s, Kind.INTERPOLATED)


UNCHANGED = Factor()


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The factors of one device under one software stack at one precision.

    forward, backward  kernels, and the work of the host to launch them
    tensor             collectives between tensor-parallel ranks
    data               reductions and gathers of data parallelism
    pipeline           transfers between stages
    optimizer          the update of the parameters
    """

    __pydantic_config__ = _FORBID

    stack: str
    precision: str
    forward: Factor = field(default=UNCHANGED)
    backward: Factor = field(default=UNCHANGED)
    tensor: Factor = field(default=UNCHANGED)
    data: Factor = field(default=UNCHANGED)
    pipeline: Factor = field(default=UNCHANGED)
    optimizer: Factor = field(default=UNCHANGED)

    def factor(self, cause: str) -> Factor:
        factor: Factor = getattr(self, cause)
        return factor


CAUSES = tuple(
    f.name for f in dataclasses.fields(Calibration) if f.name not in ("stack", "precision")
)
