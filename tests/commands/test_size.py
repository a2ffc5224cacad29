"""`plan size`: its table, its JSON and its errors."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from parplan.cli import main
from parplan.commands.size import prices_of
from parplan.planner.search.cluster_size import ClusterSize
from parplan.profiles.errors import ConfigError
from parplan.report.searches.size_table import FoundSizes, print_sizes, size_document

ASKED = [
    "size",
    "--model",
    "gpt-1.5b",
    "--tokens",
    "1B",
    "--days",
    "1",
    "--gpu",
    "a100-80gb,rtx4090",
]


@pytest.mark.slow
def test_the_cheapest_kind_comes_first_and_its_plan_is_written(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    prices = ["--price", "a100=1.5", "--price", "rtx4090=0.1"]
    run = CliRunner().invoke(main, [*ASKED, *prices, "--json", "-o", str(path)])
    assert run.exit_code == 0, run.output
    sizes = json.loads(run.stdout)["sizes"]
    assert [one["gpu"] for one in sizes] == sorted(
        (one["gpu"] for one in sizes), key=lambda name: name != "rtx4090-24gb"
    )
    for one in sizes:
        price = 0.1 if one["gpu"] == "rtx4090-24gb" else 1.5
        assert one["cost"] == pytest.approx(price * one["gpu_hours"], abs=0.01)
        assert one["days"] <= 1
    shown = CliRunner().invoke(main, ["show", str(path)])
    assert f"{sizes[0]['gpus']} x rtx4090-24gb" in shown.stdout


def test_a_price_names_a_gpu_and_a_number() -> None:
    assert prices_of(["h100=2.5"]) == {"h100-80gb": 2.5}
    with pytest.raises(ConfigError, match="--price is 'h100', it must be a GPU and the price"):
        prices_of(["h100"])
    with pytest.raises(ConfigError, match="unknown GPU"):
        prices_of(["h1000=2"])


def test_tokens_are_a_number() -> None:
    run = CliRunner().invoke(main, [*ASKED[:3], "--tokens", "many", "--days", "1"])
    assert run.exit_code == 2
    assert "--tokens is 'many', it must be a number and a unit" in run.output


def test_kinds_without_an_answer_after_ctrl_c_are_named() -> None:
    missed = ClusterSize(
        kind="a100-80gb", run=None, nearest=None, error=ConfigError("too slow"), tried=(8,)
    )
    found = FoundSizes(sizes=(missed,), unanswered=("h100-80gb",), per_hour={}, elapsed_s=1.0)
    out = Console(file=io.StringIO(), width=80)
    print_sizes(found, (), out)
    assert "stopped   early (Ctrl-C): no answer yet for h100-80gb\n" in out.file.getvalue()
    assert "the least times are predicted, not measured" in out.file.getvalue()
    assert "MWh" not in out.file.getvalue()
    assert size_document(found).unanswered == ("h100-80gb",)
