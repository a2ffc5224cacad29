"""Requests for the plan of a launcher: `--for`."""

from __future__ import annotations

from dataclasses import replace

from parplan.commands.options.target_options import TargetOptions
from parplan.planner.export.targets import target_named
from parplan.profiles.errors import ConfigError


def with_launcher(target: TargetOptions, launcher: str | None) -> TargetOptions:
    """Returns the options with the launcher's stack, where neither they nor a profile have one.

    Raises ConfigError for a stack of another program.
    """
    if launcher is None:
        return target
    stacks = target_named(launcher).stacks
    if target.stack is None:
        return target if target.profile else replace(target, stack=stacks[0])
    if target.stack not in stacks:
        raise ConfigError(
            f"--stack {target.stack} is not how {launcher} runs",
            hint=f"leave it out, or use --stack {' or '.join(stacks)}",
        )
    return target


def require_described(launcher: str | None) -> None:
    """Raises ConfigError for a launcher of a traced module, which no launcher has."""
    if launcher is not None:
        raise ConfigError(
            f"--for {launcher} is for described models, and this one is traced",
            hint="leave it out, or choose a model of `plan models` or a config.json",
        )
