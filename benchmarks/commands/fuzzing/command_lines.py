"""Command lines: every option of every command with hostile values.

The options come from click itself; a value should be refused or survived.
"""

from __future__ import annotations

import functools
import importlib
import shlex
from collections.abc import Mapping
from random import Random
from typing import Any

import click

from benchmarks.commands.fuzzing.inputs import Program
from benchmarks.commands.fuzzing.seeds import NCCL, SCHEDULES, Seeds, measured_steps
from benchmarks.commands.fuzzing.values import LONG, NAMES
from tests.helpers import launcher_scripts, run_logs

NEEDS = ("plan-pp2-tp2", "plan-chunks", "profile")
TINY = "--model gpt-tiny --gpus 2 --gpu cpu"
# A quick command line that works, of every command. A search has a time limit, since it may take
# any time without.
BASES: tuple[str, ...] = (
    f"{TINY} --micro-batch-size 1 --recompute none --time-limit 1 -o out.yaml",
    f"{TINY} --time-limit 1 -o out.yaml",
    f"{TINY} --time-limit 1 --objective memory -o -",
    f"{TINY} --objective pareto --points 3 --time-limit 1 -o out.yaml",
    f"estimate {TINY}",
    f"estimate {TINY}",
    f"estimate {TINY} --tp 2 -o out.yaml",
    "estimate --model gpt-tiny --gpus 8 --pp 2 --tp 2 --zero 1",
    f"estimate {TINY} --dp 2 --offload optimizer,parameters --zero 3",
    f"explain {TINY} --tp 2",
    "compare plan.yaml",
    f"compare {TINY} --time-limit 1",
    "show plan.yaml",
    "show chunks.yaml --chunks",
    "trace plan.yaml -o out.json",
    "validate --steps steps.csv",
    "max-model --hidden 1024 --gpus 1 --gpu cpu --offload none --time-limit 1",
    "models",
    "clusters",
    "stacks",
    "schema",
    f"schemes {TINY}",
    "completion bash",
    "diff plan.yaml chunks.yaml",
    "export plan.yaml --to fsdp2 -o folder --force",
    "read ds.json --model gpt-tiny --gpus 8 --gpu a100-80gb --seq-length 64",
    "import a.log --gpu a100-80gb -o out.csv",
    "calibrate a.log --plan plan.yaml -o out.yaml",
    "report plan.yaml --time-limit 1 -o out.html",
    "init --no-ask --no-look --gpu h100-80gb out.yaml",
    f"sweep {TINY} --tp 1,2 --time-limit 1 -o out.yaml",
    "size --model gpt-tiny --gpu cpu --tokens 1M --days 1",
    "profile --show h.yaml",
    "profile --diff h.yaml h.yaml",
    "profile --nccl-tests nccl.txt -o h.yaml",
    (
        "estimate --model gpt-tiny --gpus 2 --gpu cpu --pp 2 --global-batch-size 4 "
        "--schedule-file lists.csv --stack parplan"
    ),
)
KEPT = ("--time-limit", "--version")
MEASURES_NOT = {
    "--show",
    "--diff",
    "--nccl-tests",
    "--add",
}  # without any of them `plan profile` measures for ten minutes
NUMBERS = (
    "0",
    "-1",
    "1",
    "2",
    "3",
    "4",
    "7",
    "8",
    "16",
    "64",
    "1000",
    "1e3",
    "1.5",
    "0x10",
    "1_000",
    "nan",
    "inf",
    "-inf",
    "",
    " ",
    "2147483648",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551616",
    "9" * 30,
    "9" * 5000,
    "1e308",
    "1e-308",
    "1,2",
    ",",
    "1,,2",
    "2,2,2",
    "\u0663",
    "\u00b2",
    "1\n",
    "+1",
    "--1",
    "0.1",
    "0.9999",
    "-0",
    "99999999999",
)
SIZES = (
    "0",
    "0GiB",
    "-1GiB",
    "1",
    "4GiB",
    "1e9GiB",
    "nanGiB",
    "infGiB",
    "1GB",
    "1XiB",
    "GiB",
    "9" * 400 + "GiB",
    "1e999GiB",
    "0x10GiB",
    "1 GiB",
    "1,5GiB",
    "0.0000001GiB",
    "1e-300GiB",
    "72gib",
    "\u0661GiB",
    "1e308TiB",
)
FILES = (
    "missing",
    "plan.yaml",
    "chunks.yaml",
    "h.yaml",
    "steps.csv",
    "folder",
    ".",
    "..",
    "/",
    "/dev/null",
    "/dev/zero",
    "/dev/full",
    "folder/x/y",
    "-",
    "",
    "x" * 256,
    "x" * 5000,
    "a\nb.yaml",
    "\udcff.yaml",
    "\u00e9.yaml",
    "plan.yaml/x",
    "/proc/self/mem",
    "loop",
    "dangling",
    "out.svg",
    "out.png",
    "out.xyz",
    "nccl.txt",
    "/proc/1/root/x",
    "fifo-none",
)
FORBIDDEN = (
    "tp=2",
    "tp=",
    "=2",
    "tp",
    "tp=2=3",
    "recompute=full",
    "recompute=maybe",
    "schedule=1f1b",
    "x=1",
    "zero=9",
    "dp=-1",
    "tp=nan",
    "=",
)


