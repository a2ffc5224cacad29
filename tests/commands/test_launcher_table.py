"""The table of launchers that the main command prints, and the launchers of a settings file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from parplan.planner.plan.plan_file import read_plan
from tests.helpers.command_runs import fail, succeed

SMALL = ("--model", "gpt-tiny", "--gpus", "2")
TOO_LARGE = ("--model", "gpt-22b", "--gpus", "1", "--offload", "none")
THREE = (*SMALL, "--for", "megatron,fsdp2,parplan")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def rows_of(output):
    """The launchers of the printed table, the chosen one with its star."""
    return re.findall(r"^(\*?) +([a-z0-9-]+) +[\d.]+ m?s ", output, re.MULTILINE)


def test_the_table_has_the_best_plan_of_each_launcher_the_fastest_first():
    output = succeed(*THREE).stdout

    names = [name for _, name in rows_of(output)]
    assert sorted(names) == ["fsdp2", "megatron", "parplan"]
    plan = read_plan(Path("plan.yaml"))
    assert plan.search.launcher == names[0]
    steps_s = {}
    for name in names:
        succeed(*SMALL, "--for", name, "-o", f"{name}.plan.yaml")
        steps_s[name] = read_plan(Path(f"{name}.plan.yaml")).predicted.step_time_s.value
    assert names == sorted(names, key=steps_s.__getitem__)
    assert plan.predicted.step_time_s.value == steps_s[names[0]]


def test_json_has_every_launcher_and_the_plan_of_the_chosen_one():
    document = json.loads(succeed(*SMALL, "--for", "megatron,torchtitan,fsdp2", "--json").stdout)

    entries = {each["name"]: each for each in document["launchers"]}
    (chosen,) = (each for each in entries.values() if each["chosen"])
    assert chosen["step_time_s"] == document["predicted"]["step_time_s"]["value"]
    assert "no configuration of gpt-tiny" in entries["torchtitan"]["no_plan"]
    assert chosen["tied"]


def test_the_printed_command_of_a_launchers_plan_loses_nothing():
    line = succeed(*SMALL, "--for", "megatron,deepspeed").stdout.splitlines()[-1]

    assert re.fullmatch(r"  plan export plan\.yaml --to (megatron|deepspeed)", line)
    succeed(*line.split()[1:], "--strict")


@pytest.mark.slow
def test_adapters_are_trained_by_the_own_executor_alone():
    lora = ("--lora-rank", "8", "--lora-targets", "qkv")
    output = succeed(*SMALL, *lora, "--for", "megatron,parplan").stdout

    assert "megatron: " in output
    assert output.splitlines()[-1].startswith("  torchrun --nproc-per-node 2 -m parplan.executor")


@pytest.mark.slow
def test_a_bound_says_that_no_program_runs_it():
    output = succeed(*SMALL, "--for", "none").stdout

    assert read_plan(Path("plan.yaml")).search.launcher is None
    assert "wrote plan.yaml, a bound for the stack megatron-core: no program runs it" in output


def test_none_goes_with_no_launcher():
    message = fail(2, *SMALL, "--for", "none,megatron")

    assert "--for none is what no program can run, beside megatron" in message


def test_an_aim_of_one_search_goes_with_one_launcher():
    message = fail(2, *SMALL, "--for", "megatron,fsdp2", "--objective", "memory")

    assert "--objective memory goes with one launcher, --for names 2" in message


def test_a_settings_file_of_the_project_names_the_launchers(tmp_path, monkeypatch):
    Path("parplan.yaml").write_text("for: megatron\n", encoding="utf-8")
    inside = tmp_path / "inside"
    inside.mkdir()
    monkeypatch.chdir(inside)

    succeed(*SMALL)

    assert read_plan(Path("plan.yaml")).search.launcher == "megatron"
    succeed(*SMALL, "--for", "fsdp2", "-o", "other.yaml")
    assert read_plan(Path("other.yaml")).search.launcher == "fsdp2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("for: megatron\ngpu: a100-80gb\n", "a settings file has the one key 'for'"),
        ("plan_version: 1\n", "is a plan, and stands where a project has its settings"),
        ("for:\n", "names no launcher"),
        ("for: []\n", "names no launcher"),
        ("- megatron\n", "a settings file has the one key 'for'"),
        ("for: megatrom\n", "unknown launcher 'megatrom'"),
    ],
)
def test_a_settings_file_that_is_not_understood_is_an_error(text, message):
    Path("parplan.yaml").write_text(text, encoding="utf-8")

    assert message in fail(2, *SMALL)


@pytest.mark.slow
def test_nothing_that_fits_any_launcher_is_the_error_of_the_widest_space():
    message = fail(3, *TOO_LARGE, "--for", "deepspeed,parplan")

    assert "gpt-22b does not fit on 1 x a100-80gb" in message


LAUNCHERS = "megatron,megatron-bridge,deepspeed,fsdp2,huggingface,galvatron"


@pytest.mark.slow
def test_no_launcher_alone_beats_the_fastest_of_all():
    """tests/planner/launchers/test_no_plan_beats_the_table.py has more requests."""
    document = json.loads(succeed(*SMALL, "--for", LAUNCHERS, "--json").stdout)
    best_s = document["predicted"]["step_time_s"]["value"]
    gap = document["search"]["gap"]
    for each in document["launchers"]:
        if each["no_plan"]:
            continue
        path = f"{each['name']}.yaml"
        succeed(*SMALL, "--for", each["name"], "-o", path)
        assert read_plan(Path(path)).predicted.step_time_s.value >= best_s * (1 - gap - 1e-9)
