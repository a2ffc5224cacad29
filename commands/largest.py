"""plan max-model: the largest model that fits. All but click is imported where it is used."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from parplan.commands.common_options import OUTPUT, WHAT, as_json, located, searching, trained
from parplan.commands.output import STDOUT, require_output
from parplan.commands.style import (
    INTERRUPTED,
    Command,
    Whole,
    noticing_ctrl_c,
    option,
    print_json,
)

if TYPE_CHECKING:
    from parplan.commands.requests.described import Question
    from parplan.planner.plan.plan import Plan
    from parplan.planner.search.largest_model import LargestModel
    from parplan.profiles.models.families import ModelFamily


@click.command(
    "max-model",
    cls=Command,
    epilog=(
        "  plan max-model --gpus 8 --gpu v100-32gb --host-memory 240GiB\n  plan max-model --gpus 8 --gpu a100-40gb --hidden 8192 -o plan.yaml\n"
        "  plan max-model --gpus 32 --gpu a100-40gb --json | jq '.largest[] | {offload, model, tflops}'"
    ),
)
@option(
    WHAT,
    "--family",
    default="gpt",
    show_default=True,
    metavar="NAME|FILE",
    help="Whose models: its members of `plan models`.",
)
@option(
    WHAT,
    "--hidden",
    type=Whole("hidden"),
    metavar="N",
    help="Instead of members: the most blocks of this hidden size.",
)
@trained
@located
@searching
@option(
    OUTPUT,
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Write the plan of the largest model; - for stdout.",
)
@as_json
def max_model(**options: Any) -> int:
    """Find the largest model that fits, with and without the host's memory, and what it costs to
    train.

    A row for what the host may keep: nothing, the optimizer's states, and those, parameters,
    activations and the token table. Each model that is tried is a search for its fastest plan;
    Ctrl-C prints what is known.
    """
    output: Path | None = options["output"]
    require_output(output)
    options |= {"model": None, "module": None, "objective": "throughput"}
    question, family = _question(options)
    started_s = time.monotonic()
    with noticing_ctrl_c() as interrupts:
        rows = _rows(options, question, family, lambda: bool(interrupts))
    _require_any(rows, interrupted=bool(interrupts))
    _deliver(rows, question, options, time.monotonic() - started_s)
    return INTERRUPTED if interrupts else 0


def _question(options: dict[str, Any]) -> tuple[Question, ModelFamily]:
    """The question as it is asked about the smallest model, and the family."""
    from dataclasses import fields

    from parplan.commands.requests.described import Asked, question_about
    from parplan.profiles.catalog import load_family

    family, hidden = load_family(options["family"]), options["hidden"]
    asked = Asked(**{field.name: options[field.name] for field in fields(Asked)})
    first = family.members[0] if hidden is None else family.of_width(hidden, 1)
    return question_about(first, asked, whose="the family's"), family


def _rows(
    options: dict[str, Any],
    question: Question,
    family: ModelFamily,
    interrupted: Callable[[], bool],
) -> tuple[LargestModel, ...]:
    """The searches, with a bar on stderr while they last."""
    from parplan.commands.requests.described import constraints, search_options
    from parplan.planner.search.largest_model import LEVELS, Asking, find_largest, members, widths
    from parplan.report.progress_bars import front_bar
    from parplan.report.text import console

    pins, hidden = constraints(options), options["hidden"]
    levels = (
        LEVELS if options["offload"] is None else tuple(dict.fromkeys(((), pins.offload or ())))
    )
    with front_bar(console(sys.stderr), "sizes") as (on_progress, on_search):
        asking = Asking(
            cluster=question.cluster,
            training=question.training,
            pins=pins,
            options=search_options(options),
            on_progress=on_progress,
            on_search=on_search,
        )
        sizes = (
            members(family.members)
            if hidden is None
            else widths(lambda blocks: family.of_width(hidden, blocks), asking)
        )
        return find_largest(sizes, asking, levels, interrupted=interrupted)


def _require_any(rows: Sequence[LargestModel], *, interrupted: bool) -> None:
    """Raises InfeasibleError with what is missing where no model at all fits, KeyboardInterrupt
    where none was found before Ctrl-C.
    """
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
    rows: Sequence[LargestModel], question: Question, options: dict[str, Any], elapsed_s: float
) -> None:
    """The table to the terminal or the rows as JSON, and the plan of the largest model to its
    file.
    """
    from parplan.commands.requests.described import all_assumed, search_options
    from parplan.planner.plan.plan_file import plan_to_yaml
    from parplan.report.searches.largest_table import largest_document, print_largest
    from parplan.report.text import console

    output, as_json = options["output"], options["as_json"]
    plan = next(row.plan for row in reversed(rows) if row.plan)
    if output not in (None, STDOUT):
        _write(plan, output)
    if as_json:
        print_json(largest_document(rows, question, elapsed_s))
        return
    out = console(sys.stderr if output == STDOUT else sys.stdout)
    print_largest(
        rows,
        question,
        out,
        assumed=all_assumed(question, options, search_options(options)),
        elapsed_s=elapsed_s,
    )
    if output == STDOUT:
        click.echo(plan_to_yaml(plan), nl=False)


def _write(plan: Plan, output: Path) -> None:
    from parplan.planner.plan.plan_file import write_plan

    write_plan(plan, output)
    click.echo(f"wrote {output}, the plan of {plan.model.name}", err=True)
