"""An export of a plan for a person: both prices, and the parts that are lost with their costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from parplan.planner.export.exported import Export
from parplan.profiles.units import gib
from parplan.report.text import aligned, joined, say


def print_export(export: Export, model: str, out: Console) -> None:
    """Print the prices of a plan and of its export, and what is lost."""
    say(out, f"{model} for {export.target.name}, as in {export.target.source}", "bold")
    prices = [("plan", export.plan), ("exported", export.configured)]
    rows = [
        (name, f"{one.price.step_s:.3f} s", f"{gib(one.peak_bytes):.1f} GiB")
        for name, one in prices
    ]
    for line in aligned(rows, out.width, left=(0,)):
        say(out, line)
    if not export.losses:
        say(out, "  lost      nothing")
    for loss in export.losses:
        cost = f"{loss.step_s:+.3f} s, {gib(loss.peak_bytes):+.1f} GiB"
        words = (*loss.what.split(" "), f"({cost})")
        say(out, joined(words, " ", out.width, start="  lost      "))


def export_document(export: Export, files: Sequence[str]) -> dict[str, Any]:
    """Returns the export as JSON has it: seconds of a step, GiB of the fullest GPU."""
    return {
        "target": export.target.name,
        "source": export.target.source,
        "files": list(files),
        "plan": _price(export.plan.price.step_s, export.plan.peak_bytes),
        "exported": _price(export.configured.price.step_s, export.configured.peak_bytes),
        "lost": [
            {"what": loss.what, **_price(loss.step_s, loss.peak_bytes)} for loss in export.losses
        ],
    }


def _price(step_s: float, peak_bytes: float) -> dict[str, float]:
    return {"step_s": step_s, "peak_gib": gib(peak_bytes)}
