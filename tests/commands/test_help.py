"""The help of every command: it fits a terminal, and its examples are commands that exist."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise

import click
import pytest
from click.testing import CliRunner

from parplan import cli
from parplan.profiles.machines.machine_catalog import cluster_names, stack_names
from parplan.profiles.models.model_catalog import model_names
from parplan.report.wrapping import continued

NAMES = {"--model": model_names, "--gpu": cluster_names, "--stack": stack_names}


def help_of(name: str, width: int) -> str:
    result = CliRunner().invoke(cli.main, [*filter(None, [name]), "--help"], terminal_width=width)
    assert result.exit_code == 0, result.output
    return result.output


def examples(text: str) -> list[str]:
    """The commands of `plan` under the heading, without what a shell does with their output."""
    whole = text.split("\nExamples:\n")[1].replace("\\\n", "")
    parts = re.split(r"\n|&&|\$\(|\)\"", whole)
    return [re.split(r" [|>] ", part)[0].strip() for part in parts if part.strip()[:5] == "plan "]


@pytest.mark.parametrize("name", ["", *cli.main.names])
def test_a_help_fits_and_its_examples_are_commands(name, monkeypatch):
    for width in (60, 80):
        text = help_of(name, width)
        assert max(map(len, text.splitlines())) <= width
    context = click.Context(cli.main)
    for known in (cli.main, *(cli.main.get_command(context, each) for each in cli.main.names)):
        monkeypatch.setattr(known, "callback", lambda *_, **__: None)

    commands = examples(text)
    assert commands
    assert any(command.startswith(f"plan {name}".rstrip()) for command in commands)
    for command in commands:
        words = shlex.split(command)
        result = CliRunner().invoke(cli.main, words[1:])
        assert result.exit_code == 0, (command, result.output)
        for option, value in pairwise(words):
            for each in value.split(",") if option in NAMES else ():
                assert each in NAMES[option](), command


def test_a_long_command_goes_on_after_a_backslash_and_is_the_same_command():
    command = "  plan show 'my plan.yaml' --json | jq '.[] | {name, slower}'"
    lines = continued(command, 30).splitlines()

    assert all(line.endswith(" \\") for line in lines[:-1])
    assert max(map(len, lines)) <= 32  # a word in quotes is never broken
    assert shlex.split("\n".join(lines).replace("\\\n", "")) == shlex.split(command)
    assert continued(command, None) == continued(command, len(command)) == command
