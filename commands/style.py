"""Form and failures of every command: help sections, `error:` and `hint:` lines, exit codes."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import keyword
import math
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from parplan.profiles.documents.files import explained_file_errors, noting_written
from parplan.profiles.documents.packaged_configs import packaged_names
from parplan.profiles.documents.ranges import require_range
from parplan.profiles.documents.texts import escaped
from parplan.profiles.errors import ConfigError, PlannerError, unknown_name_error
from parplan.profiles.interrupts import INTERRUPTED, end_quietly, on_ctrl_c, sigterm_as_ctrl_c
from parplan.profiles.models.hub import stay_offline
from parplan.profiles.standard_streams import Streams, sturdy_streams

YOUNG_OBJECTS = 500_000  # objects between two collections; tens of MiB
SWEPT = ("--gpus", "--gpu", "--global-batch-size", "--seq-length")  # options of `plan sweep`
LONGEST_S = 1e9  # 30 years, a tenth of the 2^63 ns at which the timers of the system end


class List(click.ParamType[Any]):
    """Comma-separated values of one type: `1,2,4`."""

    name = "list"

    def __init__(self, item: click.ParamType[Any]) -> None:
        self.item = item

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        return tuple(self.item.convert(part.strip(), param, ctx) for part in value.split(","))


class Whole(click.ParamType[int]):
    """An integer in the range of a name (profiles/documents/ranges.py)."""

    name = "integer"

    def __init__(self, of: str) -> None:
        self.of = of

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        number: int = click.INT.convert(value, param, ctx)
        require_range(self.of, number, param.opts[0] if param else self.of)
        return number


class Number(click.FloatRange):
    """A number in a range that may lack either end; never nan, never infinite."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number", param, ctx)
        return number

    def _describe_range(self) -> str:
        """Returns the range for the help, empty where both ends are open."""
        return "" if self.min is None and self.max is None else super()._describe_range()


class Share(Number):
    """A number, or percents of one: `1%` is 0.01."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and value.rstrip().endswith("%"):
            return super().convert(value.rstrip().rstrip("%"), param, ctx) / 100
        return super().convert(value, param, ctx)


class Option(click.Option):
    """An option that stands under `section` in the help.

    names    folder of configs/ whose names a shell completes its value with; none where empty
    """

    def __init__(
        self, *args: Any, section: str = "Options", names: str = "", **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.section = section
        self.names = names

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Returns the values that complete what is typed, the last one of several."""
        if not self.names:
            return super().shell_complete(ctx, incomplete)
        before, comma, last = incomplete.rpartition(",")
        names = packaged_names(self.names)
        return [CompletionItem(before + comma + name) for name in names if name.startswith(last)]


class Command(click.Command):
    """A command whose help shows options by section and whose examples keep their lines.

    It takes options by the names that launchers have for them, too.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known = {name for param in self.params for name in (*param.opts, *param.secondary_opts)}
        return super().parse_args(ctx, own_names(args, known | set(ctx.help_option_names)))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record:
                section = sections.setdefault(getattr(param, "section", "Other"), [])
                section.append(_record_that_fits(record, formatter.width))
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if not self.epilog:
            return
        from parplan.report.wrapping import continued

        examples = (continued(line, formatter.width) for line in self.epilog.splitlines())
        formatter.write("\n".join(("\nExamples:", *examples)) + "\n")


def _record_that_fits(record: tuple[str, str], width: int) -> tuple[str, str]:
    """Returns an option and its help, which names the choices where a line has no room for them."""
    option, text = record
    if len(option) <= width - 4 or not option.endswith("]"):
        return record
    name, _, choices = option.removesuffix("]").partition(" [")
    return f"{name} NAME", f"{text} One of {choices.replace('|', ', ')}."


def own_names(args: list[str], known: Collection[str]) -> list[str]:
    """Returns the arguments with launchers' names of known options replaced by these options."""
    names = {arg.partition("=")[0] for arg in args if arg.startswith("--") and len(arg) > 2}
    if names <= set(known):
        return args
    from parplan.planner.export.aliases import aliases

    own = {name: alias for name, alias in aliases().items() if alias in known}
    renamed = []
    for arg in args:
        name, sign, value = arg.partition("=")
        replaced = name not in known and name in own
        renamed.append(f"{own[name]}{sign}{value}" if replaced else arg)
    return renamed


def has_several(args: Sequence[str]) -> bool:
    """True if an option of `plan sweep` has several values, separated by commas."""
    given = dict(zip(args, [*args, ""][1:], strict=True))
    given |= {name: value for name, sign, value in (arg.partition("=") for arg in args) if sign}
    return any("," in given.get(name, "") for name in SWEPT)