def make(chance: Random, seeds: Seeds) -> Mapping[str, object]:
    """Return a base with one to four options added, changed or removed."""
    arguments = shlex.split(chance.choice(BASES))
    command = _command_of(arguments)
    for _ in range(chance.choice((1, 1, 2, 2, 3, 4))):
        arguments = _changed(arguments, command, chance)
    if "profile" in arguments[:1] and not MEASURES_NOT & {
        argument.partition("=")[0] for argument in arguments
    }:
        arguments.append("--show")
    links = {"loop": "loop", "dangling": "nowhere/x"}
    return {
        "arguments": _passable(arguments),
        "files": _files(seeds),
        "links": links,
        "folders": ("folder",),
    }


def make_executor(chance: Random, seeds: Seeds) -> Mapping[str, object]:
    """Return the executor's command line on a plan of one rank, or that of a check."""
    checks = chance.random() < 0.3
    arguments = shlex.split(
        "check plan.yaml" if checks else "plan.yaml --steps 1 --timeout 5 --no-record"
    )
    command = (
        _command_of(arguments)
        if checks
        else importlib.import_module("parplan.executor.__main__").main
    )
    for _ in range(chance.choice((1, 1, 2, 3))):
        arguments = _changed(arguments, command, chance)
    files = {"plan.yaml": seeds.content("plan-one"), "steps.csv": measured_steps()}
    program = Program.PLAN if checks else Program.EXECUTOR
    return {
        "arguments": _passable(arguments),
        "files": files,
        "folders": ("folder",),
        "program": program,
    }


def _files(seeds: Seeds) -> Mapping[str, bytes]:
    return {
        "plan.yaml": seeds.content("plan-pp2-tp2"),
        "chunks.yaml": seeds.content("plan-chunks"),
        "h.yaml": seeds.content("profile"),
        "steps.csv": measured_steps(),
        "nccl.txt": NCCL,
        "lists.csv": SCHEDULES[0][1],
        "ds.json": launcher_scripts.DEEPSPEED_JSON.encode(),
        "a.log": run_logs.megatron_log(dict.fromkeys(range(1, 21), 2_000.0)).encode(),
    }


def _passable(arguments: list[str]) -> tuple[str, ...]:
    """Return the arguments without NUL, which no kernel passes."""
    return tuple(argument.replace("\0", "") for argument in arguments)


@functools.cache
def _main() -> Any:
    return importlib.import_module("parplan.cli").main


