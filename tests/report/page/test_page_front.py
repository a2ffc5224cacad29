"""The front of a page: the numbers are those of `plan --objective pareto`, drawn and in a table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from parplan.planner.plan.plan_file import read_plan
from parplan.report.page.figures import value_at
from parplan.report.page.plan_front import front_entries
from parplan.report.page.reported_plan import ReportedPlan
from parplan.report.plan_documents import plan_document
from tests.helpers.command_runs import fail, succeed
from tests.helpers.documented import ROOT
from tests.report.page.test_html_page import Page

TRACED = str(ROOT / "tests/golden/plan-1-traced.yaml")
PLAIN = ("--baseline", "none", "--to", "none")
KEYS = ("step_time_s.value", "peak_memory_gib", "redundancy_gib")


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> tuple[dict, list[Path]]:
    """The record of a front, and its plan files."""
    output = tmp_path_factory.mktemp("front") / "plan.yaml"
    request = ("--model", "gpt-tiny", "--gpu", "cpu", "--gpus", "4", "--objective", "pareto")
    record = json.loads(succeed(*request, "--json", "-o", str(output)).stdout)
    return record, sorted(output.parent.glob("plan-*.yaml"))


def page_of(*arguments: str) -> Page:
    return Page(succeed("report", *arguments, *PLAIN, "-o", "-").stdout)


@pytest.mark.slow
def test_a_searched_front_has_the_numbers_of_the_record(found):
    record, files = found
    page = page_of(str(files[0]), "--front")
    shown = {each.attributes.get("key"): each.value for each in page.shown}

    assert len(record["points"]) > 2
    for index, point in enumerate(record["points"]):
        for key in KEYS:
            assert shown[f"front.points.{index}.{key}"] == value_at(point, key)
    drawn = [row for row in page.data["charts"]["front"]["datasets"]["rows"] if row["number"]]
    assert [(row["step"], row["peak"], row["redundant"]) for row in drawn] == [
        tuple(value_at(point, key) for key in KEYS) for point in record["points"]
    ]
    far = [row for row in drawn if row["drawn"] < row["step"]]
    assert far == [row for row in drawn if "far slower" in row["role"]]
    assert f"{record['searches']} searches" in page.words
    assert "which choices were pinned" in page.words


@pytest.mark.slow
def test_the_files_of_a_front_are_drawn_as_it(found):
    record, files = found
    page = page_of(*map(str, reversed(files)))

    drawn = page.data["charts"]["front"]["datasets"]["rows"]
    assert [row["number"] for row in drawn] == [str(point["number"]) for point in record["points"]]
    assert [row["step"] for row in drawn] == [
        point["step_time_s"]["value"] for point in record["points"]
    ]
    assert f"The page has {len(files)} of the {len(files)} plans of this front" in page.words
    documents = [plan_document(read_plan(file)) for file in reversed(files)]
    for value, attributes, _ in page.shown:
        if "key" in attributes:
            document = documents[int(attributes["plan"])]
            assert value == value_at(document, attributes["key"]), attributes["key"]


def test_plans_of_two_requests_are_no_front(found):
    _, files = found
    plans = [ReportedPlan(name=file.name, plan=read_plan(file)) for file in files[:2]]
    cluster = plans[1].plan.cluster
    other = replace(plans[1].plan, cluster=replace(cluster, nodes=cluster.nodes + 1))

    assert len(front_entries(plans)) == 2
    assert front_entries([plans[0], replace(plans[1], plan=other)]) == ()
    assert front_entries(plans[:1]) == ()


def test_a_page_says_which_baselines_there_was_no_time_for(found, monkeypatch):
    monkeypatch.setattr("parplan.planner.deadline.MANY_GPUS", 1)
    monkeypatch.setattr("parplan.commands.report.BASELINES_CPU_S", 0.0)
    page = Page(succeed("report", str(found[1][0]), "--to", "none", "-o", "-").stdout)

    assert "There was no time for the baselines" in page.words
    assert "plan report --time-limit SECONDS gives them more" in page.words


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a.yaml", "b.yaml", "--front"), "--front searches around one plan, there are 2"),
        (
            ("a.yaml", "--baseline", "none", "--time-limit", "9"),
            "--time-limit is for baselines and --front",
        ),
        ((TRACED, "--front"), "is of a traced module, whose request the file does not have"),
    ],
)
def test_what_has_no_front_is_an_error_with_one_action(arguments, message):
    assert message in " ".join(fail(2, "report", *arguments).split())
