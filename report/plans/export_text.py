"""An export of a plan for a person: both prices, and the parts that are lost with their costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from parplan.planner.export.exported import Export
from parplan.profiles.units import gib
from parplan.report.json_result import JsonResult
from parplan.report.text import aligned, joined, say


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFiles(JsonResult):
    """The paths of the files that were written."""

    files: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportPrice:
    """Seconds of a step and GiB of the fullest GPU."""

    step_s: float
    peak_gib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportLoss(ExportPrice):
    """A part of the plan that the launcher cannot say, in words, with what that costs."""

    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportDocument(WrittenFiles):
    """An export, with the prices of the plan and of what the launcher will run.

    source        whose arguments the files have
    missing_gib   GiB that a GPU lacks for what the launcher will run, 0 where all fit
    """

    target: str
    source: str
    plan: ExportPrice
    exported: ExportPrice
    missing_gib: float
    lost: tuple[ExportLoss, ...]


def print_export(export: Export, model: str, out: Console) -> None:
    """Print the prices of a plan and of its export, and what is lost; first what does not fit."""
    if export.configured.missing_bytes:
        text = f"does not fit: a GPU lacks {gib(export.configured.missing_bytes):.1f} GiB"
        if not export.configured.strategy.layout.pools:
            text += f"; plan --for {export.target.name} searches settings that fit"
        say(out, joined(text.split(" "), " ", out.width, indent=2))
    say(out, f"{model} for {export.target.name}, as in {export.target.source}", "bold")
    prices = [("plan", export.plan), ("exported", export.configured)]
    rows = [
        (name, f"{one.price.step_s:.3f} s", f"{gib(one.peak_bytes):.1f} GiB")
        for name, one in prices
    ]
    for line in aligned(rows, out.width, left=(0,)):
        say(out, line)
    slower = export.configured.price.step_s > export.plan.price.step_s
    if export.losses and slower and not export.configured.missing_bytes:
        text = f"plan --for {export.target.name} searches its own settings, which may be faster"
        say(out, joined(text.split(" "), " ", out.width, start="  ", indent=4))
    if not export.losses:
        say(out, "  lost      nothing")
    for loss in export.losses:
        cost = f"{loss.step_s:+.3f} s, {gib(loss.peak_bytes):+.1f} GiB"
        words = (*loss.what.split(" "), f"({cost})")
        say(out, joined(words, " ", out.width, start="  lost      "))


def export_document(export: Export, files: Sequence[str]) -> ExportDocument:
    """Returns the export as JSON has it: seconds of a step, GiB of the fullest GPU."""
    plan, exported = (
        ExportPrice(step_s=one.price.step_s, peak_gib=gib(one.peak_bytes))
        for one in (export.plan, export.configured)
    )
    return ExportDocument(
        target=export.target.name,
        source=export.target.source,
        files=tuple(files),
        plan=plan,
        exported=exported,
        missing_gib=gib(export.configured.missing_bytes),
        lost=tuple(
            ExportLoss(what=loss.what, step_s=loss.step_s, peak_gib=gib(loss.peak_bytes))
            for loss in export.losses
        ),
    )
