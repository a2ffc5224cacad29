"""Completion of commands, options, and names of models, GPUs and stacks by a shell."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from parplan.cli import main


def completed(args: list[str], incomplete: str) -> list[str]:
    items = ShellComplete(main, {}, "plan", "_PLAN_COMPLETE").get_completions(args, incomplete)
    return [item.value for item in items]


def test_commands_options_and_names_are_completed() -> None:
    assert completed([], "exp") == ["explain", "export"]
    assert completed([], "--mod") == ["--model", "--module"]
    assert "llama3-70b" in completed(["--model"], "llama3")
    assert completed(["size", "--gpu"], "h100-80gb,b2") == ["h100-80gb,b200-180gb"]
    assert "megatron-core" in completed(["estimate", "--stack"], "meg")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_takes_what_is_printed(shell: str) -> None:
    printed = CliRunner().invoke(main, ["completion", shell])
    assert printed.exit_code == 0
    assert f"_PLAN_COMPLETE={shell}_complete" in printed.stdout
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=printed.stdout, text=True, check=True)
