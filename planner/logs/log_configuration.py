"""The configuration that a log prints, as that of a launcher's own file."""

from __future__ import annotations

from pathlib import Path

from parplan.planner.export.fields.understood import require_priced
from parplan.planner.export.launcher_file import LauncherFile
from parplan.planner.export.megatron.megatron import MEGATRON
from parplan.planner.export.torchtitan.torchtitan import TORCHTITAN
from parplan.planner.logs.last_layout import last_layout
from parplan.planner.logs.printed_arguments import printed_arguments
from parplan.planner.logs.titan_lines import titan_options


def configuration_of_log(path: Path) -> LauncherFile | None:
    """Returns the configuration that a log prints, None of one that prints none.

    Of a log with restarts it is that of the last start. Raises ConfigError for a log that is not
    readable, and for arguments that change time or memory without a price.
    """
    lines = last_layout(path).settings
    given, processes = printed_arguments(lines, str(path))
    if given:
        stated = {"--gpus": f"{processes}"} if processes else {}
        require_priced(MEGATRON, given)
        return LauncherFile(path=path, target=MEGATRON, given=given, options=stated)
    given, machine = titan_options(lines, str(path))
    if given:
        return LauncherFile(path=path, target=TORCHTITAN, given=given, options=machine)
    return None
