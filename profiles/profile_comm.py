"""Times the communication of the ranks that torchrun started.

torchrun --nproc-per-node N -m parplan.profiles.profile_comm -o comm.yaml
"""

from __future__ import annotations

import datetime
import math
import os
import signal
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import click
import torch
import torch.distributed as dist

from parplan.profiles.documents.files import explained_file_errors
from parplan.profiles.documents.texts import escaped, escaped_lines
from parplan.profiles.errors import ConfigError, PlannerError
from parplan.profiles.machines.measurements import Case, Record
from parplan.profiles.profiler.communication.comm_cases import comm_cases
from parplan.profiles.profiler.communication.comm_file import (
    COMM_VERSION,
    CommFile,
    in_flight_path,
    write_comm_file,
)
from parplan.profiles.profiler.communication.comm_run import ATTEMPTS, Chief, InFlight, run_cases
from parplan.profiles.profiler.communication.group_shapes import World
from parplan.profiles.profiler.communication.measuring_ranks import (
    chosen_device,
    join_world,
    world_of_environment,
)
from parplan.profiles.profiler.journal import journal_path, open_journal
from parplan.profiles.standard_streams import sturdy_streams
from parplan.profiles.units import (
    GB,
    GIB,
    MIB,
    US_PER_S,
    format_number,
    format_seconds,
    parse_size,
)

LARGEST_BYTES = {"cuda": GIB, "cpu": 64 * MIB}
PRECISION = {"cuda": "bf16", "cpu": "fp32"}
PRODUCT = {"cuda": 4096, "cpu": 512}  # rows and columns of the product in overlap cases
TIMEOUT_S = 120.0  # for one collective
HELP = (
    "Time collectives and messages of the ranks that torchrun started, for each group that a mesh "
    "can make of them."
)
EXAMPLE = (
    "\b\nExamples:\n"
    "  torchrun --nproc-per-node 8 -m parplan.profiles.profile_comm -o comm.yaml\n"
    "  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HOST:29500 \\\n"
    "      -m parplan.profiles.profile_comm -o comm.yaml --minutes 5"
)


@click.command(help=HELP, epilog=EXAMPLE, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    metavar="FILE",
    help="Where the records go; a run that was interrupted goes on with FILE.journal.",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="auto: GPUs if any.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(0, min_open=True),
    metavar="N",
    help="Stop then; what says most comes first. [default: until all is measured]",
)
@click.option(
    "--largest", metavar="SIZE", help="The largest tensor. [default: 1GiB, on CPUs 64MiB]"
)
@click.option(
    "--restart", is_flag=True, help="Measure anew what an earlier run left in FILE.journal."
)
@click.option(
    "--attempts",
    type=click.IntRange(1),
    default=ATTEMPTS,
    show_default=True,
    metavar="N",
    help="Record a case as crashed when so many runs have ended in it without a word.",
)
def main(
    output: Path,
    device: str,
    minutes: float | None,
    largest: str | None,
    restart: bool,
    attempts: int,
) -> None:
    """Times the communication of the ranks that torchrun started."""
    began_s = time.monotonic()
    if minutes is not None and not math.isfinite(minutes):
        raise ConfigError(
            f"--minutes is {minutes}, it must be a finite number",
            hint="leave --minutes out to measure everything",
        )
    world, where = world_of_environment(), chosen_device(device)
    cases = comm_cases(
        world,
        largest_bytes=LARGEST_BYTES[where.type]
        if largest is None
        else parse_size("--largest", largest),
        precision=PRECISION[where.type],
        product=PRODUCT[where.type],
    )
    chief = None
    if os.environ["RANK"] == "0":
        ends_at_s = math.inf if minutes is None else began_s + 60 * minutes
        chief = _chief(cases, output, _measured_on(world, where), ends_at_s, restart=restart)
        chief.give_up(attempts)
    ranks = join_world(world, where, timedelta(seconds=TIMEOUT_S))
    try:
        run_cases(cases, ranks, chief)
    finally:
        if chief is not None:
            _write(chief, output, _measured_on(world, where))
    dist.destroy_process_group()


def _measured_on(world: World, device: torch.device) -> dict[str, Any]:
    """The machine that records hold for."""
    cuda = device.type == "cuda"
    nccl = cast(Any, torch.cuda.nccl)
    return {
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "backend": f"nccl {'.'.join(map(str, nccl.version()))}" if cuda else "gloo",
        "torch": torch.__version__,
        "nodes": world.nodes,
        "ranks_per_node": world.ranks_per_node,
    }


def _chief(
    cases: Sequence[Case],
    output: Path,
    measured_on: Mapping[str, Any],
    ends_at_s: float,
    *,
    restart: bool,
) -> Chief:
    """Rank 0's part, with the records that an earlier run left."""
    journal = open_journal(journal_path(output), measured_on, restart=restart)
    for note in journal.notes:
        click.echo(f"note: {note}", err=True)
    return Chief(
        cases=cases,
        journal=journal,
        in_flight=InFlight(in_flight_path(output)),
        ends_at_s=ends_at_s,
        told=_tell,
    )


def _tell(record: Record, done: int, number: int) -> None:
    shown = record.outcome.value
    if record.measured is not None and "time" in record.measured.times:
        time_s = record.measured.times["time"].median_us / US_PER_S
        speed = format_number(record.case.size("bytes") / time_s / GB, 3)
        shown = f"{format_seconds(time_s)}, {speed} GB/s"
    elif record.measured is not None:
        shown = ", ".join(
            f"{name} {format_number(value, 4)}" for name, value in record.measured.figures.items()
        )
    click.echo(f"{done}/{number}  {record.case.key}  {shown}", err=True)


def _write(chief: Chief, output: Path, measured_on: Mapping[str, Any]) -> None:
    """Writes the file of all records; the journal stays while cases are left."""
    records = tuple(
        chief.journal.records[case.key] for case in chief.cases if case.key in chief.journal.records
    )
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    write_comm_file(
        output, CommFile(comm_version=COMM_VERSION, date=date, records=records, **measured_on)
    )
    left = len(chief.left())
    if left:
        click.echo(
            f"note: {left} of {len(chief.cases)} cases are left; the same command goes on with "
            "them",
            err=True,
        )
        chief.journal.close()
    else:
        chief.journal.delete()
    click.echo(f"wrote {escaped(str(output))}: {len(records)} records", err=True)


def run() -> int:
    """Runs the command and returns its exit code: 0, or that of the error."""
    with sturdy_streams():
        try:
            with explained_file_errors():
                main(prog_name="python -m parplan.profiles.profile_comm", standalone_mode=False)
        except PlannerError as error:
            if os.environ.get("RANK", "0") == "0":
                click.echo(
                    f"error: {escaped(error.message)}"
                    + (f"\nhint: {escaped_lines(error.hint)}" if error.hint else ""),
                    err=True,
                )
            return error.exit_code
        except click.ClickException as error:
            error.show()
            return error.exit_code
    return 0


if __name__ == "__main__":
    # The default action ends even a rank that waits inside a collective, without a traceback; a
    # shell reports 130.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    code = run()
    os._exit(code)  # not sys.exit, because gloo's threads may still run during its teardown
