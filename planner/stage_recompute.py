"""Stage-aware recompute: the share of each pipeline stage's layers that run again.

Merak has one knob r0, the recomputed share of the first stage's layers (EQUATIONS P7). A later
stage holds fewer micro-batches and recomputes less:

    r_s = max(0, 1 - (1 - r0) (P - 1) / (P - 1 - s))    for s < P - 1
    r_{P-1} = 0,    under SCP r_{P-2} = r_{P-3}

floor(n_s r_s) of the n_s layers of stage s are recomputed in full. The rules were read in
HPDL-Group/Merak at 1593043, Merak/core/pipeline/module.py (activation_checkpoint_ratio) and
Merak/core/merak_engine.py (scheduler_method). The layers of Merak are halves of blocks; here they
are blocks, or the shards of a traced module; a shard whose recompute frees no memory is kept.
A model in one stage is all of it the first stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor

from parplan.costmodels.schedules.schedule import LAST_KEEPS_ALL, V_SHAPED, Schedule
from parplan.costmodels.strategy import ParallelLayout
from parplan.profiles.errors import ConfigError, InfeasibleError
from parplan.profiles.units import gib

Counts = tuple[int, ...]
OPTION = "--recompute-first-stage"
MEMORY = "memory"
_HINT = f"for example {OPTION} 0.5, {OPTION} 0.5,0.25,0, or {OPTION} {MEMORY}"


@dataclass(frozen=True, slots=True)
class RecomputeRule:
    """A user's rule for the recompute of the stages.

    shares    of the layers of the first stages that run again: one is the knob, of several the
              last holds for the stages after it; none lets each stage recompute the fewest layers
              with which it fits its memory
    """

    shares: tuple[Fraction, ...] = ()

    @property
    def by_memory(self) -> bool:
        return not self.shares

    def counts(self, num_layers: int, stage: int, layout: ParallelLayout) -> range:
        """Returns the numbers of recomputed layers that a stage of `num_layers` layers may have.

        By memory they are all, and the least that fits counts.
        """
        if self.by_memory:
            return range(1 if layout.keeps_all(stage) else num_layers + 1)
        count = recomputed((num_layers,), (self.of_stages(layout)[stage],))[0]
        return range(count, count + 1)

    def of_stages(self, layout: ParallelLayout) -> tuple[Fraction, ...]:
        """Returns the share of every stage of a rule that is not by memory."""
        if len(self.shares) == 1:
            return one_knob(self.shares[0], layout)
        return listed(self.shares, layout)


def parse_stage_recompute(text: str) -> RecomputeRule:
    """Parses --recompute-first-stage: a share, several, or `memory`. Raises ConfigError."""
    if text == MEMORY:
        return RecomputeRule()
    try:
        shares = tuple(Fraction(part) for part in text.split(","))
    except (ValueError, ZeroDivisionError):
        raise ConfigError(
            f"{OPTION} is {text!r}, it must be shares of layers or {MEMORY}", hint=_HINT
        ) from None
    for share in shares:
        if not 0 <= share <= 1:
            raise ConfigError(
                f"{OPTION} has {float(share):g}, a share of layers is from 0 to 1", hint=_HINT
            )
    return RecomputeRule(shares)


def two_recomputes_error(level: str) -> ConfigError:
    """Returns the error of a recompute level beside a rule for the stages."""
    return ConfigError(
        f"--recompute {level} and {OPTION} exclude each other", hint="leave one of them out"
    )


def stage_too_large_error(stage: int, limit_bytes: float) -> InfeasibleError:
    """Returns the error of a stage that no recompute makes fit."""
    return InfeasibleError(
        f"{OPTION} {MEMORY}: stage {stage} does not fit {gib(limit_bytes):,.1f} GiB, whatever it "
        "recomputes",
        hint="use more stages, a smaller --micro-batch-size or a higher --zero",
    )


def illegal_stage_recompute(layout: ParallelLayout, rule: RecomputeRule) -> str | None:
    """Returns why a layout cannot have the recompute of its stages from a rule, or None."""
    if layout.splits_backward:
        return f"{layout.schedule} runs without recompute, {OPTION} asks for it"
    if layout.virtual_stages > 1:
        return f"{OPTION} is for one model chunk a rank, there are {layout.virtual_stages}"
    if layout.chunked:
        return f"{OPTION} does not go with states in chunks"
    if len(rule.shares) > layout.mesh.pp:
        return f"{OPTION} has {len(rule.shares)} shares, pp is {layout.mesh.pp}"
    if layout.schedule in LAST_KEEPS_ALL and rule.shares and rule.of_stages(layout)[-1]:
        return f"the last stage of {layout.schedule} recomputes nothing, {OPTION} says it does"
    return None


def illegal_pins(
    rule: RecomputeRule,
    pp: tuple[int, ...] | None,
    schedules: tuple[Schedule, ...] | None,
    virtual_stages: tuple[int, ...] | None,
) -> str | None:
    """Returns the pin that leaves no pipeline to a rule, in words, or None."""
    if pp and max(pp) < len(rule.shares):
        return f"{OPTION} has {len(rule.shares)} shares, --pp has at most {max(pp)} stages"
    if schedules and set(schedules) <= {*V_SHAPED, Schedule.INTERLEAVED}:
        return f"{OPTION} is for one model chunk a rank, --schedule {schedules[0]} has several"
    if virtual_stages and 1 not in virtual_stages:
        return f"{OPTION} is for one model chunk a rank, --virtual-stages excludes it"
    return None


def one_knob(r0: Fraction, layout: ParallelLayout) -> tuple[Fraction, ...]:
    """Returns the recomputed share of every stage of a pipeline with one chunk a rank."""
    return shares_of(r0, layout.mesh.pp, layout.schedule)


def shares_of(r0: Fraction, num_stages: int, schedule: Schedule) -> tuple[Fraction, ...]:
    """Returns the recomputed share of every one of `num_stages` stages under a schedule."""
    if num_stages == 1:
        return (r0,)
    last = num_stages - 1
    shares = [
        max(Fraction(0), 1 - (1 - r0) * Fraction(last, last - stage)) for stage in range(last)
    ]
    if schedule is Schedule.SCP and last > 1:
        shares[-1] = shares[-2]
    return (*shares, Fraction(0))


def listed(shares: Sequence[Fraction], layout: ParallelLayout) -> tuple[Fraction, ...]:
    """Returns a share for every stage: the last of `shares` holds for the stages after it."""
    return (*shares, *[shares[-1]] * (layout.mesh.pp - len(shares)))


def recomputed(num_layers: Sequence[int], shares: Iterable[Fraction]) -> Counts:
    """Returns the number of recomputed layers of every stage, floor(n_s r_s)."""
    return tuple(floor(count * share) for count, share in zip(num_layers, shares, strict=True))
