"""`plan export`: a plan in the files of the launcher that people already run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from parplan.commands.options.option_values import LAUNCHERS
from parplan.commands.options.result_options import as_json
from parplan.commands.options.sections import OUTPUT
from parplan.commands.style import Command, option, print_json, print_lines, tell, tell_kept

if TYPE_CHECKING:
    from parplan.planner.export.exported import Export

TARGET = "Target"
JOBS = ("slurm", "kubernetes")
TORCHRUN = "torchrun"


@click.command(
    "export",
    cls=Command,
    epilog="  plan export plan.yaml --to megatron\n"
    "  plan export plan.yaml --to megatron --launch slurm -o run/\n"
    "  plan export plan.yaml --to megatron --json | jq .lost",
)
@click.argument("plan_file", metavar="PLAN", type=click.Path(path_type=Path))
@option(
    TARGET,
    "--to",
    type=click.Choice((*LAUNCHERS, TORCHRUN, *JOBS)),
    required=True,
    help="Program that trains; torchrun, slurm and kubernetes start parplan's own executor.",
)
@option(
    TARGET,
    "--launch",
    type=click.Choice(JOBS),
    help="Job that starts the script on every node, as a further file.",
)
@option(
    TARGET,
    "--strict",
    is_flag=True,
    help="Fail, and write nothing, if a part of the plan is lost.",
)
@option(
    OUTPUT,
    "-o",
    "--output",
    "folder",
    type=click.Path(path_type=Path),
    default=".",
    show_default=True,
    metavar="DIR",
    help="Folder of the files; it is made if it is missing.",
)
@option(
    OUTPUT,
    "--force",
    is_flag=True,
    help="Replace files of the same names that no plan was exported to.",
)
@as_json
def export(
    plan_file: Path,
    to: str,
    launch: str | None,
    strict: bool,
    folder: Path,
    force: bool,
    as_json: bool,
) -> int:
    """Write a plan as the configuration of another launcher.

    The files are read back and priced. A part of the plan that the launcher cannot say is listed
    with its cost in seconds of a step and GiB of the fullest GPU. Where what the launcher will run
    does not fit the GPUs, the exit code is 3.
    """
    from parplan.planner.export.exported import export_plan
    from parplan.planner.export.files.exported_files import write_files
    from parplan.planner.export.files.jobs import job, run_files
    from parplan.planner.export.targets import target_named
    from parplan.planner.launchers.known_launchers import EXECUTOR
    from parplan.planner.plan.plan_file import read_any_plan, read_plan
    from parplan.profiles.errors import InfeasibleError
    from parplan.report.plans.export_text import export_document, print_export
    from parplan.report.text import console

    if to not in LAUNCHERS:
        launch = launch if to == TORCHRUN else to
        any_plan = read_any_plan(plan_file)
        files = run_files(any_plan, plan_file, launch)
        if any_plan.search.launcher not in (None, EXECUTOR):
            tell(
                f"the price of the plan is that of {any_plan.search.launcher}; "
                f"plan --for {EXECUTOR} searches the plans of the own executor"
            )
        _wrote(write_files(files, folder, force=force), as_json=as_json)
        return 0
    plan = read_plan(plan_file)
    exported = export_plan(plan, target_named(to), plan_file.name)
    if strict:
        _require_whole(exported)
    files = dict(exported.files)
    if launch:
        files |= job(launch, plan, files, exported.head)
    paths = write_files(files, folder, force=force)
    if as_json:
        print_json(export_document(exported, [str(path) for path in paths]))
    else:
        print_export(exported, plan.model.name, console(sys.stdout))
        _wrote(paths, as_json=False)
    return InfeasibleError.exit_code if exported.configured.missing_bytes else 0


def _require_whole(exported: Export) -> None:
    """Raises ConfigError for an export that lacks a part of its plan."""
    from parplan.profiles.errors import ConfigError
    from parplan.profiles.units import gib

    if exported.losses:
        lost = "; ".join(
            f"{loss.what} ({loss.step_s:+.3f} s, {gib(loss.peak_bytes):+.1f} GiB)"
            for loss in exported.losses
        )
        raise ConfigError(
            f"{exported.target.name} cannot say all of the plan: {lost}",
            hint="leave out --strict to export the rest",
        )


def _wrote(paths: Mapping[Path, Path | None], *, as_json: bool) -> None:
    if as_json:
        from parplan.report.plans.export_text import WrittenFiles

        print_json(WrittenFiles(files=tuple(map(str, paths))))
        return
    for path in paths:
        print_lines(f"wrote {path}")
    tell_kept(*paths.values())
