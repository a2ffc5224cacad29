"""`plan doctor`: the first run on GPUs.

All imports but click's are made where they are used.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from parplan.commands.options.result_options import as_json
from parplan.commands.options.sections import OUTPUT
from parplan.commands.output import require_torch
from parplan.commands.style import Command, Number, option, print_json, tell, tell_kept

if TYPE_CHECKING:
    from parplan.executor.doctor.path import GpuPath
    from parplan.planner.runs.doctor_report import DoctorReport, PathFinding

WHERE = "Where"
MOST_RANKS = 8
_NO_GPU = "torch sees no GPU here: the paths run on CPUs through gloo"
UNHEALTHY = 3  # exit code of a path that was wrong or slow


@click.command(
    "doctor",
    cls=Command,
    epilog=(
        "  plan doctor\n  plan doctor --list\n  plan doctor --path chunks --path lookup\n"
        "  plan doctor --device cpu --ranks 2 -o doctor.yaml\n"
        "  plan doctor --json | jq '.findings[] | select(.outcome == \"wrong\")'"
    ),
)
@option(
    WHERE,
    "--device",
    type=click.Choice(("auto", "cuda", "cpu", "standin")),
    default="auto",
    show_default=True,
    help="Device to examine; auto takes GPUs if there are any. standin is a second device on the "
    "CPU that refuses tensors of two devices in one operator.",
)
@option(
    WHERE,
    "--ranks",
    type=click.IntRange(1, MOST_RANKS),
    metavar="N",
    help="Processes, one on each device. [default: as many as there are GPUs, up to 8; 2 on CPUs]",
)
@option(
    WHERE,
    "--path",
    "names",
    multiple=True,
    metavar="NAME",
    help="Run only this path; may be repeated. [default: all]",
)
@option(
    WHERE,
    "--minutes",
    type=Number(min=0, min_open=True, max=60),
    default=5.0,
    show_default=True,
    metavar="N",
    help="Time budget; a path that has not begun by then does not run.",
)
@option(WHERE, "--list", "lists", is_flag=True, help="List the paths, and run none.")
@option(
    OUTPUT,
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("doctor.yaml"),
    show_default=True,
    metavar="FILE",
    help="The file to send: machine, software and all findings.",
)
@as_json
def doctor(
    device: str,
    ranks: int | None,
    names: tuple[str, ...],
    minutes: float,
    lists: bool,
    output: Path,
    as_json: bool,
) -> int:
    """Run every path that only GPUs have, each beside the same on the CPU.

    Run this first on a machine with GPUs. In five minutes, on up to 8 GPUs, it runs collectives,
    batched exchanges, streams and events, pinned copies, attention kernels, products of 16 and 8
    bits, offload, chunks, token lookup, checkpoints, and the profiler's timers, and says of each
    whether it passed, was refused, was wrong or was slow. Without a GPU it runs the same paths on
    CPUs through gloo, and says which it could not run. Exit code 3 when a path was wrong or slow.
    """
    from parplan.report.runs.doctor_table import print_paths, print_report, report_document
    from parplan.report.text import console

    require_torch("plan doctor runs the executor, which needs torch")
    paths = _chosen(names)
    if lists:
        if as_json:
            raise click.UsageError("--list prints a table, --json the findings: leave out one")
        print_paths([(path.name, path.checks, path.ranks) for path in paths], console(sys.stdout))
        return 0
    from parplan.planner.runs.doctor_report import write_report
    from parplan.profiles.documents.files import require_writable

    require_writable(output, hint="choose another file with -o")
    report = _examined(device, ranks, paths, minutes)
    tell_kept(write_report(report, output))
    if as_json:
        print_json(report_document(report))
    else:
        print_report(report, str(output), console(sys.stdout))
    return 0 if report.is_healthy else UNHEALTHY


def _chosen(names: tuple[str, ...]) -> tuple[GpuPath, ...]:
    """Returns the paths of those names, or all. Raises ConfigError."""
    from parplan.executor.doctor.paths import PATHS
    from parplan.profiles.errors import unknown_name_error

    known = [path.name for path in PATHS]
    for name in names:
        if name not in known:
            raise unknown_name_error("path", name, known, where="--path")
    return tuple(path for path in PATHS if not names or path.name in names)


def _examined(
    asked: str, ranks: int | None, paths: tuple[GpuPath, ...], minutes: float
) -> DoctorReport:
    from parplan.commands.doctor_plans import doctor_plans
    from parplan.executor.doctor.worlds import chosen_devices, examine
    from parplan.planner.runs.doctor_report import DOCTOR_VERSION, DoctorReport
    from parplan.profiles.profiler.environment import environment

    kind, number = chosen_devices(asked, ranks)
    if kind != asked:
        tell(f"the paths run on {number} GPUs" if kind == "cuda" else _NO_GPU)
    if number != (ranks or number):
        tell(f"the paths run on {number} of {ranks} devices, a power of two")
    here = environment("cuda" if kind == "cuda" else "cpu")
    examined = examine(
        kind, number, doctor_plans(number), paths=paths, budget_s=60 * minutes, on_finding=_say
    )
    return DoctorReport(
        doctor_version=DOCTOR_VERSION,
        environment=here,
        device=kind,
        backend={"cuda": "nccl", "cpu": "gloo"}.get(kind, kind),
        ranks=number,
        findings=examined.findings,
    )


def _say(finding: PathFinding) -> None:
    tell(f"{finding.outcome}: {finding.path}")
