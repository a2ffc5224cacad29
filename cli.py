"""The command line: parses, calls one function, prints. Everything but click is imported where it
is used.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from parplan.commands import largest as cli_largest
from parplan.commands import profile as cli_profile
from parplan.commands import run_commands as cli_run
from parplan.commands import show as cli_show
from parplan.commands import traced_module as cli_module
from parplan.commands.common_options import (
    AIM,
    BASELINES,
    EVICTION,
    OFFLOAD,
    OUTPUT,
    RECOMPUTE,
    SCHEDULES,
    aim,
    as_json,
    asked,
    explaining,
    searching,
    tracing,
)
from parplan.commands.output import STDOUT, deliver, require_output
from parplan.commands.style import (
    INTERRUPTED,
    List,
    Main,
    Whole,
    noticing_ctrl_c,
    option,
    print_json,
    show_version,
)

if TYPE_CHECKING:
    from parplan.commands.requests.described import Question
    from parplan.planner.plan.plan import Plan
    from parplan.planner.request import Constraints, SearchOptions
    from parplan.planner.search.pareto import ParetoFront
    from parplan.planner.validation.priced_rows import PricedRow
    from parplan.report.plans.summary import SummaryContext


@click.group(
    "plan",
    cls=Main,
    invoke_without_command=True,
    subcommand_metavar="[COMMAND]",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="  plan --model gpt-20b --gpus 64\n  plan --model llama3-70b --gpus 128 --gpu h100-80gb --objective memory --tp 4,8\n"
    "  plan --model gpt-20b --gpus 64 --objective pareto --plot front.png",
)
@asked
@tracing
@aim
@searching
@explaining
@option(
    OUTPUT,
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default="plan.yaml",
    show_default=True,
    help="The plan file; - for stdout. A front goes to plan-01.yaml, ...",
)
@option(
    OUTPUT,
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Draw the front: .png, .svg or .pdf.",
)
@as_json
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=show_version,
    help="Show the version and exit.",
)
@click.pass_context
def main(ctx: click.Context, **options: Any) -> int | None:
    """Find the fastest way to train a model on a number of GPUs, and write it as a plan that runs.

    Needs no GPU: step times are priced by a cost model. The plan goes to plan.yaml, its summary to
    the terminal.
    """
    if ctx.invoked_subcommand is None:
        source = cli_module.source_of(options)
        if source is not None:
            return cli_module.search(options, source)
        return _front(options) if options["objective"] == "pareto" else _search(options)
    for param in ctx.command.params:
        if (
            param.name in options
            and ctx.get_parameter_source(param.name) is click.core.ParameterSource.COMMANDLINE
        ):
            raise click.UsageError(
                f"{param.opts[0]} stands before {ctx.invoked_subcommand}: options go after the command"
            )
    return None


def _search(options: dict[str, Any]) -> int:
    from parplan.commands.requests.described import (
        all_assumed,
        constraints,
        offload_assumed,
        question_of,
        require_no_front,
        require_possible,
        search_options,
    )
    from parplan.report.plans.summary import SummaryContext

    output: Path = options["output"]
    require_no_front(options)
    require_output(output)
    question, pins, how = question_of(options), constraints(options), search_options(options)
    if options["explain"]:
        _explain(question, pins, how, to_stderr=options["as_json"] or output == STDOUT)
    require_possible(question, pins)
    started_s = time.monotonic()
    plan, interrupts = _find(question, pins, how, options["objective"])
    if plan.search.solver_failure:
        click.echo(f"warning: {plan.search.solver_failure}", err=True)
    context = SummaryContext(
        assumed=(*all_assumed(question, options, how), *offload_assumed(pins, plan)),
        elapsed_s=time.monotonic() - started_s,
        interrupted=bool(interrupts),
        **_files(options),
    )
    deliver(plan, context, output, as_json=options["as_json"])
    return INTERRUPTED if interrupts else 0


def _files(options: dict[str, Any]) -> dict[str, str]:
    """The files of the profile and of the plan, for a summary."""
    output: Path | None = options["output"]
    return {
        "profile": options["profile"] or "",
        "plan_file": "" if output in (None, STDOUT) else str(output),
    }


def _front(options: dict[str, Any]) -> int:
    from parplan.commands.requests.described import (
        all_assumed,
        constraints,
        question_of,
        require_front,
        require_possible,
        search_options,
    )
    from parplan.planner.search.pareto import find_front
    from parplan.report.plans.summary import SummaryContext
    from parplan.report.progress_bars import front_bar
    from parplan.report.text import console

    require_front(options)
    question, pins, how = question_of(options), constraints(options), search_options(options)
    if options["explain"]:
        _explain(question, pins, how, to_stderr=options["as_json"])
    require_possible(question, pins)
    started_s = time.monotonic()
    with (
        noticing_ctrl_c() as interrupts,
        front_bar(console(sys.stderr)) as (on_progress, on_search),
    ):
        front = find_front(
            question.model,
            question.cluster,
            question.training,
            constraints=pins,
            options=how,
            on_progress=on_progress,
            on_search=on_search,
            **({} if options["points"] is None else {"num_points": options["points"]}),
        )
    front = replace(
        front,
        points=tuple(
            replace(point, plan=_with_module(point.plan, question)) for point in front.points
        ),
    )
    context = SummaryContext(
        assumed=all_assumed(question, options, how),
        elapsed_s=time.monotonic() - started_s,
        interrupted=bool(interrupts),
    )
    _deliver_front(front, context, options["output"], options["plot"], as_json=options["as_json"])
    return INTERRUPTED if interrupts else 0


def _deliver_front(
    front: ParetoFront, context: SummaryContext, output: Path, plot: Path | None, *, as_json: bool
) -> None:
    """A plan file for every point, the table to the terminal, the picture; what cannot be written
    does not lose the table.
    """
    from parplan.planner.plan.plan_file import write_plan
    from parplan.planner.search.pareto import plan_paths
    from parplan.report.searches.front_table import front_document, print_front
    from parplan.report.text import console

    paths = plan_paths(output, len(front.points))
    try:
        for point, path in zip(front.points, paths, strict=True):
            write_plan(point.plan, path)
    finally:
        if as_json:
            print_json(front_document(front, paths, context.elapsed_s or 0.0))
        else:
            print_front(front, paths, console(sys.stdout), context)
    beyond = plan_paths(output, len(paths) + 1)[-1]
    if beyond.exists():
        click.echo(f"note: {beyond} and what follows is of an earlier front", err=True)
    if plot:
        from parplan.report.plots.front_plot import draw_front

        draw_front(front, plot)
        click.echo(f"wrote {plot}", err=as_json)


def _find(
    question: Question, pins: Constraints, how: SearchOptions, objective: str
) -> tuple[Plan, list[int]]:
    """The plan, with a bar on stderr while it is searched; and whether Ctrl-C ended the search
    early.
    """
    from parplan.planner.search.find_plan import find_plan
    from parplan.report.progress_bars import progress_bar
    from parplan.report.searches.infeasible_text import explained_error
    from parplan.report.text import console

    with noticing_ctrl_c() as interrupts, progress_bar(console(sys.stderr)) as on_progress:
        plan = find_plan(
            question.model,
            question.cluster,
            question.training,
            objective,
            constraints=pins,
            options=how,
            on_progress=on_progress,
            explain=explained_error,
        )
    return _with_module(plan, question), interrupts


def _with_module(plan: Plan, question: Question) -> Plan:
    """`plan` for the module that was asked for. Raises ConfigError for what the executor cannot run
    on it.
    """
    from parplan.executor.rules.external_rules import validate_module

    plan = replace(plan, module=question.module)
    validate_module(plan)
    return plan


def _explain(question: Question, pins: Constraints, how: SearchOptions, *, to_stderr: bool) -> None:
    from parplan.planner.candidates.never_searched import left_out
    from parplan.planner.search.search_session import SearchPrices
    from parplan.report.searches.pruned_table import print_pruned
    from parplan.report.text import console

    prices = SearchPrices(question.model, question.cluster, question.training, pins, how.deadline)
    print_pruned(
        prices.space,
        left_out(pins, question.training.stack),
        console(sys.stderr if to_stderr else sys.stdout),
    )


_WITH_A_PLAN = (
    "memory_margin",
    "memory_limit",
    "baseline",
    "as_json",
    "plan_file",
    "time_limit",
)  # what a plan file leaves open


@main.command(
    epilog="  plan compare plan.yaml\n  plan compare --model gpt-20b --gpus 64 --baseline megatron,zero-3\n"
    "  plan compare --model llama2-7b --gpus 16 --baseline all --json | jq '.baselines[] | {name, slower}'"
)
@click.argument("plan_file", metavar="[PLAN]", type=click.Path(path_type=Path), required=False)
@option(
    BASELINES,
    "--baseline",
    type=List(click.STRING),
    default="megatron",
    show_default=True,
    metavar="NAME,..",
    help="Of megatron (with megatron-defaults and megatron-guide), zero-1, zero-2, zero-3, fsdp, all.",
)
@asked
@option(
    AIM,
    "--objective",
    type=click.Choice(("throughput", "memory", "peak")),
    default="throughput",
    show_default=True,
    help="Of our side, where no plan file is given.",
)
@searching
@as_json
@click.pass_context
def compare(ctx: click.Context, plan_file: Path | None, **options: Any) -> int:
    """Compare a plan, or the one that is found, with what other systems would run under the same
    prices.

    Says where the difference comes from: compute, bubble, exposed communication, recompute, memory
    by class.
    """
    from parplan.commands.requests.described import (
        all_assumed,
        constraints,
        offload_assumed,
        question_of,
        require_possible,
        search_options,
    )
    from parplan.planner.baselines.systems import baseline_names
    from parplan.planner.plan.plan_file import read_plan
    from parplan.planner.request import Constraints
    from parplan.planner.search.comparison import compare
    from parplan.report.searches.comparison_tables import comparison_document, print_comparison
    from parplan.report.text import console

    if plan_file:
        _require_alone(ctx)
    names, how, pins = (
        baseline_names(options["baseline"]),
        search_options(options),
        constraints(options),
    )
    assumed: tuple[str, ...] = ()
    interrupts: list[int] = []
    if plan_file:
        plan = read_plan(plan_file)
    else:
        question = question_of(options)
        require_possible(question, pins)
        plan, interrupts = _find(
            question, pins, replace(how, deadline=how.deadline.share(2)), options["objective"]
        )
        assumed = (*all_assumed(question, options, how), *offload_assumed(pins, plan))
    found = compare(plan, names, how)
    if options["as_json"]:
        print_json(comparison_document(found))
    else:
        print_comparison(found, console(sys.stdout), assumed=assumed, pinned=pins != Constraints())
    return INTERRUPTED if interrupts else 0


def _require_alone(ctx: click.Context) -> None:
    """Raises UsageError for an option that a plan file has decided already."""
    for param in ctx.command.params:
        given = ctx.get_parameter_source(param.name or "") is click.core.ParameterSource.COMMANDLINE
        if given and param.name not in _WITH_A_PLAN:
            raise click.UsageError(
                f"{param.opts[0]} and a plan file exclude each other: the plan has decided it", ctx
            )


_LAYOUT = "Layout"
_MEASURED = "Measured steps"


@main.command(
    epilog="  plan estimate --model gpt-22b --gpus 8 --tp 8 --micro-batch-size 4 --recompute full\n"
    "  plan estimate --model gpt-175b --gpus 64 --tp 8 --pp 8 --sequence-parallel --output plan.yaml\n"
    "  plan estimate --model gpt-7.5b --gpus 4 --gpu v100-32gb --stack parplan "
    "--offload optimizer,parameters --host-blocks 20"
)
@asked
@option(
    _LAYOUT,
    "--pp",
    type=Whole("pp"),
    default=1,
    show_default=True,
    metavar="N",
    help="Pipeline stages.",
)
@option(
    _LAYOUT,
    "--dp",
    type=Whole("dp"),
    metavar="N",
    help="Data parallel degree. [default: GPUs / (pp x tp)]",
)
@option(
    _LAYOUT,
    "--tp",
    type=Whole("tp"),
    default=1,
    show_default=True,
    metavar="N",
    help="Tensor parallel degree.",
)
@option(
    _LAYOUT,
    "--ep",
    type=Whole("ep"),
    default=1,
    show_default=True,
    metavar="N",
    help="Expert parallel degree, divides dp.",
)
@option(
    _LAYOUT,
    "--micro-batch-size",
    type=Whole("micro_batch_size"),
    default=1,
    show_default=True,
    metavar="N",
    help="Sequences in one.",
)
@option(
    _LAYOUT,
    "--schedule",
    type=click.Choice(SCHEDULES),
    help="[default: 1f1b, interleaved with --virtual-stages above 1]",
)
@option(
    _LAYOUT,
    "--schedule-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Instead, what each rank runs, one line each: 0F0,0F1,0B0,.. (stage, F B I or W, micro-batch).",
)
@option(
    _LAYOUT,
    "--virtual-stages",
    type=Whole("virtual_stages"),
    default=1,
    show_default=True,
    metavar="N",
    help="Chunks per pipeline rank.",
)
@option(
    _LAYOUT,
    "--zero",
    type=click.IntRange(0, 3),
    default=0,
    show_default=True,
    metavar="0..3",
    help="ZeRO stage of every layer.",
)
@option(
    _LAYOUT,
    "--zero-ranks",
    type=Whole("neighbours"),
    metavar="N",
    help="Neighbours that hold one copy of the states. [default: all]",
)
@option(
    _LAYOUT,
    "--offload",
    type=List(click.Choice(OFFLOAD)),
    metavar="WHAT,..",
    help="To the host: states, or in chunks of blocks optimizer (states), parameters (with those); activations, lookup.",
)
@option(
    _LAYOUT,
    "--host-blocks",
    type=click.IntRange(0),
    metavar="N",
    help="With parameters, the last N blocks of a rank. [default: all]",
)
@option(
    _LAYOUT,
    "--host-optimizer",
    type=click.IntRange(0),
    metavar="N",
    help="With optimizer, the N blocks before. [default: all others]",
)
@option(
    _LAYOUT,
    "--eviction",
    type=click.Choice(EVICTION),
    help="Which chunk leaves a full device. [default: opt]",
)
@option(
    _LAYOUT,
    "--memory-limit",
    metavar="SIZE",
    help="What chunks and all else may fill of a device. [default: as in a search]",
)
@option(
    _LAYOUT,
    "--keep-on-host",
    type=List(click.STRING),
    metavar="NAME,..",
    help="Operators of every block whose activations go to the host, or all: as --offload activations.",
)
@option(
    _LAYOUT,
    "--recompute",
    type=click.Choice(RECOMPUTE),
    default="none",
    show_default=True,
    help="Of every block.",
)
@option(
    _LAYOUT,
    "--sequence-parallel",
    is_flag=True,
    help="Split norms and dropouts along the sequence.",
)
@option(
    _LAYOUT,
    "--tp-overlap",
    type=click.IntRange(0, 3),
    default=0,
    show_default=True,
    help="All-reduces of one half of a micro-batch under the other: 1 in a product, 2 in a block, 3 in a stage.",
)
@option(
    OUTPUT,
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Also write the plan file; - for stdout.",
)
@as_json
def estimate(**options: Any) -> None:
    """Price one layout by hand: the same breakdown and the same plan file, without a search."""
    from parplan.commands.requests.chunk_options import chunk_request
    from parplan.commands.requests.described import layout, question_of
    from parplan.costmodels.layers.recompute import Recompute
    from parplan.planner.search.estimate import estimate_plan
    from parplan.report.plans.summary import SummaryContext

    output = options["output"]
    require_output(output)
    question = question_of(options)
    offload, chunks = chunk_request(question, options)
    plan = estimate_plan(
        question.model,
        question.cluster,
        question.training,
        layout(question, options),
        zero=options["zero"],
        recompute=Recompute(options["recompute"]),
        zero_ranks=options["zero_ranks"],
        offload=offload,
        chunks=chunks,
        keep_on_host=options["keep_on_host"] or (),
    )
    context = SummaryContext(assumed=question.assumed, **_files(options))
    deliver(_with_module(plan, question), context, output, as_json=options["as_json"])


@main.command(
    epilog="  plan explain --model gpt-20b --gpus 64 --tp 8 --operator fc1\n"
    "  plan explain --model llama3-8b --gpus 8 --tp 2 --micro-batch-size 2 --json | jq '.[].rejected'"
)
@asked
@option(
    _LAYOUT,
    "--tp",
    type=Whole("tp"),
    default=8,
    show_default=True,
    metavar="N",
    help="Tensor parallel degree.",
)
@option(
    _LAYOUT,
    "--micro-batch-size",
    type=Whole("micro_batch_size"),
    default=1,
    show_default=True,
    metavar="N",
    help="Sequences in one.",
)
@option(
    _LAYOUT,
    "--zero",
    type=click.IntRange(0, 3),
    default=0,
    show_default=True,
    metavar="0..3",
    help="ZeRO stage of the states.",
)
@option(_LAYOUT, "--operator", metavar="NAME", help="Only this operator. [default: all]")
@as_json
def explain(**options: Any) -> None:
    """List the strategies of every operator with their prices, and the rejected ones with the
    reason.
    """
    from parplan.commands.requests.described import layout_prices, question_of
    from parplan.planner.layer_options.operator_strategies import operator_strategies
    from parplan.report.plans.strategy_table import print_strategies, strategies_document
    from parplan.report.text import console

    layout, price_cache = layout_prices(question_of(options), options)
    found = list(operator_strategies(layout, options["zero"], price_cache, options["operator"]))
    if options["as_json"]:
        print_json(strategies_document(found))
    else:
        print_strategies(found, console(sys.stdout), str(layout.mesh))


@main.command(
    epilog="  plan validate\n  plan validate --steps steps.csv --source vtrain --rows --plot errors.png\n"
    "  plan validate --json | jq '.sources | map_values(.mape_time)'"
)
@option(
    _MEASURED,
    "--steps",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="CSV of measured steps. [default: the shipped one]",
)
@option(
    _MEASURED,
    "--source",
    "sources",
    multiple=True,
    metavar="NAME",
    help="Only rows whose id starts so; may be repeated.",
)
@option(OUTPUT, "--rows", is_flag=True, help="Also print every row, and the ranking in every grid.")
@option(
    OUTPUT,
    "--fitted",
    is_flag=True,
    help="Print the fitted terms of the prices and what they were fitted on.",
)
@option(
    OUTPUT,
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Draw predicted against measured: .png, .svg or .pdf.",
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
    """Price published training steps as they were run, and print how far the prices are from what
    was measured.
    """
    from parplan.planner.validation.fitted_terms import fitted_terms
    from parplan.report import validation_tables as report
    from parplan.report.plots.scatter_plot import draw, require_plot
    from parplan.report.text import console

    if plot:
        require_plot(plot)
    out, document = console(sys.stdout), {}
    if not fitted or steps or sources or rows or plot:  # --fitted alone prices nothing
        priced = _priced_table(steps, sources)
        if plot:
            draw(priced, plot)
        document = report.validation_document(priced)
        if not as_json:
            report.print_validation(priced, out, table=str(steps or "published steps"), rows=rows)
    if fitted:
        document["fitted"] = report.fitted_document(fitted_terms())
        if not as_json:
            report.print_fitted(fitted_terms(), out)
    if as_json:
        print_json(document)
    if plot:
        click.echo(f"wrote {plot}", err=as_json)


def _priced_table(steps: Path | None, sources: Sequence[str]) -> list[PricedRow]:
    """The rows of a table, by default of the shipped one, priced; a bar on stderr while it
    lasts.
    """
    from parplan.planner.validation.step_rows import read_table
    from parplan.planner.validation.step_table import of_sources, price_table
    from parplan.report.progress_bars import count_bar
    from parplan.report.text import console

    found = of_sources(read_table(steps), sources)
    with count_bar(console(sys.stderr), "pricing", len(found)) as on_row:
        return price_table(found, on_row)


@main.command(epilog="  plan models\n  plan models --json | jq -r '.[].name'")
@as_json
def models(as_json: bool) -> None:
    """List the models that come with the planner: any of them goes after --model."""
    from parplan.report.machines import catalogue_tables as catalogue

    _list(catalogue.model_rows, catalogue.print_models, as_json=as_json)


@main.command(epilog="  plan clusters\n  plan clusters --json")
@as_json
def clusters(as_json: bool) -> None:
    """List the GPUs that come with the planner, each in its usual node: any of them goes after
    --gpu.
    """
    from parplan.report.machines import catalogue_tables as catalogue

    _list(catalogue.cluster_rows, catalogue.print_clusters, as_json=as_json)


@main.command(epilog="  plan stacks\n  plan stacks --json | jq '.[] | {name, time_band}'")
@as_json
def stacks(as_json: bool) -> None:
    """List the software stacks that come with the planner, with the error of their prices: any of
    them goes after --stack.
    """
    from parplan.report.machines import catalogue_tables as catalogue

    _list(catalogue.stack_rows, catalogue.print_stacks, as_json=as_json)


def _list(
    rows: Callable[[], Sequence[object]], show_table: Callable[[Any], None], *, as_json: bool
) -> None:
    from parplan.report.text import console

    if as_json:
        print_json(rows())
    else:
        show_table(console(sys.stdout))


@main.command(
    epilog="  plan schema > docs/plan.schema.json\n  plan schema --profile > profile.schema.json"
)
@option(OUTPUT, "--profile", is_flag=True, help="Of the profile file instead.")
def schema(profile: bool) -> None:
    """Print the JSON Schema of the plan file."""
    from parplan.profiles.machines.user_profile import profile_schema as profile_schema
    from parplan.report.plan_documents import plan_schema

    print_json(profile_schema() if profile else plan_schema())


for command in (
    cli_largest.max_model,
    cli_profile.profile,
    cli_run.calibrate,
    cli_run.check,
    cli_run.tokenize,
    cli_run.trace,
    cli_show.show,
):
    main.add_command(command)


if __name__ == "__main__":
    main()
