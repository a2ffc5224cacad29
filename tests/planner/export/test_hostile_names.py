"""No name of a plan writes a line, a command, a statement or a key of an exported file."""

from __future__ import annotations

import ast
import json
import os
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from parplan.planner.export.fields.launcher import Sheet
from parplan.planner.export.fields.settings import settings_of
from parplan.planner.export.files.head import stated_options
from parplan.planner.export.files.jobs import job, run_files
from parplan.planner.export.files.quoting import shell_word
from parplan.planner.export.targets import TARGETS
from parplan.profiles.errors import ConfigError
from parplan.profiles.inventory.cluster_draft import Draft, draft_text
from parplan.profiles.machines.machine_catalog import load_cluster
from tests.helpers.laid_out_plans import laid_out

NAME = "plain"
TORCHRUN = "torchrun"
EVIL = "touch evil"
HOSTILE = (
    f"a\n{EVIL}\n",
    f"a\r{EVIL}\r\n",
    f"a\x0b{EVIL}\x0c\x85\u2028\u2029{EVIL}",
    f"'; {EVIL}; '",
    f'"; {EVIL}; "',
    f"$({EVIL})`{EVIL}`${{x:-$({EVIL})}}",
    f"a && {EVIL} || {EVIL} | {EVIL} & {EVIL}",
    "a\\",
    "\\\n",
    "coding: utf-7 +AAo-import os",
    f"# coding=utf-7\n+AAo-{EVIL}",
    '"""\nimport os\n"""',
    "*alias &anchor !!python/object:os.system {a: b, c: [d",
    "a\nevil: true\n---\nevil: true",
    '"], "evil": ["',
    "#SBATCH --wrap=evil",
    "\x1b[2J\x07\u202e\u2066",
    "read back with --model evil --gpus 9",
    "-x --evil",
    "$name",
)
STUBS = """
PATH=/nowhere
said() { printf '<%s>' "$@"; printf '\\n'; }
for name in torchrun accelerate srun; do eval "$name() { said $name \\"\\$@\\"; }"; done
dirname() { printf /here; }
scontrol() { printf node; }
head() { printf node; }
"""


@cache
def sheet_of(target: str) -> Sheet:
    """Returns the sheet of a plan, which is laid out once."""
    plan = laid_out("llama3-8b", dp=4, zero=3, stack="torchtitan")
    facts = next(TARGETS[target].recomputes(plan.model, 32))
    chosen = replace(settings_of(plan), zero=TARGETS[target].zeros[-1], **facts)
    return Sheet(settings=chosen, plan=plan, head=())


def exported(target: str, name: str) -> dict[str, str]:
    """Returns all files of an export whose every name is this one, whoever checked it."""
    if target == TORCHRUN:
        plan = sheet_of("fsdp2").plan
        files = run_files(plan, Path(name), None)
        return files | job("slurm", plan, files, (name,)) | job("kubernetes", plan, files, (name,))
    sheet = replace(sheet_of(target), head=(f"{name} on 4 x {name}", name, f"lost: {name}"))
    files = dict(TARGETS[target].files(sheet))
    for launch in ("slurm", "kubernetes"):
        files |= job(launch, sheet.plan, files, sheet.head)
    return files


def meaning(file: str, text: str) -> object:
    """Returns what a program reads of a file, without its comments."""
    if file.endswith(".json"):
        return {key: value for key, value in json.loads(text).items() if key != "parplan"}
    if file.endswith(".py"):
        tree = ast.parse(text.encode())  # bytes, so that their encoding is read
        return [(type(each), each.lineno) for each in tree.body]
    if file.endswith((".yaml", ".yml")):
        return yaml.safe_load(text)
    lines = text.replace("\r", "\n").splitlines()  # every character that could end a line
    directives = [line for line in lines if line.startswith(("#!", "#SBATCH"))]
    return directives, shlex.split(text, comments=True)


@cache
def plain_files(target: str) -> dict[str, tuple[int, object]]:
    """Returns the lines and the meaning of each file of an export with a plain name."""
    files = exported(target, NAME).items()
    return {file: (len(text.splitlines()), meaning(file, text)) for file, text in files}


