"""A stream that is closed, full or cannot encode a character never ends a command's work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from parplan import cli
from parplan.commands.style import fail, run_command

ROOT = Path(__file__).resolve().parents[2]
ESTIMATE = ("estimate", "--model", "gpt-tiny", "--gpu", "cpu", "--gpus", "1", "-o", "plan.yaml")
CLOSED = (
    "import os, sys; os.closerange(1, 3); os.execv(sys.executable, [sys.executable, '-m', "
    "'cli', *sys.argv[1:]])"
)


@click.command()
def say() -> None:
    """Print, then work, then print again."""
    click.echo("caf\u00e9 \udcff")
    Path("done").touch()
    click.echo("done")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def unwritable():
    """A stream whose every write fails, as on a full disk: it is open for reading only."""
    return open(os.open(os.devnull, os.O_RDONLY), "w")


def test_a_stdout_that_fails_is_one_error_after_the_work(monkeypatch, capsys):
    with unwritable() as failing:
        monkeypatch.setattr(sys, "stdout", failing)
        code = run_command(say, [], prog_name="say")

    assert code == 2
    assert capsys.readouterr().err == (
        "error: cannot write to stdout: Bad file descriptor\nhint: send stdout "
        "elsewhere; what goes to files was written\n"
    )
    assert Path("done").exists()


def test_a_stderr_that_fails_changes_nothing(monkeypatch):
    with unwritable() as failing:
        monkeypatch.setattr(sys, "stderr", failing)

        assert run_command(say, ["--nonsense"], prog_name="say") == 2
        assert run_command(say, [], prog_name="say") == 0


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("models",), id="rich"),
        pytest.param(("schema",), id="json"),
        pytest.param(("-h",), id="help"),
    ],
)
def test_a_reader_that_goes_away_is_no_error(arguments, monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with pytest.raises(SystemExit) as ended:
            cli.main(list(arguments))

    assert ended.value.code == 0
    assert capsys.readouterr().err == ""


def test_a_character_that_stdout_cannot_encode_is_escaped(monkeypatch):
    with open("latin", "w", encoding="latin-1") as latin:
        monkeypatch.setattr(sys, "stdout", latin)
        code = run_command(
            lambda *args, **options: print("\u4e2d caf\u00e9 \udcff"), [], prog_name="say"
        )

    assert code == 0
    assert Path("latin").read_text(encoding="latin-1") == "\\u4e2d caf\u00e9 \\udcff\n"


def test_streams_that_are_closed_lose_no_plan(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    done = subprocess.run(
        [sys.executable, "-c", CLOSED, *ESTIMATE], env=environment, check=False, timeout=60
    )

    assert done.returncode == 0
    assert Path("plan.yaml").read_text().startswith("plan_version: 2\n")


def test_the_streams_are_as_before_afterwards(capsys):
    before = sys.stdout, sys.stderr

    run_command(say, ["--help"], prog_name="say")

    assert (sys.stdout, sys.stderr) == before


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        pytest.param(
            "pl\udcff.yaml", r"argument 'pl\udcff.yaml' is not UTF-8 text", id="not-utf-8"
        ),
        pytest.param("plan\0.yaml", r"argument 'plan\x00.yaml' has a null character", id="null"),
    ],
)
def test_an_argument_that_is_no_text_is_one_error(argument, message, capsys):
    assert run_command(cli.main, ["show", argument], prog_name="plan") == 2

    assert capsys.readouterr().err.splitlines()[0] == f"error: {message}"


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("--model", "x" * 300, "--gpus", "1"), id="model"),
        pytest.param(("--model", "gpt-tiny", "--gpus", "1", "--cluster", "x" * 300), id="cluster"),
        pytest.param(("--model", "gpt-tiny", "--gpus", "1", "--profile", "x" * 300), id="profile"),
        pytest.param(("--model", "gpt-tiny", "--gpus", "1", "--stack", "x" * 300), id="stack"),
        pytest.param(("show", "x" * 300), id="plan"),
        pytest.param(("calibrate", "x" * 300), id="run"),
        pytest.param(("tokenize", "x" * 300), id="text"),
        pytest.param(("max-model", "--gpus", "1", "--family", "x" * 300), id="family"),
        pytest.param(("validate", "--steps", "x" * 300), id="steps"),
        pytest.param(("profile", "--show", "x" * 300), id="own"),
        pytest.param(("profile", "--no-comm", "-o", "x" * 300), id="measured"),
        pytest.param(("profile", "--add", "x" * 300), id="records"),
    ],
)
def test_a_name_that_is_too_long_is_one_error_and_a_hint(arguments, capsys):
    assert run_command(cli.main, list(arguments), prog_name="plan") == 2

    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split(":")[0] for line in err.splitlines()] == ["error", "hint"]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e300"])
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("--model", "gpt-tiny", "--gpus", "1", "--time-limit"), id="time-limit"),
        pytest.param(("profile", "--minutes"), id="minutes"),
        pytest.param(("profile", "--hang-limit"), id="hang-limit"),
    ],
)
def test_a_time_that_no_clock_shows_is_one_error_and_a_hint(arguments, value, capsys):
    assert run_command(cli.main, [*arguments, value], prog_name="plan") == 2

    out, err = capsys.readouterr()
    assert out == ""
    assert (
        err.startswith(f"error: invalid value for '{arguments[-1]}': ") or "must be positive" in err
    )
    assert "\nhint: " in err


@pytest.mark.parametrize("option", ["--max-slowdown", "--memory-margin"])
def test_a_share_that_is_no_number_is_one_error(option, capsys):
    assert (
        run_command(
            cli.main, ["--model", "gpt-tiny", "--gpus", "1", option, "nan"], prog_name="plan"
        )
        == 2
    )

    assert f"'{option}': nan is not a finite number" in capsys.readouterr().err


def test_what_a_message_quotes_of_a_file_stays_on_its_line_and_reaches_no_terminal(capsys):
    assert fail("unknown key a\nb\x1b[2J", "known keys: c\n  d", 2) == 2

    assert capsys.readouterr().err == "error: unknown key a\\nb\\x1b[2J\nhint: known keys: c\n  d\n"


def test_ctrl_c_before_a_command_begins_is_130(monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("parplan.commands.style.stay_offline", interrupted)

    assert run_command(lambda *args, **kwargs: 0, []) == 130
