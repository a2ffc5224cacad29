"""Every `--json` has a schema that is made from its record, and its output has no other keys."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import click
import jsonschema
import pytest

from parplan import cli
from parplan.commands.json_documents import command_schema, json_sources
from parplan.planner.runs.run_file import write_run
from tests.helpers.command_runs import fail, run, succeed
from tests.helpers.run_logs import megatron_log
from tests.helpers.synthetic_runs import estimated, run_of

ROOT = Path(__file__).resolve().parents[2]
DESCRIBED = "tests/golden/plan-1-described.yaml"
TINY = ("--model", "gpt-tiny", "--gpus", "2", "--gpu", "cpu")
H100 = ("--model", "llama3-8b", "--gpu", "h100-80gb", "--gpus", "8")
VERSIONS = ("version", "plan_version", "run_version", "profile_version")


def with_json() -> set[str]:
    context = click.Context(cli.main)
    commands = {name: cli.main.get_command(context, name) for name in cli.main.names}
    commands["plan"] = cli.main
    return {
        name
        for name, command in commands.items()
        if any(param.name == "as_json" for param in command.params)
    }


@cache
def validator(command: str) -> jsonschema.Draft202012Validator:
    schema = command_schema(command)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_every_command_with_json_has_a_schema_and_no_other():
    assert set(json_sources()) == with_json()


def validated(command: str, *arguments: str) -> dict[str, object]:
    """Returns the result of a command after it was held to the command's schema."""
    name = () if command == "plan" else (command,)
    result = run(*name, *arguments, "--json")
    assert result.exit_code in (0, 3), result.output
    body = json.loads(result.stdout)
    validator(command).validate(body)
    assert set(VERSIONS) & set(body)
    return body


@pytest.fixture
def plan_file(tmp_path, monkeypatch):
    """A small plan in the folder that the test runs in."""
    monkeypatch.chdir(tmp_path)
    succeed("estimate", *TINY, "--dp", "2", "-o", "plan.yaml")
    return "plan.yaml"


COMMANDS = {
    "plan": (("plan", *TINY, "-o", "found.yaml"),),
    "calibrate": (("calibrate", "run.json"),),
    "check": (("check", "plan.yaml"),),
    "clusters": (("clusters",),),
    "compare": (("compare", "plan.yaml", "--baseline", "zero-3"),),
    "diff": (("diff", "plan.yaml", "plan.yaml"),),
    "doctor": (("doctor", "--device", "cpu", "--ranks", "1", "--path", "collectives"),),
    "estimate": (("estimate", *TINY),),
    "explain": (("explain", *TINY, "--tp", "2"),),
    "export": (
        ("export", "plan.yaml", "--to", "megatron", "--force"),
        ("export", "plan.yaml", "--to", "torchrun", "--force"),
    ),
    "import": (("import", "pretrain.log", "--gpu", "h100-80gb", "-o", "steps.csv"),),
    "max-model": (("max-model", "--gpus", "1", "--gpu", "v100-16gb", "--seq-length", "512"),),
    "profile": (("profile", "--show", "mine.yaml"),),
    "size": (
        ("size", "--model", "gpt-1.5b", "--tokens", "1B", "--days", "9", "--gpu", "a100-80gb"),
    ),
    "tokenize": (("tokenize", "book.txt", "-o", "book.bin"),),
    "init": (("init", "cluster.yaml", "--gpu", "a100-80gb", "--nodes", "2", "--no-look"),),
    "models": (("models",),),
    "read": (("read", "pretrain.sh", *H100[2:]),),
    "schemes": (("schemes", *TINY),),
    "show": (("show", "plan.yaml"), ("show", "plan.yaml", "--instructions")),
    "stacks": (("stacks",),),
    "sweep": (("sweep", "--model", "gpt-tiny", "--gpu", "cpu", "--gpus", "1,3"),),
    "validate": (("validate", "--source", "korth22"), ("validate", "--fitted")),
}
SLOW = ("check", "doctor", "max-model", "size", "read", "validate", "schemes")
MARKS = dict.fromkeys(SLOW, pytest.mark.slow)


def write_inputs(name: str) -> None:
    """Writes the files that a command reads besides the plan."""
    if name == "read":
        succeed("estimate", *H100, "-o", "large.yaml")
        run("export", "large.yaml", "--to", "megatron", "--force")  # does not fit
        (script,) = Path().glob("*.sh")
        script.rename("pretrain.sh")
    elif name in ("calibrate", "profile"):
        write_run(run_of(estimated()), Path("run.json"))
        if name == "profile":
            succeed("calibrate", "run.json", "-o", "mine.yaml")
    elif name == "import":
        Path("pretrain.log").write_text(megatron_log(dict.fromkeys(range(1, 21), 6_500.0)))
    elif name == "tokenize":
        Path("book.txt").write_text("a book", encoding="utf-8")


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=MARKS.get(each, ())) for each in COMMANDS]
)
def test_the_output_of_a_command_has_the_keys_of_its_schema_and_no_others(plan_file, name):
    write_inputs(name)
    for command, *arguments in COMMANDS[name]:
        validated(command, *arguments)


def test_the_output_of_every_command_is_held_to_its_schema():
    assert set(COMMANDS) == with_json()


def test_a_result_with_a_key_too_many_or_too_few_does_not_conform(plan_file):
    body = validated("compare", plan_file, "--baseline", "zero-3")

    assert validator("compare").is_valid(body)
    assert not validator("compare").is_valid(body | {"seconds": 1.0})
    for key in body:
        assert not validator("compare").is_valid({k: v for k, v in body.items() if k != key})


def test_schema_prints_the_schema_of_a_result():
    printed = json.loads(succeed("schema", "--of", "compare").stdout)

    assert printed == command_schema("compare")
    assert printed["title"] == "plan compare --json"
    assert "trace" in fail(2, "schema", "--of", "trace")
