"""The best plans of a sweep, as a table for people and as JSON values for programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from parplan.costmodels.communication.mesh import Mesh
from parplan.planner.plan.derived import tokens_per_s
from parplan.planner.plan.plan import Plan
from parplan.planner.search.many_searches import Answer
from parplan.profiles.units import counted
from parplan.report.json_result import JsonResult, KindedNumber
from parplan.report.names import plan_phrase
from parplan.report.searches.drawn_points import print_points
from parplan.report.searches.largest_table import peak_gib
from parplan.report.text import (
    gib_text,
    joined,
    labelled,
    percent,
    print_table,
    say,
    seconds_text,
)

SweptRow = tuple[Mapping[str, Any], Answer]  # the values of the options that are swept
_NAMES = {"gpus": "GPUs", "gpu": "GPU", "global_batch_size": "batch", "seq_length": "sequence"}
_NUMBERS: dict[str, Callable[[Plan], int]] = {  # in the order in which they are drawn
    "gpus": lambda plan: plan.cluster.num_gpus,
    "global_batch_size": lambda plan: plan.training.global_batch_size,
    "seq_length": lambda plan: plan.training.seq_length,
}
_UNITS = {"gpus": "GPUs", "global_batch_size": "sequences", "seq_length": "tokens"}
_HEIGHT = 6  # lines of the points of a drawing
_LEFT = ("GPU", "plan")


@dataclass(frozen=True, slots=True, kw_only=True)
class NoPlanRow:
    """A combination without a plan, and why; an option that was not given is null."""

    gpus: int | None
    gpu: str | None
    global_batch_size: int | None
    seq_length: int | None
    error: str
    hint: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """The best plan of a combination.

    mfu               share of the peak FLOP/s of all GPUs
    peak_memory_gib   of the fullest GPU
    gap               share by which the search may have missed a faster plan
    plan_file         null where it was not written
    """

    gpus: int
    gpu: str
    global_batch_size: int
    seq_length: int
    step_time_s: KindedNumber
    tokens_per_s: float
    mfu: float
    peak_memory_gib: float
    gap: float
    mesh: Mesh
    plan_file: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepDocument(JsonResult):
    """The best plans of every combination of options.

    elapsed_s   seconds of all searches
    stopped     why the sweep ended early, null for a complete one
    """

    elapsed_s: float
    stopped: str | None
    rows: tuple[SweepRow | NoPlanRow, ...]


def print_sweep(
    rows: Sequence[SweptRow],
    stopped: str | None,
    paths: Sequence[Path],
    out: Console,
    elapsed_s: float,
) -> None:
    """Print a row for every combination, drawn where several differ in a number, and the rest."""
    swept = _swept(rows)
    table = [_cells(values, answer.plan, swept) for values, answer in rows if answer.plan]
    if table:
        numbered = _draw([answer.plan for _, answer in rows if answer.plan], swept, out)
        heading = ("#", *table[0]) if numbered else tuple(table[0])
        cells = [
            (str(number), *row.values()) if numbered else tuple(row.values())
            for number, row in enumerate(table, 1)
        ]
        if numbered and not _fits([heading, *cells], out.width):
            print_table(out, heading[:-1], [row[:-1] for row in cells], left=_LEFT)
            say(out)
            print_table(out, ("#", "plan"), [(row[0], row[-1]) for row in cells], left=_LEFT)
        else:
            print_table(out, heading, cells, left=_LEFT)
        say(out)
    for label, text in _facts(rows, stopped, paths, elapsed_s):
        say(out, joined(text.split(" "), " ", out.width, start=labelled(label)))


def _fits(table: Sequence[Sequence[str]], width: int) -> bool:
    """True if no plan, the last column, needs more than two lines beside the other columns."""
    taken = sum(max(map(len, column)) + 2 for column in list(zip(*table, strict=True))[:-1])
    return max(len(row[-1]) for row in table) <= 2 * (width - 2 - taken)


def _draw(plans: Sequence[Plan], swept: Sequence[str], out: Console) -> bool:
    """Draw tokens/s against the first number that is swept; False where none is."""
    name = next((each for each in _NUMBERS if each in swept and _differ(plans, each)), None)
    if name is None:
        return False
    say(out, f"  tokens/s against {_NAMES[name]}, by number", "dim")
    points = [(float(_NUMBERS[name](plan)), tokens_per_s(plan)) for plan in plans]
    print_points(points, (_UNITS[name], ""), out, height=_HEIGHT)
    return True


def _differ(plans: Sequence[Plan], name: str) -> bool:
    return len({_NUMBERS[name](plan) for plan in plans}) > 1


def _swept(rows: Sequence[SweptRow]) -> tuple[str, ...]:
    """Returns the options with several values, and the number of GPUs."""
    first, _ = rows[0]
    return tuple(
        name for name in first if name == "gpus" or len({values[name] for values, _ in rows}) > 1
    )


def _cells(values: Mapping[str, Any], plan: Plan | None, swept: Sequence[str]) -> dict[str, str]:
    assert plan is not None, "rows without a plan are listed below the table"
    shown = {"gpus": f"{plan.cluster.num_gpus:,}"} | {
        name: _value_text(values[name]) for name in swept if name != "gpus"
    }
    return {
        **{_NAMES[name]: shown[name] for name in swept},
        "step": seconds_text(plan.predicted.step_time_s.value),
        "tokens/s": f"{tokens_per_s(plan):,.0f}",
        "a GPU": f"{plan.predicted.tokens_per_s_per_gpu.value:,.0f}",
        "MFU": percent(plan.predicted.mfu.value),
        "GiB": gib_text(peak_gib(plan)),
        "gap": percent(plan.search.gap),
        "plan": plan_phrase(plan),
    }


def _value_text(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _facts(
    rows: Sequence[SweptRow], stopped: str | None, paths: Sequence[Path], elapsed_s: float
) -> Iterator[tuple[str, str]]:
    """Yields the lines under the table: what has no plan, an early end, files, notes."""
    label = "no plan"
    for values, answer in rows:
        if answer.error:
            given = ", ".join(_value_text(value) for value in values.values() if value is not None)
            yield label, f"{given}: {answer.error.message}"
            label = ""
    if stopped:
        yield "stopped", f"early ({stopped}): the rows that follow were not searched"
    yield "searched", f"{counted(len(rows), 'request')} in {elapsed_s:.1f} s"
    plans = [answer.plan for _, answer in rows if answer.plan]
    kinds = sorted({str(plan.predicted.step_time_s.kind) for plan in plans})
    yield (
        "note",
        f"step times are predicted ({', '.join(kinds) or 'computed'}), not measured; GiB: of the "
        f"fullest GPU; a GPU: tokens/s of one; gap: of the proof of each plan",
    )
    written = [path for (_, answer), path in zip(rows, paths, strict=False) if answer.plan]
    if written:
        yield "files", f"{written[0]} to {written[-1]}" if len(written) > 1 else f"{written[0]}"


def sweep_document(
    rows: Sequence[SweptRow], stopped: str | None, paths: Sequence[Path], elapsed_s: float
) -> SweepDocument:
    """Returns the rows for `--json`."""
    files: list[str | None] = [str(path) for path in paths] or [None] * len(rows)
    return SweepDocument(
        elapsed_s=round(elapsed_s, 3),
        stopped=stopped,
        rows=tuple(
            _row(values, answer, file) for (values, answer), file in zip(rows, files, strict=True)
        ),
    )


def _row(values: Mapping[str, Any], answer: Answer, file: str | None) -> SweepRow | NoPlanRow:
    plan = answer.plan
    if plan is None:
        assert answer.error is not None, "an answer without a plan says why"
        return NoPlanRow(**values, error=answer.error.message, hint=answer.error.hint)
    step = plan.predicted.step_time_s
    return SweepRow(
        gpu=plan.cluster.device.name,
        gpus=plan.cluster.num_gpus,
        global_batch_size=plan.training.global_batch_size,
        seq_length=plan.training.seq_length,
        step_time_s=KindedNumber(value=step.value, kind=str(step.kind)),
        tokens_per_s=round(tokens_per_s(plan), 3),
        mfu=plan.predicted.mfu.value,
        peak_memory_gib=round(peak_gib(plan), 4),
        gap=plan.search.gap,
        mesh=plan.mesh,
        plan_file=file,
    )
