"""Hostile input: a few hundred of the fuzzer's inputs, and one for every cause met before."""

from __future__ import annotations

import copy
import json
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from benchmarks.commands.fuzzing import kinds as fuzzed
from benchmarks.commands.fuzzing.campaign import grouped, numbers, run
from benchmarks.commands.fuzzing.command_lines import BASES, _command_of
from benchmarks.commands.fuzzing.consistent import problem_of
from benchmarks.commands.fuzzing.injected import injected, obeyed
from benchmarks.commands.fuzzing.inputs import Ended, Input, Program, Stream
from benchmarks.commands.fuzzing.plans import edited
from benchmarks.commands.fuzzing.seeds import CONFIGS, DESCRIBED, Seeds, shipped
from benchmarks.commands.fuzzing.server import Server
from benchmarks.commands.fuzzing.verdicts import judge
from parplan.cli import main
from parplan.planner.plan.plan import PLAN_VERSION
from tests.helpers.cases import mostly_slow

INPUTS = 100
SLOW = ("family-yaml", "command-line", "surroundings")  # searches: the benchmark runs them
TINY = "--model gpt-tiny --gpus 2 --gpu cpu"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(torch=False) as started:
        yield started


@pytest.fixture(scope="module")
def seeds(tmp_path_factory, server) -> Seeds:
    """Seeds that are made when a test asks for them."""
    return _Asked(tmp_path_factory.mktemp("seeds"), server)


class _Asked(Seeds):
    def __init__(self, folder: Path, server: Server) -> None:
        super().__init__(folder)
        self._server = server

    def content(self, name: str) -> bytes:
        self.make(name, self._server)
        return super().content(name)


@pytest.fixture(scope="module")
def all_seeds(seeds, server) -> Seeds:
    for name in sorted(seeds.missing(name for kind in without_torch() for name in kind.needs)):
        seeds.make(name, server)
    return seeds


def without_torch() -> list[fuzzed.Kind]:
    """Returns the kinds whose inputs and seeds need no torch, and that do not search for long."""
    need_torch = {"traced-one", "run"}
    return [
        kind
        for kind in fuzzed.KINDS
        if not kind.torch and kind.name not in SLOW and not need_torch & set(_needed(kind))
    ]


def _needed(kind: fuzzed.Kind) -> set[str]:
    return Seeds(Path("nowhere")).missing(kind.needs)


@pytest.mark.slow
@pytest.mark.multiproc
def test_no_mutated_file_ends_in_a_traceback_and_no_plan_that_does_not_fit_together_is_read(
    all_seeds,
):
    failures = []

    run(
        numbers(INPUTS, without_torch()),
        0,
        all_seeds,
        1,
        lambda result: failures.append(result) if result.verdict.failure else None,
    )

    causes = [
        f"{len(group.results)} x {group.failure}: {group.cause} ({group.results[0].given.name})"
        for group in grouped(failures)
    ]
    assert causes == []


@pytest.mark.slow
def test_the_same_seed_makes_the_same_inputs_and_another_seed_others(all_seeds):
    for kind in without_torch():
        assert fuzzed.build(kind, 3, 0, all_seeds) == fuzzed.build(kind, 3, 0, all_seeds)
    assert [fuzzed.build(kind, 3, 0, all_seeds).files for kind in without_torch()] != [
        fuzzed.build(kind, 3, 1, all_seeds).files for kind in without_torch()
    ]


def test_inputs_are_as_many_as_asked_with_every_kind_and_a_longer_campaign_begins_each_kind_alike():
    few, many = numbers(300), numbers(3000)

    assert 290 <= len(few) <= 320
    assert {kind.name for kind, _ in few} == {kind.name for kind in fuzzed.KINDS}
    assert set(few) <= set(many)


# What a plan's document must say, each broken by one value
MISFITS = {
    "ranks": lambda plan: plan["cluster"].update(nodes=7),
    "batch": lambda plan: plan["pipeline"].update(num_micro_batches=3),
    "halves": lambda plan: plan["pipeline"].update(tp_overlap=1),
    "virtual stages": lambda plan: plan["pipeline"].update(virtual_stages=0),
    "blocks": lambda plan: plan["stages"][0]["layers"][1].update(last=10**12),
    "stage": lambda plan: plan["stages"].pop(),
    "rank of a stage": lambda plan: plan["stages"][0].update(rank=1),
    "layer plan": lambda plan: plan["stages"][0]["layers"][1].update(plan="Z"),
    "recompute": lambda plan: next(iter(plan["layer_plans"].values())).update(recompute=["fc9"]),
    "sequence": lambda plan: plan["training"].update(seq_length=10**6),
    "memory": lambda plan: plan["predicted"]["memory_gib"].pop(),
    "ep": lambda plan: plan["mesh"].update(ep=2),
}


