"""`plan validate`: the prices beside published training steps."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from parplan.commands.options.result_options import as_json
from parplan.commands.options.sections import OUTPUT
from parplan.commands.style import Command, option, print_json, wrote_picture

if TYPE_CHECKING:
    from parplan.planner.validation.priced_rows import PricedRow

MEASURED = "Measured steps"


@click.command(
    cls=Command,
    epilog="  plan validate\n  plan validate --steps steps.csv --source vtrain --rows --plot "
    "errors.png\n"
    "  plan validate --json | jq '.sources | map_values(.mape_time)'",
)
@option(
    MEASURED,
    "--steps",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="CSV of measured steps. [default: the shipped table]",
)
@option(
    MEASURED,
    "--source",
    "sources",
    multiple=True,
    metavar="NAME",
    help="Price only rows whose id starts with NAME; may be repeated.",
)
@option(
    OUTPUT, "--rows", is_flag=True, help="Print every row as well, and the ranking in every grid."
)
@option(
    OUTPUT,
    "--fitted",
    is_flag=True,
    help="Print the fitted terms of the prices and the data behind them.",
)
@option(
    OUTPUT,
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File for a plot of predicted against measured: .png, .svg or .pdf.",
)
@as_json
def validate(
    steps: Path | None,
    sources: tuple[str, ...],
    rows: bool,
    fitted: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Price published training steps and print how far the prices are from the measurements."""
    from parplan.planner.validation.fitted_terms import fitted_terms
    from parplan.report import validation_tables as report
    from parplan.report.plots.scatter_plot import draw, require_plot
    from parplan.report.text import console
    from parplan.report.validation_document import validation_document

    if plot:
        require_plot(plot)
    out, priced = console(sys.stdout), None
    kept = None
    if not fitted or steps or sources or rows or plot:  # --fitted alone prices nothing
        priced = _priced_table(steps, sources)
        if plot:
            kept = draw(priced, plot)
        if not as_json:
            report.print_validation(priced, out, table=str(steps or "published steps"), rows=rows)
    if fitted and not as_json:
        report.print_fitted(fitted_terms(), out)
    if as_json:
        print_json(validation_document(priced, fitted_terms() if fitted else None))
    if plot:
        wrote_picture(plot, kept, to_stderr=as_json)


def _priced_table(steps: Path | None, sources: Sequence[str]) -> list[PricedRow]:
    """Prices the rows of a table, by default of the shipped one, with a bar on stderr."""
    from parplan.planner.validation.step_rows import read_table
    from parplan.planner.validation.step_table import of_sources, price_table
    from parplan.report.progress_bars import count_bar
    from parplan.report.text import console

    rows = of_sources(read_table(steps), sources)
    with count_bar(console(sys.stderr), "pricing", len(rows)) as on_row:
        return price_table(rows, on_row)
