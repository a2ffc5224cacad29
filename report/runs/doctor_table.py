"""The tables of `plan doctor`: what became of each path, and what each path checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from parplan.planner.runs.doctor_report import DoctorReport, Outcome, PathFinding
from parplan.profiles.machines.user_profile import ProfileEnvironment
from parplan.report.json_result import JsonResult
from parplan.report.text import print_table, say


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorDocument(JsonResult):
    """The findings of `plan doctor` on one machine.

    counts   the number of findings of each outcome that occurs
    """

    environment: ProfileEnvironment
    device: str
    backend: str
    ranks: int
    counts: Mapping[str, int]
    findings: tuple[PathFinding, ...]


def report_document(report: DoctorReport) -> DoctorDocument:
    """Returns the result for `--json`."""
    return DoctorDocument(
        environment=report.environment,
        device=report.device,
        backend=report.backend,
        ranks=report.ranks,
        counts=report.counts,
        findings=report.findings,
    )


def print_report(report: DoctorReport, file: str, out: Console) -> None:
    """Prints a row for each path, the counts, and the file to send."""
    here = report.environment
    devices = f"{report.ranks} x {here.device if report.device == 'cuda' else report.device}"
    say(out, f"{devices}, {report.backend}, torch {here.torch}")
    say(out)
    rows = [
        (each.path, each.outcome.value, f"{each.seconds:.1f}", each.says)
        for each in report.findings
    ]
    bad = [
        number
        for number, each in enumerate(report.findings)
        if each.outcome in (Outcome.WRONG, Outcome.SLOW)
    ]
    heading = ("path", "outcome", "s", "compared")
    print_table(out, heading, rows, left=("path", "outcome", "compared"), bold=bad)
    say(out)
    say(out, ", ".join(f"{count} {outcome}" for outcome, count in report.counts.items()))
    if report.is_healthy:
        say(out, f"written to {file}")
    else:
        say(out, f"please send {file}: it has the machine, its software and these findings")


def print_paths(paths: Sequence[tuple[str, str, int]], out: Console) -> None:
    """Prints the name of each path, what it checks, and the fewest devices that it needs."""
    rows = [(name, str(ranks), checks) for name, checks, ranks in paths]
    print_table(out, ("path", "devices", "checks"), rows, left=("path", "checks"))