@pytest.mark.parametrize("name", mostly_slow(DESCRIBED, list(DESCRIBED)[:2]))
def test_the_oracle_finds_nothing_wrong_with_a_plan_as_it_was_made(seeds, name):
    assert problem_of(seeds.tree(name)) == ""


@pytest.mark.parametrize("broken", MISFITS)
def test_the_oracle_finds_what_does_not_fit_together(seeds, broken):
    plan = copy.deepcopy(seeds.tree("plan-pp2-tp2"))

    MISFITS[broken](plan)

    assert problem_of(plan)


def test_edits_of_plans_break_most_of_them_and_not_all(seeds):
    problems = [
        problem_of(edited(seeds.tree("plan-pp2-tp2"), random.Random(number)))
        for number in range(100)
    ]

    assert 50 <= sum(map(bool, problems)) <= 95


def _ended(**values: object) -> Ended:
    return Ended(
        **{
            "code": 0,
            "stdout": "",
            "stderr": "",
            "stack": "",
            "seconds": 0.1,
            "cpu_s": 0.1,
            "hung": False,
            **values,
        }
    )  # type: ignore[arg-type]


GIVEN = Input(kind="x", number=0, arguments=("show", "p.yaml"))
TRACEBACK = (
    'Traceback (most recent call last):\n  File "/home/x/planner/plan/plan.py", line 7, '
    "in read\n    x\nValueError: no\n"
)


@pytest.mark.parametrize(
    ("ended", "failure"),
    [
        pytest.param(_ended(), "", id="done"),
        pytest.param(
            _ended(code=2, stderr="error: no such file\nhint: give one\n"), "", id="one-error"
        ),
        pytest.param(_ended(code=2, stderr="no such file\n"), "0 error lines", id="no-error"),
        pytest.param(
            _ended(code=2, stderr="error: a\nerror: b\n"), "2 error lines", id="two-errors"
        ),
        pytest.param(_ended(code=1, stderr=TRACEBACK), "traceback", id="traceback"),
        pytest.param(_ended(code=1), "exit code", id="exit-code-1"),
        pytest.param(_ended(code=-11), "signal", id="segmentation-fault"),
        pytest.param(_ended(code=-9, hung=True), "hang", id="hang"),
        pytest.param(_ended(cpu_s=21.0), "slow", id="slow"),
        pytest.param(_ended(code=-signal.SIGXCPU), "slow", id="stopped"),
        pytest.param(_ended(peak_bytes=3 * 2**30), "memory", id="memory"),
        pytest.param(
            _ended(stderr="/a/b.py:3: RuntimeWarning: overflow\n"), "warning", id="warning"
        ),
    ],
)
def test_a_verdict_names_the_way_in_which_an_input_failed(ended, failure):
    assert judge(GIVEN, ended).failure == failure


def test_a_traceback_is_grouped_by_its_last_frame():
    assert (
        judge(GIVEN, _ended(code=1, stderr=TRACEBACK)).cause
        == "ValueError planner/plan/plan.py:7 read"
    )


WROTE = {  # a file of an export, and the start of what a name wrote in it; "" for nothing
    ("run.sh", "# a\ntorchrun 'evil; $(evil)' # evil\n"): "",
    ("run.sh", "# a\nevil\n"): "./script: line 2: evil: command not found",
    ("run.sh", "torchrun a > evil\n"): "it wrote ['evil', 'script']",
    ("slurm.sbatch", "#!/bin/bash\n#SBATCH --wrap=evil\n"): "directive #SBATCH --wrap",
    ("slurm.sbatch", "#SBATCH --job-name=a-evil --wrap=a\n"): "directive",
    ("slurm.sbatch", "#SBATCH --job-name=a-evil\n"): "",
    ("a.json", '{"name": ["evil"]}'): "",
    ("a.json", '{"a": [{"evil": 1}]}'): "key evil",
    ("a.yaml", "# evil\na: evil\n"): "",
    ("a.yaml", "a: 1\nevil: 1\n"): "key evil",
    ("a.yaml", "a: 1\n---\nb: 1\n"): "a second document",
    ("a.py", "# evil\nname = 'evil'\n"): "",
    ("a.py", "import evil\n"): "alias.name",
    ("a.html", "<p title='evil'>evil</p>"): "",
    ("a.html", "<evil>"): "tag evil",
}


