"""The steps that were read from logs, beside their prices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from parplan.planner.logs.measured_row import MeasuredSteps
from parplan.profiles.units import counted, gib
from parplan.report.json_result import JsonResult
from parplan.report.text import print_table, say, seconds_text

_FAR = 0.01  # share of a step by which a row and its plan may differ in price


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRow:
    """The steps of a log beside their price.

    steps      number of steps that count
    left_out   number of those that do not: warm-up, or another batch
    starts     number of times that the run started
    step_s     the median step
    spread_s   the steps that a tenth are below and above
    priced_s   the step of the plan that the configuration is
    row        the row of a steps table, without its empty cells
    """

    log: str
    format: str
    steps: int
    left_out: int
    starts: int
    step_s: float
    spread_s: tuple[float, float]
    priced_s: float
    remarks: tuple[str, ...]
    row: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportDocument(JsonResult):
    """The steps that were read from logs."""

    logs: tuple[LogRow, ...]


def print_import(measured: Sequence[MeasuredSteps], out: Console) -> None:
    """Print a line of every log, and what is to be known of it."""
    print_table(
        out,
        ("log", "steps", "measured", "80 % of steps", "priced", "memory", "priced memory"),
        [_line(each) for each in measured],
        left=("log",),
    )
    for each in measured:
        for remark in _remarks(each):
            say(out, f"  {each.run.path.name}: {remark}")


def _line(each: MeasuredSteps) -> tuple[str, ...]:
    predicted = each.plan.predicted
    priced = each.priced.predicted_gib
    size = each.run.reserved_bytes or each.run.allocated_bytes
    return (
        each.run.path.name,
        f"{len(each.run.values)}",
        seconds_text(each.step_s),
        f"{each.spread_s[0]:.4g} to {each.spread_s[1]:.4g} s",
        seconds_text(predicted.step_time_s.value),
        "" if size is None else f"{gib(size):.1f} GiB",
        "" if priced is None else f"{priced:.1f} GiB",
    )


def _remarks(each: MeasuredSteps) -> list[str]:
    run, row_s = each.run, each.priced.predicted_s
    remarks = []
    if run.parts > 1:
        remarks.append(f"{run.parts} starts")
    if run.other_layouts:
        starts = counted(run.other_layouts, "start")
        remarks.append(f"{starts} with another configuration before them do not count")
    if run.left_out:
        remarks.append(f"{run.left_out} steps of warm-up or of another batch do not count")
    plan_s = each.plan.predicted.step_time_s.value
    if each.priced.reason:
        remarks.append(f"plan validate cannot price its row: {each.priced.reason}")
    elif row_s is not None and abs(row_s / plan_s - 1) > _FAR:
        remarks.append(
            f"plan validate prices its row at {seconds_text(row_s)}, for a steps table has no "
            f"column for a part of this configuration"
        )
    return remarks


def import_document(measured: Sequence[MeasuredSteps]) -> ImportDocument:
    """Returns the logs for `--json`."""
    return ImportDocument(logs=tuple(map(_log_row, measured)))


def _log_row(each: MeasuredSteps) -> LogRow:
    return LogRow(
        log=str(each.run.path),
        format=each.run.format.name,
        steps=len(each.run.values),
        left_out=each.run.left_out,
        starts=each.run.parts,
        step_s=each.step_s,
        spread_s=each.spread_s,
        priced_s=each.plan.predicted.step_time_s.value,
        remarks=tuple(_remarks(each)),
        row={name: value for name, value in each.row.items() if value},
    )