def _command_of(arguments: list[str]) -> click.Command:
    """Return the command that the arguments begin with, or the group of all commands."""
    group = _main()
    return group.get_command(click.Context(group), arguments[0]) or group


def _changed(arguments: list[str], command: click.Command, chance: Random) -> list[str]:
    how = chance.random()
    if how < 0.07:
        return _odd(arguments, chance)
    options = [
        param
        for param in command.params
        if isinstance(param, click.Option) and param.opts[0] not in KEPT and not _is_length(param)
    ]
    if how < 0.12 and len(arguments) > 3:
        place = chance.randrange(len(arguments))
        return (
            arguments[:place] + arguments[place + 1 :]
            if arguments[place] not in ("profile", "--time-limit", "1", "--show", "--diff")
            else arguments
        )
    if not options or how > 0.97:
        return [
            *arguments,
            chance.choice((*NAMES, "--unknown", "--model", "-o", "--", "-h", "--help")),
        ]
    return _with_option(arguments, chance.choice(options), chance)


def _is_length(option: click.Option) -> bool:
    """Tell that an option is the length of a run, which may be as long as anybody asks for."""
    return option.opts[0] == "--steps" and isinstance(option.type, click.types.IntParamType)


def _odd(arguments: list[str], chance: Random) -> list[str]:
    if arguments[:1] == ["profile"]:  # it would measure
        return [*arguments, "--bogus"]
    return chance.choice(
        (
            [],
            ["shwo"],
            ["--help"],
            ["-h"],
            ["--version"],
            [LONG],
            ["\udcff"],
            [*arguments, *arguments],
            arguments[:1],
            [""],
        )
    )


def _with_option(arguments: list[str], option: click.Option, chance: Random) -> list[str]:
    name = chance.choice([*option.opts, *option.secondary_opts])
    if option.is_flag:
        return [*arguments, name]
    values = [_value(option, chance) for _ in range(option.nargs)]
    if option.opts[0] in arguments and chance.random() < 0.7:
        place = arguments.index(option.opts[0])
        return [*arguments[: place + 1], *values, *arguments[place + 1 + option.nargs :]]
    if len(values) == 1 and chance.random() < 0.3:
        return [
            *arguments,
            f"{name}={values[0]}" if name.startswith("--") else f"{name}{values[0]}",
        ]
    return [*arguments, name, *values]


def _value(option: click.Option, chance: Random) -> str:
    if chance.random() < 0.06:
        return chance.choice((*NAMES, *NUMBERS))
    kind = getattr(option.type, "item", option.type)
    listed = kind is not option.type and chance.random() < 0.4
    values = [
        _of_type(option, kind, chance) for _ in range(chance.choice((2, 3, 8)) if listed else 1)
    ]
    return ",".join(values)


def _of_type(option: click.Option, kind: click.ParamType, chance: Random) -> str:
    name = option.opts[0]
    if isinstance(kind, click.Choice):
        return chance.choice(
            (*kind.choices, *kind.choices, *kind.choices, "other", kind.choices[0].upper())
        )
    if isinstance(kind, click.types.IntParamType | click.types.FloatParamType):
        return chance.choice(NUMBERS)
    if isinstance(kind, click.Path):
        return chance.choice(FILES)
    if name in ("--memory-limit", "--host-memory"):
        return chance.choice(SIZES)
    if name == "--forbid":
        return chance.choice(FORBIDDEN)
    if name in ("--model", "--gpu", "--stack", "--family", "--cluster", "--profile"):
        return chance.choice(
            (
                *FILES,
                *NAMES,
                "gpt-tiny",
                "mixtral-tiny",
                "cpu",
                "a100",
                "parplan",
                "h.yaml",
                "gpt",
                "GPT_tiny",
            )
        )
    return chance.choice((*NAMES, *NUMBERS, "all", "fc1", "huggingface", "uniform", "1,2"))
