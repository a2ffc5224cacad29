"""The best plan of each launcher: what the table of the main command shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from parplan.planner.launchers.launcher_ties import preferred_place, ratio_band, tied
from parplan.planner.objective import Prefer
from parplan.planner.plan.plan import Plan
from parplan.profiles.errors import ConfigError, InfeasibleError, OutOfTimeError, PlannerError

Find = Callable[[], Plan]


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherPlan:
    """The best plan of a launcher, or the error that says why it has none."""

    launcher: str
    plan: Plan | None = None
    error: PlannerError | None = None

    @property
    def step_s(self) -> float:
        """Seconds of a step, infinite without a plan."""
        return self.plan.predicted.step_time_s.value if self.plan else float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherTable:
    """The launchers of a request, the fastest first, then those without a plan.

    chosen       the launcher whose plan is written
    tied         the launchers that may be as fast as the first, with it
    ratio_share  the widest band of the ratio of a tied plan's step to the fastest's
    unsearched   launchers that the time limit or Ctrl-C left without a search
    """

    entries: tuple[LauncherPlan, ...]
    chosen: str
    tied: tuple[str, ...] = ()
    ratio_share: float = 0.0
    unsearched: tuple[str, ...] = ()

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans, the fastest first."""
        return tuple(each.plan for each in self.entries if each.plan)

    @property
    def plan(self) -> Plan:
        """The plan that is written."""
        return next(
            each.plan for each in self.entries if each.plan and each.launcher == self.chosen
        )


def search_each(
    finds: Mapping[str, Find], stopped: Callable[[], bool]
) -> tuple[list[LauncherPlan], tuple[str, ...]]:
    """Returns the answers of launchers in their order, and those that were not searched.

    stopped    True once Ctrl-C came, after which no further launcher is searched
    Raises KeyboardInterrupt, and OutOfTimeError before the first plan.
    """
    entries: list[LauncherPlan] = []
    names = list(finds)
    for place, (name, find) in enumerate(finds.items()):
        try:
            entries.append(LauncherPlan(launcher=name, plan=find()))
        except (ConfigError, InfeasibleError) as error:
            entries.append(LauncherPlan(launcher=name, error=error))
        except (OutOfTimeError, KeyboardInterrupt):
            if not any(each.plan for each in entries):
                raise
            return entries, tuple(names[place:])
        if stopped():
            return entries, tuple(names[place + 1 :])
    return entries, ()


def table_of(
    entries: Sequence[LauncherPlan], unsearched: tuple[str, ...], prefer: Prefer
) -> LauncherTable:
    """Returns the table of launchers of which at least one has a plan."""
    ordered = sorted(entries, key=lambda each: each.step_s)
    with_plans = [each for each in ordered if each.plan]
    plans = [each.plan for each in with_plans if each.plan]
    places = tied(plans)
    return LauncherTable(
        entries=tuple(ordered),
        chosen=with_plans[preferred_place(plans, prefer)].launcher,
        tied=tuple(with_plans[place].launcher for place in places),
        ratio_share=max(_bands(plans, places), default=0.0),
        unsearched=unsearched,
    )


def _bands(plans: Sequence[Plan], places: Sequence[int]) -> Iterator[float]:
    yield from (ratio_band(plans[0], plans[place]) for place in places if place)
