"""The price of a plan at every launcher: what its nearest settings take there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from parplan.planner.export.exported import as_priced, nearest
from parplan.planner.export.fields.launcher import Target
from parplan.planner.plan.plan import Plan
from parplan.profiles.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherPrice:
    """A plan in the nearest settings of a launcher, as its stack runs them.

    slower          share by which the step is longer than that of the plan, negative if shorter
    peak_bytes      bytes of the fullest device
    missing_bytes   those of them that the device does not have
    searched        `plan --for` can search its settings: not over unequal pools
    refused         the reason why the launcher cannot run the plan in any form, empty where it can
    """

    name: str
    slower: float = 0.0
    peak_bytes: float = 0.0
    missing_bytes: float = 0.0
    searched: bool = True
    refused: str = ""


def launcher_prices(plan: Plan, targets: Iterable[Target]) -> tuple[LauncherPrice, ...]:
    """Returns the price of a plan at each of the launchers."""
    return tuple(_prices(plan, targets))


def _prices(plan: Plan, targets: Iterable[Target]) -> Iterator[LauncherPrice]:
    own = as_priced(plan)
    for target in targets:
        try:
            _, there = nearest(plan, own, target)
        except ConfigError as error:
            yield LauncherPrice(name=target.name, refused=error.message)
            continue
        yield LauncherPrice(
            name=target.name,
            slower=there.price.step_s / own.price.step_s - 1,
            peak_bytes=there.peak_bytes,
            missing_bytes=there.missing_bytes,
            searched=not plan.pools,
        )
