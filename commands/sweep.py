"""`plan sweep`: the best plans of several numbers of GPUs, kinds, batches or sequence lengths."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from parplan.commands.options.pin_options import PinOptions
from parplan.commands.options.result_options import ResultOptions, as_json, packed_result
from parplan.commands.options.search_options import SearchFlags, search_options
from parplan.commands.options.sections import OUTPUT
from parplan.commands.options.target_options import TargetOptions, target_options
from parplan.commands.style import (
    SWEPT,
    Command,
    List,
    noticing_ctrl_c,
    option,
    print_json,
    tell_kept,
    wrote_picture,
)
from parplan.profiles.interrupts import INTERRUPTED

if TYPE_CHECKING:
    from parplan.planner.request import Request
    from parplan.planner.search.many_searches import Answers

FIELDS = tuple(name.strip("-").replace("-", "_") for name in SWEPT)  # of `TargetOptions`


def several(*names: str) -> Callable[[Any], Any]:
    """Lets options of a command take comma-separated values."""

    def apply(function: Any) -> Any:
        for param in function.__click_params__:
            if param.name in names:
                param.type = List(param.type)
                param.metavar = f"{param.metavar},.."
        return function

    return apply


@click.command(
    "sweep",
    cls=Command,
    epilog=(
        "  plan sweep --model gpt-20b --gpus 32,64,128\n"
        "  plan sweep --model llama3-8b --gpus 64 --gpu a100-80gb,h100-80gb "
        "--seq-length 8192,32768 --plot sweep.png"
    ),
)
@several(*FIELDS)
@target_options
@search_options
@option(
    OUTPUT,
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="File for the plans; they go to NAME-01.yaml, ...",
)
@option(
    OUTPUT,
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File for a plot of tokens/s against GPUs: .png, .svg or .pdf.",
)
@as_json
@packed_result
def sweep(
    target: TargetOptions, pins: PinOptions, flags: SearchFlags, result: ResultOptions
) -> int:
    """Find the best plan for each number of GPUs, kind, batch size and sequence length.

    --gpus, --gpu, --global-batch-size and --seq-length take several values; every combination is
    searched. Ctrl-C prints the rows so far.
    """
    from parplan.report.plots.scatter_plot import require_plot

    if result.plot is not None:
        require_plot(result.plot)
    values = {name: getattr(target, name) or (None,) for name in FIELDS}
    rows = [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]
    started_s = time.monotonic()
    with noticing_ctrl_c() as interrupts:
        answers = _answers(rows, target, pins, flags, lambda: bool(interrupts))
    if not answers.each:
        raise KeyboardInterrupt
    error = answers.each[-1].error
    if error is not None and not any(answer.plan for answer in answers.each):
        raise error
    _deliver(rows, answers, result, time.monotonic() - started_s)
    return INTERRUPTED if interrupts else 0


def _answers(
    rows: Sequence[Mapping[str, Any]],
    target: TargetOptions,
    pins: PinOptions,
    flags: SearchFlags,
    interrupted: Callable[[], bool],
) -> Answers:
    from parplan.commands.requests.requests import request_of
    from parplan.planner.search.largest_model import SearchWatch
    from parplan.planner.search.many_searches import answer_each
    from parplan.report.progress_bars import front_bar
    from parplan.report.text import console

    requests: list[Callable[[], Request]] = [
        partial(request_of, replace(target, **row), pins, flags) for row in rows
    ]
    names = [", ".join(str(value) for value in row.values() if value) for row in rows]
    with front_bar(console(sys.stderr), "sweep") as (on_progress, on_search):
        watch = SearchWatch(on_progress=on_progress, on_search=on_search, interrupted=interrupted)
        return answer_each(requests, names, watch)


def _deliver(
    rows: Sequence[Mapping[str, Any]], answers: Answers, result: ResultOptions, elapsed_s: float
) -> None:
    """Writes the plans, the picture and the table."""
    from parplan.planner.plan.plan_file import write_plans
    from parplan.planner.search.pareto import plan_paths
    from parplan.report.plots.sweep_plot import draw_sweep
    from parplan.report.searches.sweep_table import print_sweep, sweep_document
    from parplan.report.text import console

    found = list(zip(rows, answers.each, strict=False))
    paths: Sequence[Path] = ()
    kept: Mapping[Path, Path | None] = {}
    if result.output is not None:
        paths = plan_paths(result.output, len(found))
        kept = write_plans(
            {
                path: answer.plan
                for (_, answer), path in zip(found, paths, strict=True)
                if answer.plan
            }
        )
    if result.as_json:
        print_json(sweep_document(found, answers.stopped, paths, elapsed_s))
    else:
        print_sweep(found, answers.stopped, paths, console(sys.stdout), elapsed_s)
    tell_kept(*kept.values())
    if result.plot is not None:
        drawn = [answer.plan for _, answer in found if answer.plan]
        wrote_picture(result.plot, draw_sweep(drawn, result.plot), to_stderr=result.as_json)
