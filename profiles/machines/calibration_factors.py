"""How far a machine's prices are from what its own runs took: one factor for each cause of a step's
time.

A factor is measured seconds over priced seconds. It multiplies the price of every operator or
message of its cause, before anything is hidden under anything, so that a search prices every
candidate with it. `plan calibrate` finds them (planner/calibration/run_factors.py); a cluster
carries them, and so does every plan made for it.
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
    """measured: whether runs say so; otherwise the price stays as it was. `source`: which runs, or
    why none.
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
        """A price with the factor; between measurements from then on, whatever it was before."""
        return (
            Seconds(self.value * seconds.value_s, Kind.INTERPOLATED) if self.measured else seconds
        )


UNCHANGED = Factor()


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The factors of one device under one software stack at one precision.

    forward, backward  kernels, and what the host needs to launch them
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
        found: Factor = getattr(self, cause)
        return found


CAUSES = tuple(
    f.name for f in dataclasses.fields(Calibration) if f.name not in ("stack", "precision")
)
