"""The settings file of a project or a user, which says the launchers that they run plans on.

A project has `parplan.yaml` in the current folder or one above it, a user `config.yaml` in the
application's folder of the user (`click.get_app_dir`). The project's comes first, and an option of
the command line before both.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from parplan.commands.output import PROJECT_FILE

USER_FILE = "config.yaml"
KEY = "for"


@dataclass(frozen=True, slots=True)
class LauncherSetting:
    """The launchers that a settings file names."""

    launchers: tuple[str, ...]
    path: Path

    @property
    def phrase(self) -> str:
        """The option that the file stands for, and the file."""
        return f"--for {','.join(self.launchers)} ({self.path.name})"


def launcher_setting() -> LauncherSetting | None:
    """Returns the launchers of the nearest settings file, None where there is none.

    Raises ConfigError for a file that is no YAML, an unknown key, and an unknown launcher.
    """
    path = next((path for path in _places() if path.is_file()), None)
    if path is None:
        return None
    return LauncherSetting(_launchers(path), path)


def _places() -> tuple[Path, ...]:
    here = Path.cwd()
    folders = (here, *here.parents)
    user = Path(click.get_app_dir("parplan"))
    return (*(folder / PROJECT_FILE for folder in folders), user / USER_FILE)


def _launchers(path: Path) -> tuple[str, ...]:
    from parplan.commands.options.option_values import SEARCHED_FOR
    from parplan.profiles.documents.packaged_configs import read_config
    from parplan.profiles.errors import ConfigError, unknown_name_error

    stated = read_config(path)
    if isinstance(stated, dict) and "plan_version" in stated:
        raise ConfigError(
            f"{path} is a plan, and stands where a project has its settings",
            hint=f"give the plan another name than {PROJECT_FILE}",
        )
    if not isinstance(stated, dict) or set(stated) != {KEY}:
        found = ", ".join(map(str, stated)) if isinstance(stated, dict) else "no mapping"
        raise ConfigError(
            f"{path} has {found or 'nothing'}, a settings file has the one key '{KEY}'",
            hint=f"write a line such as '{KEY}: megatron'",
        )
    value = stated[KEY]
    if not value:
        raise ConfigError(
            f"{KEY} of {path} names no launcher", hint=f"write a line such as '{KEY}: megatron'"
        )
    names = value if isinstance(value, list) else str(value).split(",")
    chosen = tuple(str(name).strip() for name in names)
    for name in chosen:
        if name not in SEARCHED_FOR:
            raise unknown_name_error("launcher", name, SEARCHED_FOR, where=f"{KEY} of {path}")
    return chosen
