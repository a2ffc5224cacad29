"""`plan max-model`: the largest model that fits, with and without the host."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from parplan.commands.options.machine_options import machine_options
from parplan.commands.options.pin_options import PinOptions
from parplan.commands.options.result_options import STDOUT, ResultOptions, as_json, packed_result
from parplan.commands.options.search_options import SearchFlags, search_options
from parplan.commands.options.sections import OUTPUT, WHAT
from parplan.commands.options.target_options import TargetOptions, training_options
from parplan.commands.output import require_output
from parplan.commands.style import (
    Command,
    Whole,
    noticing_ctrl_c,
    option,
    packs,
    print_json,
    tell,
    tell_kept,
)
from parplan.profiles.interrupts import INTERRUPTED

if TYPE_CHECKING:
    from parplan.planner.plan.plan import Plan
    from parplan.planner.request import Request
    from parplan.planner.search.largest_model import LargestModel
    from parplan.profiles.models.families import ModelFamily


@click.command(
    "max-model",
    cls=Command,
    epilog=(
        "  plan max-model --gpus 8 --gpu v100-32gb --host-memory 240GiB\n  plan max-model --gpus "
        "8 --gpu a100-40gb --hidden 8192 -o plan.yaml\n"
        "  plan max-model --gpus 32 --gpu a100-40gb --json | jq '.largest[] | {offload, model, "
        "tflops}'"
    ),
)
@option(
    WHAT,
    "--family",
    default="gpt",
    show_default=True,
    metavar="NAME|FILE",
    help="Model family; `plan models` lists its members.",
)
@option(
    WHAT,
    "--hidden",
    type=Whole("hidden"),
    metavar="N",
    help="Find the most blocks of this hidden size instead of the largest member.",
)
@training_options
@machine_options
@search_options
@option(
    OUTPUT,
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="File for the plan of the largest model; - for stdout.",
)
@as_json
@packs("target", TargetOptions)
@packed_result
def max_model(
    family: str,
    hidden: int | None,
    target: TargetOptions,
    pins: PinOptions,
    flags: SearchFlags,
    result: ResultOptions,
) -> int:
    """Find the largest model that fits, with and without the host's memory, and its training cost.

    Each row allows other host contents: nothing; the optimizer's states; these, parameters,
    activations and the token table. Each model that is tried is a search for its fastest plan;
    Ctrl-C prints the rows so far.
    """
    from parplan.commands.requests.requests import constraints_of, request_about, with_flags
    from parplan.profiles.models.model_catalog import load_family

    require_output(result.output)
    models = load_family(family)
    first = models.members[0] if hidden is None else models.of_width(hidden, 1)
    request = request_about(first, target, whose="the family's")
    started_s = time.monotonic()
    with noticing_ctrl_c() as interrupts:
        request = replace(request, constraints=constraints_of(pins, target))
        request = with_flags(request, flags)
        rows = _rows(request, models, hidden, pins, lambda: bool(interrupts))
    _require_any(rows, interrupted=bool(interrupts))
    _deliver(rows, request, flags, result, time.monotonic() - started_s)
    return INTERRUPTED if interrupts else 0


def _rows(
    request: Request,
    family: ModelFamily,
    hidden: int | None,
    pins: PinOptions,
    interrupted: Callable[[], bool],
) -> tuple[LargestModel, ...]:
    from parplan.planner.request import host_contents
    from parplan.planner.search.largest_model import (
        LEVELS,
        SearchWatch,
        find_largest,
        members,
        widths,
    )
    from parplan.report.progress_bars import front_bar
    from parplan.report.text import console

    optimizer = request.training.optimizer
    levels = tuple(dict.fromkeys(host_contents(level, optimizer) for level in LEVELS))
    if pins.offload is not None:
        levels = tuple(dict.fromkeys(((), request.constraints.offload or ())))
    with front_bar(console(sys.stderr), "sizes") as (on_progress, on_search):
        watch = SearchWatch(on_progress=on_progress, on_search=on_search, interrupted=interrupted)
        if hidden is None:
            sizes = members(family.members)
        else:
            sizes = widths(lambda blocks: family.of_width(hidden, blocks), request)
        return find_largest(sizes, request, levels, watch)


def _require_any(rows: Sequence[LargestModel], *, interrupted: bool) -> None:
    """Raises InfeasibleError where no model fits, KeyboardInterrupt where Ctrl-C came first."""
    from parplan.profiles.errors import InfeasibleError

    if any(row.plan for row in rows):
        return
    if interrupted:
        raise KeyboardInterrupt
    error = rows[-1].next_error
    if error is None or not isinstance(error, InfeasibleError):
        raise error or InfeasibleError("nothing was searched")
    raise InfeasibleError(f"no model of the family fits: {error.message}", hint=error.hint)


def _deliver(
    rows: Sequence[LargestModel],
    request: Request,
    flags: SearchFlags,
    result: ResultOptions,
    elapsed_s: float,
) -> None:
    from parplan.commands.requests.requests import all_assumed
    from parplan.planner.plan.plan_file import plan_to_yaml
    from parplan.report.searches.largest_document import largest_document
    from parplan.report.searches.largest_table import print_largest
    from parplan.report.text import console

    output = result.output
    plan = next(row.plan for row in reversed(rows) if row.plan)
    if output not in (None, STDOUT):
        _write(plan, output)
    if result.as_json:
        print_json(largest_document(rows, request, elapsed_s))
        return
    out = console(sys.stderr if output == STDOUT else sys.stdout)
    print_largest(rows, request, out, assumed=all_assumed(request, flags), elapsed_s=elapsed_s)
    if output == STDOUT:
        click.echo(plan_to_yaml(plan), nl=False)


def _write(plan: Plan, output: Path) -> None:
    from parplan.planner.plan.plan_file import write_plan

    kept = write_plan(plan, output)
    tell(f"wrote {output}, the plan of {plan.model.name}")
    tell_kept(kept)