class Main(Command, click.Group):
    """The command group; turns errors into `error:` and `hint:` lines and exit codes.

    Ctrl-C and SIGTERM give exit code 130.

    names: the commands of the group; `max-model` is `max_model` of commands/max_model.py, and
        `import` is `import_` of commands/import_.py
    """

    command_class = Command
    names: tuple[str, ...] = ()

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] in self.names:  # the options are those of a command
            return click.Group.parse_args(self, ctx, args)
        if has_several(args):
            return click.Group.parse_args(self, ctx, ["sweep", *args])
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self.names)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.names:
            return None
        name = cmd_name.replace("-", "_")
        if keyword.iskeyword(name):
            name = f"{name}_"
        command: click.Command = getattr(importlib.import_module(f"{__package__}.{name}"), name)
        return command

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        Command.format_options(self, ctx, formatter)
        self.format_commands(ctx, formatter)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.names:
            raise unknown_name_error("command", args[0], self.names)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        with noting_written() as written:
            try:
                with noticing_ctrl_c():
                    return super().invoke(ctx)
            except KeyboardInterrupt:
                tell(_interrupted_text(ctx.invoked_subcommand, written))
                raise click.exceptions.Exit(INTERRUPTED) from None

    def main(self, *args: Any, standalone_mode: bool = True, **kwargs: Any) -> Any:
        kwargs.setdefault("prog_name", self.name)
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **kwargs)  # type: ignore[call-overload]
        spare_cpu()
        with sigterm_as_ctrl_c():
            code = run_command(super().main, *args, **kwargs)
        end_quietly()
        sys.exit(code)


def _interrupted_text(command: str | None, written: Sequence[Path]) -> str:
    """Returns the sentence about a command that Ctrl-C ended, with the files that are there."""
    if written:
        more = f" and {len(written) - 2} more" if len(written) > 2 else ""
        return f"interrupted after it wrote {', '.join(map(str, written[:2]))}{more}"
    what = f"{command} was done" if command else "a plan was found"
    return f"interrupted before {what}; nothing was written"


