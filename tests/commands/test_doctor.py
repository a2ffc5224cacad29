"""`plan doctor` lists its paths, writes its file whole, and ends with 3 where a path was wrong."""

from __future__ import annotations

import json

import jsonschema
import pytest
import yaml

from parplan.commands import doctor as command
from parplan.commands.json_documents import command_schema
from parplan.executor.doctor import worlds
from parplan.executor.doctor.paths import PATHS
from parplan.executor.doctor.worlds import Examined
from parplan.planner.runs.doctor_report import Outcome, PathFinding, joined_finding
from tests.helpers.command_runs import fail, run, succeed

PASSED = PathFinding(path="chunks", outcome=Outcome.PASSED, says="loss 6.2588", seconds=1.0)
WRONG = PathFinding(path="lookup", outcome=Outcome.WRONG, says="differs by 2", seconds=2.0)
SLOW = PathFinding(path="pinned batches", outcome=Outcome.SLOW, says="pinned 2 GB/s", seconds=0.5)
REFUSED = PathFinding(path="fp8 products", outcome=Outcome.REFUSED, says="8.0 has no fp8")


@pytest.fixture
def found(monkeypatch):
    """Returns a function that sets the findings of the next command."""
    monkeypatch.setattr("parplan.commands.doctor_plans.doctor_plans", lambda _: {})

    def set_findings(*findings: PathFinding) -> None:
        examined = Examined(findings=findings, ran={})
        monkeypatch.setattr(worlds, "examine", lambda *_, **__: examined)

    return set_findings


def test_the_list_has_every_path():
    listed = succeed("doctor", "--list").stdout

    assert all(path.name in listed for path in PATHS)


@pytest.mark.parametrize(
    ("findings", "code", "counts"),
    [
        pytest.param((PASSED, REFUSED), 0, {"passed": 1, "refused": 1}, id="healthy"),
        pytest.param((PASSED, WRONG), 3, {"passed": 1, "wrong": 1}, id="wrong"),
        pytest.param((PASSED, SLOW), 3, {"passed": 1, "slow": 1}, id="slow"),
    ],
)
def test_findings_are_printed_and_written(findings, code, counts, found, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found(*findings)

    table = run("doctor", "--device", "cpu")
    printed = run("doctor", "--device", "cpu", "--json")

    assert (table.exit_code, printed.exit_code) == (code, code)
    assert all(each.says in table.stdout for each in findings)
    body = json.loads(printed.stdout)
    jsonschema.Draft202012Validator(command_schema("doctor")).validate(body)
    assert body["counts"] == counts
    written = yaml.safe_load((tmp_path / "doctor.yaml").read_text())
    assert [each["outcome"] for each in written["findings"]] == [
        each.outcome.value for each in findings
    ]
    assert written["environment"]["torch"]


def test_wrong_requests_are_refused_before_anything_runs(tmp_path):
    assert "unknown path 'chunk'" in fail(2, "doctor", "--path", "chunk")
    assert "--list prints a table" in fail(2, "doctor", "--list", "--json")
    nowhere = str(tmp_path / "nowhere" / "doctor.yaml")
    assert "no such folder" in fail(2, "doctor", "--device", "cpu", "-o", nowhere)


def test_no_more_ranks_than_gpus_are_started(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)

    assert "torch sees 1 GPUs" in fail(2, "doctor", "--device", "cuda", "--ranks", "2")


def test_the_worst_rank_gives_the_finding_of_a_path():
    joined = joined_finding("chunks", [PASSED, WRONG, PASSED])

    assert joined == PathFinding(
        path="chunks", outcome=Outcome.WRONG, says="rank 1: differs by 2", seconds=2.0
    )
    assert joined_finding("chunks", [PASSED, PASSED]) == PASSED


def test_every_exit_code_is_the_documented_one():
    assert command.UNHEALTHY == 3