@pytest.mark.parametrize("file", WROTE)
def test_a_line_that_a_name_wrote_is_found_in_every_language(file):
    name, text = file

    wrote = injected(name, text.encode())

    assert wrote.startswith(WROTE[file])
    assert bool(wrote) is bool(WROTE[file])


def test_a_character_that_a_terminal_obeys_is_found():
    assert obeyed("plain \u00e9\n\ttext\r\n") == ""
    assert obeyed("a\x1b[2J") == "U+001B"


def test_a_command_gets_its_own_options():
    commands = {_command_of(base.split()).name for base in BASES}

    assert commands == {"plan", *main.names} - {"check", "doctor", "tokenize"}


# The causes that broke every reader of YAML or JSON: a text, where a number belongs
HOSTILE = {
    "date": "2020-01-01",
    "hexadecimal": "0x10",
    "underscore": "1_5",
    "tag": "!!int abc",
    "digits": "9" * 4300,
    "infinite": ".inf",
    "base-60": "1:30",
    "bytes": "!!binary aGk=",
    "alias": "&a [*a]",
    "set": "!!set {a, b}",
    "2-to-the-63": str(2**63),
}
BOMB = "a: &a {k: 1}\n" + "".join(
    f"b{n}: &b{n} {{<<: [{', '.join(['*' + (f'b{n - 1}' if n else 'a')] * 9)}]}}\n"
    for n in range(9)
)
WHOLE = {
    "deep": "[" * 100_000,
    "merge-bomb": BOMB,
    "empty": "",
    "two-documents": "---\na: 1\n---\nb: 2\n",
    "nul": "\0",
    "keys": "{? [1] : 2}",
}
READERS = {  # a command, the file, and the number in it that is replaced
    "model": ("estimate --model f.yaml --gpus 2 --gpu cpu", r"(?<=num_layers: )\d+"),
    "cluster": ("estimate --model gpt-tiny --cluster f.yaml --gpus 2", r"(?<=num_sms: )\d+"),
    "stack": (f"estimate {TINY} --stack f.yaml", r"(?<=tp_overlap: )\d+"),
    "family": (
        "max-model --family f.yaml --gpus 1 --gpu cpu --offload none --time-limit 1",
        r"(?<=vocab_size: )\d+",
    ),
    "plan": ("show f.yaml", r"(?<=num_layers: )\d+"),
    "profile": ("profile --show f.yaml", r"(?<=num_devices: )\d+"),
    "comm": ("profile --add f.yaml -o h.yaml", r"(?<=ranks_per_node: )\d+"),
}


def _valid(reader: str, seeds: Seeds) -> str:
    packaged = {
        "model": ("models", "gpt-tiny"),
        "cluster": ("clusters", "cpu"),
        "stack": ("stacks", "parplan"),
        "family": ("families", "gpt"),
    }
    if reader in packaged:
        return shipped(*packaged[reader]).decode()
    return seeds.content("plan-pp2-tp2" if reader == "plan" else reader).decode()


def _refused(server: Server, given: Input) -> None:
    """Checks exit code 2 with one error and one hint."""
    ended = server.run(given)
    verdict = judge(given, ended)
    assert (verdict.failure, verdict.cause) == ("", "")
    assert ended.code == 2, ended.stdout + ended.stderr
    assert re.search(r"^hint: ", ended.stderr, re.MULTILINE)


def _of_readers(texts: dict[str, str], *of_all: str) -> list[object]:
    """Returns all texts for one reader and some for every other, since all share one reader.

    Every third is in the plain run.
    """
    cases = [
        (reader, text) for reader in READERS for text in texts if reader == "plan" or text in of_all
    ]
    return mostly_slow(cases, cases[::3])


@pytest.mark.parametrize(
    ("reader", "text"), _of_readers(HOSTILE, "date", "hexadecimal", "tag", "2-to-the-63")
)
def test_a_number_that_is_none_is_refused_by_every_reader(server, seeds, reader, text):
    command, place = READERS[reader]
    body, count = re.subn(place, HOSTILE[text], _valid(reader, seeds), count=1)

    assert count == 1
    _refused(
        server,
        Input(
            kind="corpus",
            number=0,
            arguments=tuple(command.split()),
            files={"f.yaml": body.encode(), "h.yaml": seeds.content("profile")},
        ),
    )