def require_same(target: str, name: str) -> None:
    """A file means the same with a hostile name and with a plain one, and has as many lines."""
    plain, hostile = plain_files(target), exported(target, name)
    assert list(plain) == list(hostile)
    for file, text in hostile.items():
        num_lines, plain_meaning = plain[file]
        assert len(text.splitlines()) == num_lines, file
        if target == TORCHRUN and file == "torchrun.sh":
            word = shell_word(f"./{name}" if name.startswith("-") else name)
            text = text.replace(f" {word} \\", f" {NAME} \\")
        assert meaning(file, text) == plain_meaning, file


EVERYWHERE = (*TARGETS, TORCHRUN)


@pytest.mark.parametrize("target", EVERYWHERE)
def test_a_hostile_name_changes_nothing_that_a_program_reads(target):
    for name in HOSTILE:
        require_same(target, name)


@settings(max_examples=25, deadline=None)
@given(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\0/"), min_size=1))
def test_no_text_at_all_changes_what_a_program_reads(name):
    if name in (".", NAME):
        return
    for target in ("deepspeed", "fsdp2", TORCHRUN):  # of every language
        require_same(target, name)


def scripts(names: tuple[str, ...]) -> Iterator[tuple[str, str, str]]:
    for target in EVERYWHERE:
        for name in names:
            for file, text in exported(target, name).items():
                if file.endswith((".sh", ".sbatch")):
                    yield target, name, text


def run_bash(folder: Path, texts: Mapping[str, str], command: str) -> str:
    """Runs one bash over scripts in an empty environment, with stubs in place of programs."""
    for file, text in texts.items():
        (folder / file).write_text(text, encoding="utf-8")
    done = subprocess.run(
        ["env", "-i", "LC_ALL=C.UTF-8", "bash", "-c", STUBS + command],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.stderr
    return done.stdout


def test_bash_runs_no_command_that_a_name_wrote(tmp_path):
    texts = {f"{i:03}.sh": text for i, (_, _, text) in enumerate(scripts(HOSTILE))}
    started = run_bash(
        tmp_path, texts, "export SLURM_JOB_NODELIST=n\nfor each in *.sh; do ( . ./$each ); done"
    )

    assert sorted(os.listdir(tmp_path)) == sorted(texts)
    lines = started.splitlines()
    assert sum(line.startswith(("<torchrun>", "<accelerate>", "<srun>")) for line in lines) == len(
        texts
    )
    assert not [line for line in lines if line.startswith("<touch>")]


def test_bash_reads_a_word_as_the_text_that_it_is(tmp_path):
    names = [name for name in HOSTILE if "\n" not in name[-1:]]
    body = "\n".join(f"printf '%s\\0' {shell_word(name)}" for name in names)

    read = run_bash(tmp_path, {"words.sh": body}, ". ./words.sh")

    assert len(body.splitlines()) == len(names)
    assert read.encode() == "".join(f"{name}\0" for name in names).encode()


def test_a_name_states_no_options_of_the_way_back():
    name = "read back with --model evil --gpus 9"
    heads = {
        "comment": f"# {name} on 4 x gpu, exported by parplan from {name}\n# lost: {name}\n",
        "json": json.dumps({"parplan": [f"{name} on 4, exported by parplan from x"]}, indent=2),
    }
    for text in heads.values():
        assert stated_options(text) == {}
        assert stated_options(f"{text}\n# read back with --gpus 4") == {"--gpus": "4"}


def test_comments_of_a_cluster_file_stay_comments():
    cluster = load_cluster("h100-80gb")
    draft = Draft(cluster, {"nodes": "of x\nevil: 1", "device": "y\u2028evil: 1"})

    text = draft_text(draft, "a\nevil: 1")

    assert "evil" not in yaml.safe_load(text)
    assert yaml.safe_load(text) == yaml.safe_load(draft_text(Draft(cluster, {}), "a"))


def test_a_job_has_a_legal_name_whatever_the_model_is_called():
    plan = sheet_of("fsdp2").plan
    for name in ("123", "yes", "日本", "-", "a" * 62 + "-b"):
        renamed = replace(plan, model=replace(plan.model, name=name))
        files = run_files(renamed, Path("plan.yaml"), "kubernetes")
        found = yaml.safe_load(files["kubernetes.yaml"])["metadata"]["name"]
        assert isinstance(found, str)
        assert 0 < len(found) < 64
        assert found.strip("-") == found


def test_a_plan_with_such_a_model_cannot_be_made():
    plan = sheet_of("fsdp2").plan
    for name in HOSTILE:
        if not name.isprintable():
            with pytest.raises(ConfigError, match="not printable"):
                replace(plan.model, name=name)
