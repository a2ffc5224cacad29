"""Requests for the plans of launchers: `--for`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from parplan.commands.options.search_options import SearchFlags
from parplan.commands.options.target_options import TargetOptions
from parplan.commands.user_settings import launcher_setting
from parplan.planner.launchers.known_launchers import (
    EXECUTOR,
    LAUNCHERS,
    NO_LAUNCHER,
    launcher_named,
    launchers_of_stack,
)
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.machine_catalog import load_stack


def with_launcher(target: TargetOptions, launcher: str | None) -> TargetOptions:
    """Returns the options with the launcher's stack, where neither they nor a profile have one.

    A file of a stack overrides the facts of the launcher's. Raises ConfigError for the stack of
    another program.
    """
    if launcher in (None, NO_LAUNCHER):
        return target
    stacks = launcher_named(launcher).stacks
    if target.stack is None:
        return target if target.profile else replace(target, stack=stacks[0])
    if load_stack(target.stack).name not in stacks:
        raise ConfigError(
            f"--stack {target.stack} is not how {launcher} runs",
            hint=f"leave it out, or use --stack {' or '.join(stacks)}",
        )
    return target


def launchers_to_search(
    target: TargetOptions, flags: SearchFlags, *, fastest_alone: bool
) -> tuple[str, ...]:
    """Returns the launchers whose plans a request asks for, the widest space last.

    By default they are those that the stack of the request describes, those of the settings file
    of the project or the user, or all. Another aim than the
    fastest step is searched among all plans of a stack.

    fastest_alone    the aim is the fastest step, by the planner's own search
    Raises ConfigError.
    """
    if flags.launchers is not None:
        return _named(flags.launchers)
    stack = _stack_name(target)
    if not fastest_alone:
        return (EXECUTOR if stack == EXECUTOR else NO_LAUNCHER,)
    if stack is None:
        setting = launcher_setting()
        return _named(setting.launchers) if setting else tuple(LAUNCHERS)
    return launchers_of_stack(stack) or (NO_LAUNCHER,)


def _named(names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the named launchers, each once. Raises ConfigError for `none` beside others."""
    chosen = tuple(dict.fromkeys(names))
    if NO_LAUNCHER in chosen and len(chosen) > 1:
        others = ", ".join(name for name in chosen if name != NO_LAUNCHER)
        raise ConfigError(
            f"--for {NO_LAUNCHER} is what no program can run, beside {others}",
            hint=f"leave out {NO_LAUNCHER}",
        )
    return tuple(name for name in (*LAUNCHERS, NO_LAUNCHER) if name in chosen)


def _stack_name(target: TargetOptions) -> str | None:
    """Returns the name of the stack of the options or of their profile, None without one.

    Raises ConfigError.
    """
    if target.stack is not None:
        return load_stack(target.stack).name
    if target.profile is None:
        return None
    from parplan.profiles.machines.applied_profile import stack_of
    from parplan.profiles.machines.user_profile import read_profile

    run_by = stack_of(read_profile(Path(target.profile)))
    return None if run_by is None else load_stack(run_by).name


def one_launcher(names: tuple[str, ...] | None) -> str:
    """Returns the launcher of a command that takes one, `none` by default.

    Raises ConfigError for several.
    """
    if names is not None and len(names) > 1:
        raise ConfigError(
            f"--for {','.join(names)}: this command is for one launcher, as each has its own stack",
            hint="name one of them",
        )
    return NO_LAUNCHER if names is None else names[0]


def require_fastest(flags: SearchFlags, names: tuple[str, ...], *, fastest_alone: bool) -> None:
    """Raises ConfigError for an aim that several launchers cannot be asked for."""
    if fastest_alone or len(names) == 1:
        return
    asked = next(_further_aims(flags), "this aim")
    raise ConfigError(
        f"{asked} goes with one launcher, --for names {len(names)}", hint="name one of them"
    )


def _further_aims(flags: SearchFlags) -> Iterator[str]:
    if flags.objective != "throughput":
        yield f"--objective {flags.objective}"
    if flags.robust is not None:
        yield "--robust"
    if flags.method is not None:
        yield f"--search {flags.method}"


def require_described(launchers: tuple[str, ...] | None) -> None:
    """Raises ConfigError for a launcher of a traced module, which the own executor alone runs."""
    other = [name for name in launchers or () if name != EXECUTOR]
    if other:
        raise ConfigError(
            f"--for {','.join(other)} is for described models, and this one is traced",
            hint="leave it out, or choose a model of `plan models` or a config.json",
        )