@pytest.mark.parametrize(("reader", "text"), _of_readers(WHOLE, "deep", "merge-bomb"))
def test_a_document_that_is_none_is_refused_by_every_reader(server, seeds, reader, text):
    command, _ = READERS[reader]

    _refused(
        server,
        Input(
            kind="corpus",
            number=0,
            arguments=tuple(command.split()),
            files={"f.yaml": WHOLE[text].encode(), "h.yaml": seeds.content("profile")},
        ),
    )


JSON = {
    "deep": "[" * 100_000,
    "digits": '{"run_version": ' + "9" * 4300 + "}",
    "nan": '{"run_version": NaN}',
    "empty": "",
    "list": "[]",
    "surrogate": '{"run_version": "\\ud800"}',
    "two-documents": "{} {}",
    "two-keys": '{"run_version": 1, "run_version": 1}',
}


@pytest.mark.parametrize("text", JSON)
@pytest.mark.parametrize(
    "command",
    mostly_slow(
        ["show f.json", "calibrate f.json -o -", "estimate --model f.json --gpus 2 --gpu cpu"],
        {"show f.json"},
    ),
)
def test_a_json_document_that_is_none_is_refused(server, command, text):
    _refused(
        server,
        Input(
            kind="corpus",
            number=0,
            arguments=tuple(command.split()),
            files={"f.json": JSON[text].encode()},
        ),
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("model_type", value) for value in ("[]", "{}", "3", "null", '"\\u0000"')),
        ("num_hidden_layers", str(2**63)),
        ("vocab_size", "1e999"),
        ("hidden_size", "-1"),
        ("rope_theta", "NaN"),
        ("num_attention_heads", "0"),
    ],
)
def test_a_hugging_face_config_with_a_value_of_another_kind_is_handled(server, key, value):
    config = json.loads(CONFIGS["llama"]) | {key: "HERE"}
    given = Input(
        kind="corpus",
        number=0,
        arguments=("estimate", "--model", "config.json", "--gpus", "2", "--gpu", "cpu"),
        files={"config.json": json.dumps(config).replace('"HERE"', value).encode()},
    )

    assert judge(given, server.run(given)).failure == ""


@pytest.mark.parametrize(
    "command", mostly_slow(["show p.yaml", "trace p.yaml -o t.json"], {"show p.yaml"})
)
@pytest.mark.parametrize("broken", MISFITS)
def test_a_plan_that_does_not_fit_together_is_refused_by_every_command(
    server, seeds, broken, command
):
    plan = copy.deepcopy(seeds.tree("plan-pp2-tp2"))
    MISFITS[broken](plan)

    _refused(
        server,
        Input(
            kind="corpus",
            number=0,
            arguments=tuple(command.split()),
            files={"p.yaml": yaml.safe_dump(plan, sort_keys=False).encode()},
            inconsistent=broken,
        ),
    )


# The causes that a command line or its surroundings had
LINES = {
    "schedule-scp": (
        "estimate --model gpt-tiny --gpus 8 --pp 2 --dp 4 --schedule scp --zero 3 "
        "--recompute full --micro-batch-size 1"
    ),
    "schedule-early": (
        "estimate --model gpt-tiny --gpus 8 --pp 2 --dp 4 --schedule "
        "early-recompute --zero 3 --recompute full"
    ),
    "schedule-last": (
        "estimate --model gpt-tiny --gpus 8 --pp 2 --dp 4 --schedule "
        "last-no-recompute --zero 3 --recompute full"
    ),
    "one-recompute-level": (
        "--model gpt-2.5b --gpus 1 --gpu cpu --recompute none --time-limit 1 -o p.yaml"
    ),
    "max-model-recompute": (
        "max-model --hidden 64 --recompute full --gpus 1 --gpu cpu --time-limit 1"
    ),
    "ways-out-in-time": "--model gpt-2.5b --gpus 2 --gpu cpu --time-limit 1 -o p.yaml",
    "size-nan": f"estimate {TINY} --memory-limit nanGiB",
    "size-inf": f"estimate {TINY} --host-memory 1e999GiB",
    "huge-batch": f"estimate {TINY} --global-batch-size 9223372036854775808",
    "huge-gpus": "estimate --model gpt-tiny --gpus 99999999999999999999",
    "long-name": f"show {'x' * 300}",
    "long-output": f"estimate {TINY} -o {'x' * 300}",
    "not-utf-8": "show \udcff.yaml",
    "output-not-utf-8": f"estimate {TINY} -o \udcff.yaml",
    "output-in-proc": f"estimate {TINY} -o /proc/x.yaml",
    "output-to-full": "trace plan.yaml -o /dev/full",
    "loop": "show loop",
    "model-long": f"estimate --model {'x' * 5000}.yaml --gpus 2",
}


