"""Commands and options that the texts of the program tell its reader to use."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import click

from parplan import cli
from parplan.executor.rules.all_rules import validate
from parplan.executor.rules.pool_rules import plans_of_run
from parplan.executor.rules.traced_rules import validate_traced_plan
from parplan.executor.run_options import Options
from parplan.planner.export.targets import TARGETS
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.plan_file import read_any_plan

ROOT_COMMAND = ""  # `plan --model ...`, which has no name of its own
_BLANKS = re.compile(r"\s+")
_WORD = re.compile(r"\bplan(?: ([a-z][a-z-]*))?(?=[\s,;:.)`']|$)|(?<![\w-])(--[a-z][a-z0-9-]*)")
_ENDS = re.compile(r"[,;:.)`](?=\s|$)|\s(?:or|and)\s")
_RUN_LINE = re.compile(r"^ +((?:plan|torchrun) .+)$", re.MULTILINE)
_INLINE = re.compile(r"(?:with: |example: |hint: |`|')(plan [a-z-]+(?: [^`;()\n,']+)?)")


@dataclass(frozen=True, slots=True)
class Mention:
    """An option that a text names, and the command before it; None where no command is."""

    option: str
    command: str | None


@cache
def commands() -> dict[str, click.Command]:
    """Every command by its name, the main one by `ROOT_COMMAND`."""
    context = click.Context(cli.main)
    of_main = {
        name: cli.main.get_command(context, name) for name in cli.main.list_commands(context)
    }
    return {ROOT_COMMAND: cli.main, **{name: each for name, each in of_main.items() if each}}


@cache
def options_of(name: str) -> frozenset[str]:
    """The options of a command."""
    return options_in(commands()[name])


@cache
def launchers_arguments() -> frozenset[str]:
    """The arguments of the launchers, which texts about their settings name."""
    return frozenset(row.name for target in TARGETS.values() for row in target.table)


def options_in(command: click.Command) -> frozenset[str]:
    """The options of a command, with those that switch one off, and its help."""
    params = (each for each in command.params if isinstance(each, click.Option))
    return frozenset({"--help"}.union(*((*each.opts, *each.secondary_opts) for each in params)))


def mentions(text: str) -> Iterator[Mention]:
    """The options that a text names, each with the command that its phrase names."""
    for phrase in _phrases(_BLANKS.sub(" ", _RUN_LINE.sub("", text))):
        command: str | None = None
        for found in _WORD.finditer(phrase):
            name, option = found.groups()
            if option is not None:
                yield Mention(option, command)
            elif name in commands():
                command = name
            elif name is None and phrase[found.end() :].startswith(" --"):
                command = ROOT_COMMAND


def _phrases(text: str) -> Iterator[str]:
    start = 0
    for end in _ENDS.finditer(text):
        yield text[start : end.start()]
        start = end.end()
    yield text[start:]


def run_lines(text: str) -> list[list[str]]:
    """The words of the commands that stand on a line of their own, without their remarks."""
    lines = (shlex.split(line, comments=True) for line in _RUN_LINE.findall(text))
    return [line for line in lines if line[0] == "torchrun" or _is_known(line[1])]


def _is_known(word: str) -> bool:
    return word in commands() or word.startswith("-")


def inline_commands(text: str) -> list[list[str]]:
    """The words of the commands of the program that sentences quote."""
    found = (re.split(" and | or ", words)[0].split() for words in _INLINE.findall(text))
    return [words for words in found if _is_known(words[1])]


def parse(words: list[str]) -> None:
    """Parses a command of a sentence, which may leave out its file.

    Names in capitals stand for any value. Raises click's UsageError and ConfigError for what the
    command does not take.
    """
    name, rest = (words[1], words[2:]) if words[1] in commands() else (ROOT_COMMAND, words[1:])
    values = ["1" if word == "N" else word for word in rest if word not in ("...", "..")]
    with suppress(click.MissingParameter):
        commands()[name].make_context(name or "plan", values)


def require_starts(words: list[str], folder: Path) -> None:
    """Asserts that a line of torchrun starts a program on as many ranks as its plans have.

    Raises click's UsageError for an argument that the program does not take.
    """
    run = importlib.import_module("torch.distributed.run")
    asked = run.parse_args(words[1:])
    assert asked.module, words
    package = importlib.import_module(asked.training_script)
    module = f"{package.__name__}.__main__" if hasattr(package, "__path__") else package.__name__
    program = importlib.import_module(module).main
    context = program.make_context(asked.training_script, list(asked.training_script_args))
    paths: list[Path] = context.params["plan_files"]
    plans = [read_any_plan(folder / path) for path in paths]
    for plan in plans:
        if isinstance(plan, Plan):
            validate(plan)
        else:
            validate_traced_plan(plan, Options())
    plans_of_run(list(zip(map(str, paths), plans, strict=True)))
    alike = len({plan.cluster.gpus_per_node for plan in plans}) == 1
    if alike and not plans[0].cluster.pool_names:
        ranks = sum(plan.mesh.num_ranks for plan in plans)
        nodes = int(asked.nnodes.split(":")[-1])
        assert nodes * int(asked.nproc_per_node) == ranks, words
