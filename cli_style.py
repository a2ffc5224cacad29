"""How every command looks and fails: sections and examples in its help, `error:` and `hint:` lines, exit codes."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click

from profiles.errors import PlannerError, unknown_name_error
from profiles.interrupts import on_ctrl_c
from profiles.ranges import require_range

INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class List(click.ParamType):
    """Comma-separated values of one type: `1,2,4`."""

    name = "list"

    def __init__(self, item: click.ParamType) -> None:
        self.item = item

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        return tuple(self.item.convert(part.strip(), param, ctx) for part in value.split(","))


class Whole(click.ParamType):
    """An integer in the range of a name (profiles/ranges.py)."""

    name = "integer"

    def __init__(self, of: str) -> None:
        self.of = of

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        number: int = click.INT.convert(value, param, ctx)
        require_range(self.of, number, param.opts[0] if param else self.of)
        return number


class Option(click.Option):
    """An option that stands under `section` in the help."""

    def __init__(self, *args: Any, section: str = "Options", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


class Command(click.Command):
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


class Main(Command, click.Group):
    """The group: turns errors into `error:` and `hint:` lines and exit codes, a Ctrl-C into 130."""

    command_class = Command

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        Command.format_options(self, ctx, formatter)
        self.format_commands(ctx, formatter)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands:
            raise unknown_name_error("command", args[0], self.commands)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            what = f"{ctx.invoked_subcommand} was done" if ctx.invoked_subcommand else "a plan was found"
            click.echo(f"interrupted before {what}; nothing was written", err=True)
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


def together(*decorators: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Several options as one decorator, in the order of the help."""

    def apply(function: Any) -> Any:
        for decorate in reversed(decorators):
            function = decorate(function)
        return function

    return apply


def option(section: str, *names: str, **settings: Any) -> Callable[[Any], Any]:
    """An option under a section of the help."""
    return click.option(*names, cls=Option, section=section, **settings)


def show_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    """The callback of --version."""
    if not value:
        return
    from importlib.metadata import PackageNotFoundError, version

    try:
        click.echo(f"plan, version {version('parplan')}")
    except PackageNotFoundError:
        click.echo("plan, from a source tree that is not installed")
    ctx.exit()


@contextlib.contextmanager
def noticing_ctrl_c() -> Iterator[list[int]]:
    """A list that is not empty once Ctrl-C came: the search answers it with its best plan, which is not an error."""
    interrupts: list[int] = []

    def on_interrupt(number: int, _: object) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    with on_ctrl_c(on_interrupt):
        yield interrupts


def print_json(value: object) -> None:
    """A result for programs: nothing else may go to stdout."""
    click.echo(json.dumps(value, indent=2))
