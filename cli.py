"""The command line: parses, calls one function, prints. Everything but click is imported where it is used."""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from profiles.errors import PlannerError, unknown_name_error

if TYPE_CHECKING:
    from planner.options import Question
    from planner.plan import Plan
    from planner.report.summary import Context
    from planner.request import Constraints

INTERRUPTED = 130  # 128 + SIGINT, as shells report it
STDOUT = Path("-")
SCHEDULES = ("gpipe", "1f1b", "interleaved")
RECOMPUTE = ("none", "selective", "full")
PRECISIONS = ("bf16", "fp16", "fp32")
ATTENTION = ("flash", "unfused")


class _List(click.ParamType):
    """Comma-separated values of one type: `1,2,4`."""

    name = "list"

    def __init__(self, item: click.ParamType) -> None:
        self.item = item

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        return tuple(self.item.convert(part.strip(), param, ctx) for part in value.split(","))


class _Option(click.Option):
    """An option that stands under `section` in the help."""

    def __init__(self, *args: Any, section: str = "Options", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


class _Command(click.Command):
    """A command whose help shows options by section and whose examples keep their lines."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record:
                sections.setdefault(getattr(param, "section", "Other"), []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.epilog:
            formatter.write(f"\nExample:\n{self.epilog.rstrip()}\n")


class _Main(_Command, click.Group):
    """The group: turns errors into `error:` and `hint:` lines and exit codes, a Ctrl-C into 130."""

    command_class = _Command

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        _Command.format_options(self, ctx, formatter)
        self.format_commands(ctx, formatter)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands:
            raise unknown_name_error("command", args[0], self.commands)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("interrupted before a plan was found; nothing was written", err=True)
            raise click.exceptions.Exit(INTERRUPTED) from None

    def main(self, *args: Any, standalone_mode: bool = True, **kwargs: Any) -> Any:
        kwargs.setdefault("prog_name", self.name)
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **kwargs)
        try:
            code = super().main(*args, standalone_mode=False, **kwargs)
        except PlannerError as error:
            code = _fail(error.message, error.hint or "plan --help lists the options", error.exit_code)
        except click.UsageError as error:
            code = _fail(*_usage(error), error.exit_code)
        sys.exit(code or 0)


def _fail(message: str, hint: str, code: int) -> int:
    click.echo(f"error: {message}\nhint: {hint}", err=True)
    return code


def _usage(error: click.UsageError) -> tuple[str, str]:
    """click's message in the house's form, and what to do."""
    command = error.ctx.command_path if error.ctx else "plan"
    possibilities = getattr(error, "possibilities", None)
    message = error.message if possibilities else error.format_message()
    message = " ".join(message.split()).rstrip(".")
    hint = f"did you mean {possibilities[0]!r}?" if possibilities else f"see {command} --help"
    return message[:1].lower() + message[1:], hint


def _options(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def apply(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return apply


def _option(section: str, *names: str, **settings: Any) -> Callable[[Any], Any]:
    return click.option(*names, cls=_Option, section=section, **settings)


def _show_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if not value:
        return
    from importlib.metadata import PackageNotFoundError, version

    try:
        click.echo(f"plan, version {version('parplan')}")
    except PackageNotFoundError:
        click.echo("plan, from a source tree that is not installed")
    ctx.exit()


WHAT, WHERE, AIM, PINS, SEARCH, OUTPUT = "What to train", "On what", "Objective", "Pins", "Search", "Output"

_asked = _options(
    _option(WHAT, "--model", metavar="NAME|PATH", help="A name of `plan models`, a YAML of that form, or a Hugging Face config.json."),
    _option(WHAT, "--global-batch-size", type=int, metavar="N", help="Sequences in a step. [default: the model's]"),
    _option(WHAT, "--seq-length", type=int, metavar="N", help="Tokens in a sequence. [default: the model's]"),
    _option(WHAT, "--precision", type=click.Choice(PRECISIONS), help="Of weights and activations. [default: bf16]"),
    _option(WHAT, "--attention", type=click.Choice(ATTENTION), help="Attention kernel. [default: flash]"),
    _option(WHERE, "--gpus", type=int, metavar="N", help="How many GPUs."),
    _option(WHERE, "--gpu", metavar="NAME", help="A name of `plan clusters`. [default: a100-80gb]"),
    _option(WHERE, "--gpus-per-node", type=int, metavar="N", help="GPUs in a node. [default: the cluster's]"),
    _option(WHERE, "--cluster", metavar="FILE", help="A cluster YAML instead of --gpu; it may say how many GPUs."),
)
_searching = _options(
    _option(AIM, "--objective", type=click.Choice(("throughput", "memory")), default="throughput", show_default=True,
            help="Fastest step, or least redundant memory within --max-slowdown."),
    _option(AIM, "--max-slowdown", type=float, metavar="SHARE", help="Of the memory objective, over the fastest. [default: 0.1]"),
    _option(AIM, "--memory-margin", type=float, metavar="SHARE", help="Of each device, kept free. [default: 0.08]"),
    _option(AIM, "--memory-limit", metavar="SIZE", help="What a plan may fill of a device, such as 72GiB; replaces the margin."),
    _option(PINS, "--pp", type=_List(click.IntRange(1)), metavar="N,..", help="Pipeline stages allowed."),
    _option(PINS, "--dp", type=_List(click.IntRange(1)), metavar="N,..", help="Data parallel degrees allowed."),
    _option(PINS, "--tp", type=_List(click.IntRange(1)), metavar="N,..", help="Tensor parallel degrees allowed."),
    _option(PINS, "--micro-batch-size", type=_List(click.IntRange(1)), metavar="N,..", help="Sequences in a micro-batch."),
    _option(PINS, "--virtual-stages", type=_List(click.IntRange(1)), metavar="N,..", help="Model chunks per pipeline rank."),
    _option(PINS, "--schedule", type=_List(click.Choice(SCHEDULES)), metavar="NAME,..", help=f"Of {', '.join(SCHEDULES)}."),
    _option(PINS, "--zero", type=_List(click.IntRange(0, 3)), metavar="0..3,..", help="ZeRO stages allowed."),
    _option(PINS, "--recompute", type=_List(click.Choice(RECOMPUTE)), metavar="NAME,..", help=f"Of {', '.join(RECOMPUTE)}."),
    _option(PINS, "--sequence-parallel/--no-sequence-parallel", default=None, help="With or without, where tp > 1."),
    _option(PINS, "--tp-across-nodes", is_flag=True, help="Let tensor parallelism leave the node."),
    _option(SEARCH, "--time-limit", type=float, metavar="SECONDS", help="Stop then, with the best so far and its gap."),
    _option(SEARCH, "--solver", type=click.Choice(("cbc", "highs")), default="cbc", show_default=True, help="MILP solver."),
    _option(SEARCH, "--explain", is_flag=True, help="Also say which candidates were not searched, and why."),
)
_json = _option(OUTPUT, "--json", "as_json", is_flag=True, help="Print JSON and nothing else on stdout.")


@click.group(
    "plan", cls=_Main, invoke_without_command=True, subcommand_metavar="[COMMAND]",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="  plan --model gpt-20b --gpus 64\n  plan --model llama3-70b --gpus 128 --gpu h100-80gb --objective memory --tp 4,8")
@_asked
@_searching
@_option(OUTPUT, "-o", "--output", type=click.Path(path_type=Path), default="plan.yaml", show_default=True,
         help="The plan file; - for stdout.")
@_json
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show the version and exit.")
@click.pass_context
def main(ctx: click.Context, **options: Any) -> int | None:
    """Find the fastest way to train a model on a number of GPUs, and write it as a plan that runs.

    Needs no GPU: step times are priced by a cost model. The plan goes to plan.yaml, its summary to the terminal.
    """
    if ctx.invoked_subcommand is None:
        return _search(options)
    for param in ctx.command.params:
        if param.name in options and ctx.get_parameter_source(param.name) is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{param.opts[0]} stands before {ctx.invoked_subcommand}: options go after the command")
    return None


def _search(options: dict[str, Any]) -> int:
    from planner.options import all_assumed, constraints, question_of, require_possible, require_writable, search_options
    from planner.report.progress import progress_bar
    from planner.report.summary import Context
    from planner.report.text import console
    from planner.search import find_plan

    output: Path = options["output"]
    if output != STDOUT:
        require_writable(output)
    question, pins, how = question_of(options), constraints(options), search_options(options)
    if options["explain"]:
        _explain(question, pins, to_stderr=options["as_json"] or output == STDOUT)
    require_possible(question, pins)
    started_s = time.monotonic()
    with _noticing_ctrl_c() as interrupts, progress_bar(console(sys.stderr)) as on_progress:
        plan = find_plan(
            question.model, question.cluster, question.training, options["objective"], constraints=pins, options=how,
            on_progress=on_progress)
    context = Context(assumed=all_assumed(question, options, how), elapsed_s=time.monotonic() - started_s, interrupted=bool(interrupts))
    _deliver(plan, context, output, as_json=options["as_json"])
    return INTERRUPTED if interrupts else 0


@contextlib.contextmanager
def _noticing_ctrl_c() -> Iterator[list[int]]:
    """A list that is not empty once Ctrl-C came: the search answers it with its best plan, which is not an error."""
    interrupts: list[int] = []

    def on_interrupt(number: int, _: object) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:  # a background job of a shell: Ctrl-C is not meant for it
        yield interrupts
        return
    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


def _explain(question: Question, pins: Constraints, *, to_stderr: bool) -> None:
    from planner.report.explain import print_pruned
    from planner.report.text import console
    from planner.space import enumerate_space

    space = enumerate_space(question.model, question.cluster, question.training, pins)
    print_pruned(space, console(sys.stderr if to_stderr else sys.stdout))


def _deliver(plan: Plan, context: Context, output: Path | None, *, as_json: bool) -> None:
    """The plan to `output` and its summary to the terminal; a file that cannot be written does not lose the summary."""
    from executor.layout import torchrun_line
    from planner.plan import to_yaml, write
    from planner.report.summary import print_summary
    from planner.report.text import console

    if output == STDOUT and not as_json:
        click.echo(to_yaml(plan), nl=False)
        print_summary(plan, console(sys.stderr), context)
        return
    try:
        if output not in (None, STDOUT):
            write(plan, output)
    finally:
        if as_json:
            _print_plan_json(plan, context.elapsed_s)
        else:
            print_summary(plan, console(sys.stdout), context)
    if output is not None and not as_json:
        click.echo(f"wrote {output}; run it with\n  {torchrun_line(plan, shlex.quote(str(output)))}")


def _print_plan_json(plan: Plan, elapsed_s: float | None = None) -> None:
    from planner.report.documents import plan_document

    _print_json(plan_document(plan, elapsed_s))


def _print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2))


@main.command(epilog="  plan show plan.yaml\n  plan show plan.yaml --json | jq .predicted.step_time_s")
@click.argument("plan_file", metavar="PLAN", type=click.Path(path_type=Path))
@_json
def show(plan_file: Path, as_json: bool) -> None:
    """Print the summary of a plan file, its layer plans and the placement of every operator."""
    from planner.plan import read
    from planner.report.layers import print_layers
    from planner.report.summary import Context, print_summary
    from planner.report.text import console

    plan = read(plan_file)
    if as_json:
        _print_plan_json(plan)
        return
    out = console(sys.stdout)
    print_summary(plan, out, Context(whole=True))
    print_layers(plan, out)


_LAYOUT = "Layout"


@main.command(epilog="  plan estimate --model gpt-22b --gpus 8 --tp 8 --micro-batch-size 4 --recompute full\n"
                     "  plan estimate --model gpt-175b --gpus 64 --tp 8 --pp 8 --sequence-parallel --output plan.yaml")
@_asked
@_option(_LAYOUT, "--pp", type=click.IntRange(1), default=1, show_default=True, metavar="N", help="Pipeline stages.")
@_option(_LAYOUT, "--dp", type=click.IntRange(1), metavar="N", help="Data parallel degree. [default: GPUs / (pp x tp)]")
@_option(_LAYOUT, "--tp", type=click.IntRange(1), default=1, show_default=True, metavar="N", help="Tensor parallel degree.")
@_option(_LAYOUT, "--micro-batch-size", type=click.IntRange(1), default=1, show_default=True, metavar="N", help="Sequences in one.")
@_option(_LAYOUT, "--schedule", type=click.Choice(SCHEDULES), help="[default: 1f1b, interleaved with --virtual-stages above 1]")
@_option(_LAYOUT, "--virtual-stages", type=click.IntRange(1), default=1, show_default=True, metavar="N", help="Chunks per pipeline rank.")
@_option(_LAYOUT, "--zero", type=click.IntRange(0, 3), default=0, show_default=True, metavar="0..3", help="ZeRO stage of every layer.")
@_option(_LAYOUT, "--recompute", type=click.Choice(RECOMPUTE), default="none", show_default=True, help="Of every block.")
@_option(_LAYOUT, "--sequence-parallel", is_flag=True, help="Split norms and dropouts along the sequence.")
@_option(OUTPUT, "-o", "--output", type=click.Path(path_type=Path), help="Also write the plan file; - for stdout.")
@_json
def estimate(**options: Any) -> None:
    """Price one layout by hand: the same breakdown and the same plan file, without a search."""
    from costmodels.recompute import Recompute
    from planner.estimate import estimate_plan
    from planner.options import frame, question_of, require_writable
    from planner.report.summary import Context

    output = options["output"]
    if output not in (None, STDOUT):
        require_writable(output)
    question = question_of(options)
    plan = estimate_plan(
        question.model, question.cluster, question.training, frame(question, options), zero=options["zero"],
        recompute=Recompute(options["recompute"]))
    _deliver(plan, Context(assumed=question.assumed), output, as_json=options["as_json"])


@main.command(epilog="  plan models\n  plan models --json | jq -r '.[].name'")
@_json
def models(as_json: bool) -> None:
    """List the models that come with the planner: any of them goes after --model."""
    from planner.report import catalogue

    _list(catalogue.model_rows, catalogue.print_models, as_json=as_json)


@main.command(epilog="  plan clusters\n  plan clusters --json")
@_json
def clusters(as_json: bool) -> None:
    """List the GPUs that come with the planner, each in its usual node: any of them goes after --gpu."""
    from planner.report import catalogue

    _list(catalogue.cluster_rows, catalogue.print_clusters, as_json=as_json)


def _list(rows: Callable[[], Sequence[object]], show_table: Callable[[Any], None], *, as_json: bool) -> None:
    from planner.report.text import console

    if as_json:
        _print_json(rows())
    else:
        show_table(console(sys.stdout))


@main.command(epilog="  plan schema > docs/plan.schema.json")
def schema() -> None:
    """Print the JSON Schema of the plan file."""
    from planner.report.documents import plan_schema

    _print_json(plan_schema())


if __name__ == "__main__":
    main()
