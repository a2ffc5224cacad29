"""The page of a traced plan whose module is traced again: its curves end at the plan's numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from parplan.planner.plan.plan_file import read_any_plan
from tests.helpers.command_runs import fail, succeed
from tests.report.page.test_html_page import Page

MODULE = "tests.helpers.builtin_modules:gpt"
MODEL = ("--model", MODULE, "--gpus", "4", "--gpu", "cpu")


@pytest.mark.slow
def test_a_traced_module_has_its_timeline_its_memory_and_its_baselines(tmp_path, monkeypatch):
    file = tmp_path / "plan.yaml"
    succeed(*MODEL, "-o", str(file))
    predicted = read_any_plan(file).predicted
    compared = ("--baseline", "zero-1", "--to", "none", "-o", "-")
    page = Page(succeed("report", str(file), "--trace", "--trust-module", *compared).stdout)
    charts = page.data["charts"]

    spans = charts["timeline-0"]["datasets"]["spans"]
    assert max(span["b"] for span in spans) == pytest.approx(predicted.step_time_s.value, rel=1e-4)
    moments = charts["curve-0"]["datasets"]["moments"]
    peak_gib = predicted.memory_gib[0].total
    assert max(row["gib"] for row in moments) == pytest.approx(peak_gib, rel=1e-3)
    shown = {each.attributes.get("key") for each in page.shown}
    assert "comparison.baselines.0.step_time_s" in shown
    assert "The plan of a traced module has no exports." in page.words

    code = tmp_path / "code"
    code.mkdir()
    (code / "module_of_a_page.py").write_text("from tests.helpers.builtin_modules import gpt\n")
    file.write_text(file.read_text().replace(MODULE, "module_of_a_page:gpt"))
    monkeypatch.syspath_prepend(code)
    monkeypatch.chdir(Path(__file__).parent)
    assert "--trust-module" in fail(2, "report", str(file), "--trace", "-o", "-")
