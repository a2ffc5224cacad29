"""The options of a run that the plan leaves open; needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from parplan.costmodels.chunks.measured_bytes import WARM_UP_SHARE
from parplan.profiles.errors import ConfigError, coerce_choice

LARGEST_SEED = 2**64 - 1  # the limit of torch's generators


class LearningRateSchedule(StrEnum):
    """The course of the learning rate after the warm-up."""

    CONSTANT = "constant"
    COSINE = "cosine"
    LINEAR = "linear"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a run.

    The learning rate rises over `warmup_steps` and then follows `lr_schedule` down to
    `min_learning_rate` at `steps`.

    data              token file; tokens are random without it
    clip_gradients    the largest gradient norm; 0 is no clipping
    allow_non_finite  True if a loss or gradient that is not finite does not end the run
    trace_memory      first steps that measure the memory outside of chunks; 0 for none
    trace_share       share of the chunks' budget that they may fill in these steps
    """

    steps: int = 5
    seed: int = 0
    data: Path | None = None
    data_dtype: str | None = None
    shuffle: bool = True
    learning_rate: float = 3e-4
    lr_schedule: LearningRateSchedule = LearningRateSchedule.CONSTANT
    warmup_steps: int = 0
    min_learning_rate: float = 0.0
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    clip_gradients: float = 1.0
    compile: bool = False
    record: bool = True
    allow_non_finite: bool = False
    trace_memory: int = 0
    trace_share: float = WARM_UP_SHARE

    def __post_init__(self) -> None:
        coerce_choice(self, "lr_schedule", LearningRateSchedule, where="--lr-schedule")
        _at_least(1, steps=self.steps)
        if not 0 <= self.seed <= LARGEST_SEED:
            raise ConfigError(f"--seed is {self.seed}, it must be from 0 to 2^64 - 1")
        _at_least(
            0,
            warmup_steps=self.warmup_steps,
            min_learning_rate=self.min_learning_rate,
            weight_decay=self.weight_decay,
            clip_gradients=self.clip_gradients,
        )
        if not (self.learning_rate > 0 and math.isfinite(self.learning_rate)):
            raise ConfigError(f"--learning-rate is {self.learning_rate:g}, it must be positive")
        for beta in self.betas:
            if not 0 <= beta < 1:
                raise ConfigError(f"--betas has {beta:g}, both must be in [0, 1)")
        self._check_least()
        self._check_trace()

    @property
    def lr_varies(self) -> bool:
        return self.warmup_steps > 0 or self.lr_schedule is not LearningRateSchedule.CONSTANT

    def _check_trace(self) -> None:
        if self.trace_memory >= self.steps:
            raise ConfigError(
                f"--trace-memory {self.trace_memory} of --steps {self.steps}: no step is left for "
                "the schedule that it corrects",
                hint="take more steps, or trace fewer",
            )
        if not 0 < self.trace_share <= 1:
            raise ConfigError(
                f"--trace-share is {self.trace_share:g}, it must be above 0 and at most 1"
            )

    def _check_least(self) -> None:
        if self.min_learning_rate > self.learning_rate:
            raise ConfigError(
                f"--min-learning-rate {self.min_learning_rate:g} is above "
                f"--learning-rate {self.learning_rate:g}"
            )
        if self.min_learning_rate and self.lr_schedule is LearningRateSchedule.CONSTANT:
            raise ConfigError(
                f"--min-learning-rate {self.min_learning_rate:g} with --lr-schedule "
                "constant: the rate never falls to it",
                hint="add --lr-schedule cosine or linear",
            )


def derived_seed(seed: int, number: int) -> int:
    """Return a seed for the object of this number, within the 64 bits of torch's generators."""
    return (seed * 1_000_003 + number) % (LARGEST_SEED + 1)


def _at_least(least: int, **values: float) -> None:
    for name, value in values.items():
        if not (value >= least and math.isfinite(value)):
            raise ConfigError(
                f"--{name.replace('_', '-')} is {value:g}, it must be at least {least}"
            )
