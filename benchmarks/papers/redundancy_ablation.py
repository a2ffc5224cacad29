"""Our plans with ZeRO, operator splits and recompute switched off, to see what each of them saves.

Every row is the plan of least redundant bytes in the same seconds: 1.1 times the fastest step of
the search with all choices. A choice is switched off by pins of the search:

ZeRO             `--zero 0`: states are replicated over data-parallel ranks
operator splits  `--megatron-sharding --no-weights-over-data`: operators are divided as Megatron-LM
                 does, with sequence parallelism or without it
recompute        `--recompute none`

The savings of the choices do not add up: what one of them has saved, another cannot save again.
Therefore each is switched off alone, and each is left on alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.papers.redundancy_measures import WANTED_RATIO, Case, Setting, our_measure
from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.objective import Objective
from parplan.planner.plan.plan import Plan
from parplan.planner.request import SearchOptions

ZERO, SPLITS, RECOMPUTE = "ZeRO", "operator splits", "recompute"
OVER_DATA = "weights over data"
ALL = "all choices"
# Llama 3 on few tokens a step, where weights are large beside activations
SHORT = Case(model="llama3-70b", gpus=64, gpu="h100-80gb", seq_length=512, batch=64)
CASES = (
    SHORT,
    replace(SHORT, gpus=32, batch=32, tp=8),
    replace(SHORT, pipelines=True),
    Case(model="gpt-8.3b", gpus=64),
    Case(model="gpt-20b", gpus=64),
    Case(model="gpt-2.5b", gpus=8),
)
_OFF: dict[str, dict[str, Any]] = {
    ZERO: {"zero": (0,)},
    SPLITS: {"megatron_sharding": True, "weights_over_data": (False,)},
    RECOMPUTE: {"recompute": (Recompute.NONE,)},
    OVER_DATA: {"weights_over_data": (False,)},
}
_THREE = (ZERO, SPLITS, RECOMPUTE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The least redundant plan with some choices switched off, or the fastest if none is in time.

    off            the choices that are switched off
    fastest_s      the fastest step with them, None where nothing fits
    """

    setting: str
    off: tuple[str, ...]
    limit_s: float
    fastest_s: float | None
    step_s: float = 0.0
    peak_gib: float = 0.0
    redundant_gib: float = 0.0
    plan: str = ""

    @property
    def in_time(self) -> bool:
        """Return True if a plan fits and takes no longer than the limit."""
        return self.fastest_s is not None and self.fastest_s <= self.limit_s

    @property
    def name(self) -> str:
        """Return the choices that are off, or those that are left on if they are fewer."""
        if not self.off:
            return ALL
        on = [name for name in _THREE if name not in self.off]
        if len(self.off) == 1:
            return f"without {self.off[0]}"
        return f"{on[0]} alone" if on else "none of the three"


def pins_of(off: Iterable[str]) -> dict[str, Any]:
    """Return the pins of a search that switch the choices `off`."""
    return {name: value for switch in off for name, value in _OFF[switch].items()}


def switched_off() -> Iterator[tuple[str, ...]]:
    """Yield each choice alone, the tensor axis's splits kept or not, and then two or all."""
    yield (ZERO,)
    yield (SPLITS,)
    yield (OVER_DATA,)
    yield (RECOMPUTE,)
    for alone in _THREE:
        yield tuple(name for name in _THREE if name != alone)
    yield _THREE


def _row(setting: Setting, off: tuple[str, ...], limit_s: float, plan: Plan | None) -> Row:
    name = str(setting.case)
    if plan is None:
        return Row(setting=name, off=off, limit_s=limit_s, fastest_s=None)
    measure = our_measure(setting, plan, "memory")
    return Row(
        setting=name,
        off=off,
        limit_s=limit_s,
        fastest_s=plan.search.fastest_step_time_s,
        step_s=measure.step_s,
        peak_gib=measure.peak_gib,
        redundant_gib=measure.redundant_gib,
        plan=measure.plan,
    )


def ablation(setting: Setting) -> Iterator[Row]:
    """Yield the row with all choices, and one for each set that is switched off."""
    whole = setting.find(Objective.MEMORY, SearchOptions())
    if whole is None:
        return
    limit_s = WANTED_RATIO * whole.search.fastest_step_time_s
    yield _row(setting, (), limit_s, whole)
    for off in switched_off():
        yield _row(setting, off, limit_s, _within(setting, off, limit_s))


def _within(setting: Setting, off: tuple[str, ...], limit_s: float) -> Plan | None:
    """Return the least redundant plan in `limit_s`, or the fastest where it takes longer."""
    pins = pins_of(off)
    fastest = setting.find(Objective.THROUGHPUT, SearchOptions(), **pins)
    if fastest is None or fastest.search.fastest_step_time_s > limit_s:
        return fastest
    slowdown = limit_s / fastest.search.fastest_step_time_s - 1
    return setting.find(Objective.MEMORY, SearchOptions(max_slowdown=slowdown), **pins)