@pytest.mark.parametrize(
    "line", mostly_slow(LINES, LINES.keys() - {"one-recompute-level", "ways-out-in-time"})
)
def test_a_command_line_ends_with_a_result_or_one_error(server, seeds, line):
    given = Input(
        kind="corpus",
        number=0,
        arguments=tuple(LINES[line].split(" ")),
        files={"plan.yaml": seeds.content("plan-pp2-tp2")},
        links={"loop": "loop"},
    )

    assert judge(given, server.run(given)).failure == ""


SURROUNDINGS = {
    "stderr-closed": {"stderr": Stream.CLOSED},
    "stdout-closed": {"stdout": Stream.CLOSED},
    "stdout-full": {"stdout": Stream.FULL},
    "reader-left": {"stdout": Stream.LEFT},
    "ascii": {"encoding": "ascii"},
    "no-home": {"environment": {"HOME": None}},
    "narrow": {"environment": {"COLUMNS": "1"}},
    "columns": {"environment": {"COLUMNS": "abc"}},
}
SHOWN = (
    "show plan.yaml",
    "--help",
    f"estimate {TINY} -o -",
    "estimate --model \u00e9t\u00e9.yaml --gpus 2 --gpu cpu",
)


@pytest.mark.parametrize("command", mostly_slow(SHOWN, SHOWN[:1]))
@pytest.mark.parametrize("surroundings", SURROUNDINGS)
def test_a_command_ends_well_whatever_its_streams_are(server, seeds, surroundings, command):
    model = shipped("models", "gpt-tiny").replace(b"gpt-tiny", "\u00e9t\u00e9".encode())
    given = Input(
        kind="corpus",
        number=0,
        arguments=tuple(command.split()),
        files={"plan.yaml": seeds.content("plan-pp2-tp2"), "\u00e9t\u00e9.yaml": model},
        **SURROUNDINGS[surroundings],
    )

    assert judge(given, server.run(given)).failure == ""


def test_a_plan_is_written_where_standard_error_is_closed(server):
    given = Input(
        kind="corpus",
        number=0,
        arguments=(*f"{TINY} --time-limit 60 -o p.yaml".split(),),
        stderr=Stream.CLOSED,
    )

    ended = server.run(given, ("p.yaml",))

    assert ended.code == 0
    assert yaml.safe_load(ended.files["p.yaml"])["plan_version"] == PLAN_VERSION


def test_an_input_writes_nowhere_but_in_its_folder(server, seeds, tmp_path):
    outside = tmp_path / "trace.json"
    given = Input(
        kind="corpus",
        number=0,
        arguments=("trace", "plan.yaml", "-o", str(outside)),
        files={"plan.yaml": seeds.content("plan-pp2-tp2")},
    )

    ended = server.run(given)

    assert (ended.code, outside.exists()) == (2, False)


@pytest.mark.slow
@pytest.mark.multiproc
def test_the_executor_ends_with_one_error_for_what_it_cannot_read(tmp_path):
    seeds = Seeds(tmp_path)
    with Server(torch=True) as server:
        seeds.make("plan-one", server)
        for arguments in (
            ("p.yaml", "--timeout", "nan"),
            ("p.yaml", "--timeout", "inf"),
            ("p.yaml", "--seed", "99999999999999999999", "--steps", "1"),
            ("p.yaml", "--data", "t.npz"),
            ("p.yaml", "--data", "t.npy"),
            ("p.yaml", "--data", "x" * 300),
            ("p.yaml", "--betas", "1", "x"),
        ):
            given = Input(
                kind="corpus",
                number=0,
                arguments=arguments,
                program=Program.EXECUTOR,
                files={
                    "p.yaml": seeds.content("plan-one"),
                    "t.npz": b"PK\x03\x04",
                    "t.npy": b"\x93NUMPY\x01\x00\x10\x00{'descr': 3}",
                },
            )
            ended = server.run(given)
            assert (arguments, judge(given, ended).failure, ended.code) == (arguments, "", 2)
