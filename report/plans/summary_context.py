"""The facts of a summary that a plan does not hold."""

from __future__ import annotations

from dataclasses import dataclass

from parplan.costmodels.usage.goodput import Failures
from parplan.planner.export.launcher_prices import LauncherPrice
from parplan.planner.launchers.best_of_each import LauncherTable


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryContext:
    """Facts of the summary that the plan does not hold.

    assumed      defaults that were taken
    elapsed_s    seconds of the search, None when unknown
    interrupted  true when Ctrl-C ended the search
    whole        true to print everything, false to print at most MOST_LINES lines
    profile      file of --profile as the user named it, empty when unknown
    plan_file    file of the plan as the user named it, empty when unknown
    launchers    the plan at launchers, in whose nearest settings it is another one
    ruled        a rule of the user said the recompute of the stages
    failures     failures of the cluster, None where no goodput is asked for
    table        the best plans of several launchers, None where one was searched
    not_understood  names in a launcher's file that its reader does not know
    closing      the last lines: the file that was written, and the command that runs it
    """

    assumed: tuple[str, ...] = ()
    elapsed_s: float | None = None
    interrupted: bool = False
    whole: bool = False
    profile: str = ""
    plan_file: str = ""
    launchers: tuple[LauncherPrice, ...] = ()
    ruled: bool = False
    failures: Failures | None = None
    table: LauncherTable | None = None
    not_understood: tuple[str, ...] = ()
    closing: tuple[str, ...] = ()