def spare_cpu() -> None:
    """Sets the interpreter up for a search: no threads for products, few collections of garbage.

    The search has no product that is large enough to share, and starting NumPy's threads takes 0.05
    CPU-seconds; the user's own choice stays. Nearly all records of a search are free of cycles, so
    that a collection after every 700 of them, Python's default, finds nothing. Older objects, most
    of which torch makes once, are looked at after 100 collections of young ones instead of 10.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.set_threshold(YOUNG_OBJECTS, 100)


def run_command(
    main: Callable[..., Any],
    args: Sequence[str] | None = None,
    *,
    speaks: bool = True,
    **kwargs: Any,
) -> int:
    """Runs a command with `args`, or the arguments of the process, and returns its exit code.

    Errors are printed if it `speaks`. A stdout that cannot be written is reported last: the output
    is lost then, but not the work.
    """
    try:
        return _run(main, args, speaks=speaks, **kwargs)
    except KeyboardInterrupt:  # before the command began, or after it ended
        return INTERRUPTED


def _run(
    main: Callable[..., Any], args: Sequence[str] | None, *, speaks: bool, **kwargs: Any
) -> int:
    stay_offline()
    with sturdy_streams() as streams:
        try:
            require_utf8(sys.argv[1:] if args is None else args)
            with explained_file_errors():
                code = main(args, standalone_mode=False, **kwargs) or 0
        except PlannerError as error:
            hint = error.hint or f"{kwargs['prog_name']} --help lists the options"
            code = fail(error.message, hint, error.exit_code, speaks=speaks)
        except click.ClickException as error:
            code = fail(*_usage(error), error.exit_code, speaks=speaks)
        except click.Abort:
            code = INTERRUPTED
        return _printed(streams, code)


def require_utf8(args: Sequence[str]) -> None:
    """Raises ConfigError for an argument that is not UTF-8 or has a null byte: it names no file."""
    for arg in args:
        try:
            os.fsencode(arg).decode("utf-8")
        except UnicodeError:
            raise ConfigError(
                f"argument {arg!r} is not UTF-8 text",
                hint="rename the file, or correct the argument",
            ) from None
        if "\0" in arg:
            raise ConfigError(f"argument {arg!r} has a null character", hint="correct the argument")


def _printed(streams: Streams, code: int) -> int:
    """Returns `code`, or the code of the error that the output is lost."""
    failure = streams.failure()
    if failure is None or code:
        return code
    hint = "send stdout elsewhere; what goes to files was written"
    return fail(f"cannot write to stdout: {failure.strerror}", hint, ConfigError.exit_code)


def fail(message: str, hint: str, code: int, *, speaks: bool = True) -> int:
    """Prints the error and the hint, and returns the exit code.

    Control characters that a message quotes from a file are escaped.
    """
    if speaks:
        lines = (escaped(line) for line in hint.splitlines() or [""])
        tell(f"error: {escaped(message)}\nhint: " + "\n".join(lines))
    return code


def tell(text: str) -> None:
    """Prints lines on stderr, broken between words where its terminal is narrow."""
    from parplan.report.wrapping import broken, width_of

    print_lines(*broken(text, width_of(sys.stderr)).split("\n"), err=True)


def print_lines(*lines: str, err: bool = False) -> None:
    """Prints lines on stdout, or on stderr; characters that a terminal would obey are escaped."""
    click.echo("\n".join(map(escaped, lines)), err=err)


def tell_kept(*kept: Path | None) -> None:
    """Says on stderr under which names older files are kept that a command did not overwrite."""
    names = [escaped(str(path)) for path in kept if path is not None]
    if names:
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        files = "files" if len(names) > 1 else "file"
        tell(f"kept the older {files} as {', '.join(names[:2])}{more}")


def wrote_picture(plot: Path, kept: Path | None, *, to_stderr: bool) -> None:
    """Says that a picture was written, and where an older one is kept."""
    print_lines(f"wrote {plot}", err=to_stderr)
    tell_kept(kept)


# options that newcomers type, with the name that they have here
_WORDS_OF_OTHERS = {"--launcher": "--for", "--framework": "--for", "--backend": "--for"}


def _usage(error: click.ClickException) -> tuple[str, str]:
    """Click's message in the house's form, and a hint."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "plan"
    possibilities = getattr(error, "possibilities", None)
    message = error.message if possibilities else error.format_message()
    message = " ".join(message.split()).rstrip(".")
    hint = f"see {command} --help"
    named = getattr(error, "option_name", "")
    if named in _WORDS_OF_OTHERS:
        hint = f"did you mean {_WORDS_OF_OTHERS[named]!r}?"
    elif possibilities:
        hint = f"did you mean {_nearest(named, possibilities)!r}?"
    return message[:1].lower() + message[1:], hint


def _nearest(name: str, possibilities: Sequence[str]) -> str:
    """Returns the first of the names with the letters of `name` in another order, or else of all.

    Two letters that changed places are a typing error that the measure of likeness ranks low.
    """
    letters = sorted(name)
    return next((each for each in possibilities if sorted(each) == letters), possibilities[0])


def together(*decorators: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Combines several options into one decorator, in the order of the help."""

    def apply(function: Any) -> Any:
        for decorate in reversed(decorators):
            function = decorate(function)
        return function

    return apply


def packs(name: str, record: type[Any]) -> Callable[[Any], Any]:
    """Passes the options that are fields of a dataclass to the command as one record `name`.

    A field without an option keeps its default.
    """
    names = [field.name for field in fields(record)]

    def apply(function: Any) -> Any:
        @wraps(function)
        def packing(*args: Any, **values: Any) -> Any:
            given = {key: values.pop(key) for key in names if key in values}
            return function(*args, **values, **{name: record(**given)})

        return packing

    return apply


def given_options(ctx: click.Context) -> Iterator[click.Parameter]:
    """Yields the options and arguments of a command that its command line gives."""
    for param in ctx.command.params:
        if ctx.get_parameter_source(param.name or "") is ParameterSource.COMMANDLINE:
            yield param


def option(section: str, *names: str, **settings: Any) -> Callable[[Any], Any]:
    """Returns an option under a section of the help."""
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
    """Yields a list that is not empty once Ctrl-C or SIGTERM came, which raise KeyboardInterrupt.

    A search then answers with its best plan, which is not an error. C code that a signal interrupts
    may raise an error of its own: it is taken for KeyboardInterrupt.
    """
    interrupts: list[int] = []

    def on_interrupt(number: int, _: object) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    with on_ctrl_c(on_interrupt):
        try:
            yield interrupts
        except (PlannerError, click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception:
            if interrupts:
                raise KeyboardInterrupt from None
            raise


def print_json(value: object) -> None:
    """Prints a result, a mapping or a record, as JSON, alone on stdout."""
    from parplan.profiles.documents.schema import document

    click.echo(json.dumps(document(value), indent=2))
