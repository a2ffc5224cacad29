"""Switches of a launcher that are on wherever the launcher runs them.

A switch hides communication under compute, or sends less of it. It is off in the launcher's own
defaults, and on in every plan of `--for` whose settings may have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from parplan.planner.export.fields.arguments import Facts
from parplan.planner.export.fields.settings import Settings
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.models.spec import TrainingSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """A fact of `Settings` that a launcher leaves to its user.

    In the prices no step is slower with it, and no device holds more: it replaces communication by
    less of it, or hides it under compute, and hidden seconds cost a share of them at most
    (costmodels/communication/hiding.py). Data parallelism hides under compute alone, which becomes
    shorter by the seconds that are saved, so that the sum of both never grows. The search therefore
    looks at no settings without a switch that they may have.

    name      the launcher's own argument, for messages
    of_stack  the fact of `Stack` that prices it
    refused   why the launcher stops at settings with it; empty where it runs them
    idle      whether the prices of settings are the same with it and without
    runs_on   whether a machine has what settings with it need
    unpriced  the memory that it takes and that the prices leave out
    """

    name: str
    fact: str
    of_stack: str
    refused: Callable[[Settings], str]
    idle: Callable[[Settings], bool]
    runs_on: Callable[[Settings, Cluster], bool]
    unpriced: str

    def is_on(self, settings: Settings, cluster: Cluster) -> bool:
        """True if settings have it in a plan that is searched for."""
        return not self.refused(settings) and self.runs_on(settings, cluster)


def switched(settings: Settings, switches: Iterable[Switch], cluster: Cluster) -> Settings:
    """Returns the settings with all switches on that they may have, and no others.

    A switch without effect stays as it is.
    """
    facts: Facts = {
        each.fact: each.is_on(settings, cluster) for each in switches if not each.idle(settings)
    }
    return replace(settings, **facts)


def with_switches(
    training: TrainingSpec, switches: Iterable[Switch], on: Iterable[bool]
) -> TrainingSpec:
    """Returns a training whose stack has switches on or off."""
    facts: Facts = {each.of_stack: value for each, value in zip(switches, on, strict=True)}
    if all(getattr(training.stack, fact) == value for fact, value in facts.items()):
        return training
    return replace(training, stack=replace(training.stack, **facts))


def require_legal(settings: Settings, switches: Iterable[Switch]) -> None:
    """Raises ConfigError for a switch that is on where the launcher refuses it."""
    for each in switches:
        reason = each.refused(settings) if getattr(settings, each.fact) else ""
        if reason:
            raise ConfigError(f"{each.name} {reason}", hint=f"leave out {each.name}")
