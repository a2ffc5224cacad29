"""The programs that run plans: the launchers that plans are exported to, and the own executor.

A launcher is a program with a space, the plans that its arguments can say, and a stack, how the
program runs them. The own executor reads plan files, so that its space is every plan that its stack
runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from parplan.planner.export.fields.launcher import Target, require_plain
from parplan.planner.export.targets import TARGETS
from parplan.planner.request import Request
from parplan.profiles.errors import ConfigError, unknown_name_error

EXECUTOR = "parplan"
NO_LAUNCHER = "none"  # every plan that a stack may run, whether a program can say it or not


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """A program that runs plans.

    stacks    the stacks that describe it, its usual one first
    target    its arguments and files; None for the own executor, which reads plan files
    """

    name: str
    stacks: tuple[str, ...]
    target: Target | None


LAUNCHERS: Mapping[str, Launcher] = {
    **{
        name: Launcher(name=name, stacks=target.stacks, target=target)
        for name, target in TARGETS.items()
    },
    EXECUTOR: Launcher(name=EXECUTOR, stacks=(EXECUTOR,), target=None),
}


def launcher_named(name: str) -> Launcher:
    """Returns a launcher. Raises ConfigError for an unknown name."""
    if name not in LAUNCHERS:
        raise unknown_name_error("launcher", name, LAUNCHERS)
    return LAUNCHERS[name]


def launchers_of_stack(stack: str) -> tuple[str, ...]:
    """Returns the names of the launchers that a stack describes, () where there is none."""
    return tuple(each.name for each in LAUNCHERS.values() if stack in each.stacks)


def unable(launcher: Launcher, request: Request) -> str | None:
    """Returns why a launcher cannot run any plan of a request, or None where nothing forbids it.

    Only the request is looked at: nothing of its plans is priced.
    """
    if launcher.target is None:
        return None
    return next((reason for reason, is_so in _obstacles(launcher.target, request) if is_so), None)


def _obstacles(target: Target, request: Request) -> Iterator[tuple[str, bool]]:
    pins = request.constraints
    yield "starts no pools of unlike nodes", bool(request.cluster.pool_names)
    yield "is not run on CPUs", request.cluster.device.is_host
    yield "runs a model of its own, not --module", request.module is not None
    yield "its settings are searched without --offload", bool(pins.offload)
    yield "does not say --zero-by-operator", pins.zero_by_operator
    yield "does not say --tp-overlap", pins.tp_overlap not in (None, (0,))
    yield "does not say --tp-rows", pins.tp_rows not in (None, (1,))
    yield "does not say --weights-over-data", True in (pins.weights_over_data or ())
    yield "does not say --recompute-first-stage", pins.recompute_first_stage is not None
    stack = request.training.stack.name
    yield f"is not described by the stack {stack}", stack not in target.stacks
    try:
        require_plain(request.model, request.training, target)
    except ConfigError as error:
        yield error.message, True
