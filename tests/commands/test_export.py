"""plan export writes files that shells read, and never over the files of others."""

from __future__ import annotations

import json
import subprocess

import pytest
import yaml

from parplan.planner.plan.plan_file import write_plan
from tests.helpers.command_runs import fail, run, succeed
from tests.helpers.documented import ROOT
from tests.helpers.laid_out_plans import laid_out
from tests.planner.export.test_exported import mixed_zero


@pytest.fixture
def whole(tmp_path):
    write_plan(laid_out(pp=2, dp=2, tp=4), tmp_path / "plan.yaml")
    return str(tmp_path / "plan.yaml")


def test_a_script_and_its_job_are_written_and_are_shell(whole, tmp_path):
    text = succeed("export", whole, "--to", "megatron", "--launch", "slurm", "-o", f"{tmp_path}/x")

    assert "lost      nothing" in text.stdout
    for name in ("megatron.sh", "slurm.sbatch"):
        assert f"wrote {tmp_path}/x/{name}" in text.stdout
        subprocess.run(["bash", "-n", f"{tmp_path}/x/{name}"], check=True)
    assert "bash megatron.sh" in (tmp_path / "x/slurm.sbatch").read_text()


def test_the_script_gives_torchrun_the_arguments(whole, tmp_path):
    succeed("export", whole, "--to", "megatron", "-o", str(tmp_path))
    echo = 'torchrun() { printf "%s\\n" "$@"; }; . ' + str(tmp_path / "megatron.sh")
    words = (
        subprocess.run(
            ["bash", "-c", echo, "megatron.sh", "--lr", "1e-4"], check=True, capture_output=True
        )
        .stdout.decode()
        .split()
    )

    assert words[words.index("--tensor-model-parallel-size") + 1] == "4"
    assert words[words.index("--nproc-per-node") + 1] == "8"


def test_a_kubernetes_job_has_a_pod_for_every_node(tmp_path):
    plan = ROOT / "tests/golden/plan-1-described.yaml"
    succeed("export", str(plan), "--to", "kubernetes", "-o", str(tmp_path))
    job = yaml.safe_load((tmp_path / "kubernetes.yaml").read_text())

    assert job["kind"] == "PyTorchJob"
    assert sum(each["replicas"] for each in job["spec"]["pytorchReplicaSpecs"].values()) == 1


def test_an_export_that_does_not_fit_says_so_and_what_to_do(tmp_path):
    plan = laid_out("gpt-20b", dp=8)
    write_plan(plan, tmp_path / "plan.yaml")
    (stage,) = plan.predicted.memory_gib
    lacks = stage.total - stage.capacity

    arguments = ("export", f"{tmp_path}/plan.yaml", "--to", "megatron", "-o", str(tmp_path))
    text, as_json = run(*arguments), run(*arguments, "--json")
    body = json.loads(as_json.stdout)

    assert (text.exit_code, as_json.exit_code) == (3, 3)
    first = f"does not fit: a GPU lacks {lacks:.1f} GiB; plan --for megatron searches"
    assert text.stdout.startswith(first)
    assert body["missing_gib"] == pytest.approx(lacks, rel=1e-3)
    assert f"a GPU lacks {lacks:.2f} GiB" in (tmp_path / "megatron.sh").read_text()


def test_strict_refuses_a_loss_and_writes_nothing(tmp_path):
    write_plan(mixed_zero(laid_out(dp=4)), tmp_path / "plan.yaml")
    folder = tmp_path / "x"
    arguments = ("export", str(tmp_path / "plan.yaml"), "--to", "megatron", "-o", str(folder))

    assert "cannot say all of the plan: ZeRO: 3 on 1 and 1 on 53" in fail(2, *arguments, "--strict")
    assert not folder.exists()
    body = json.loads(succeed(*arguments, "--json").stdout)
    assert body["lost"][0]["step_s"] == pytest.approx(
        body["exported"]["step_s"] - body["plan"]["step_s"]
    )


def test_a_file_of_somebody_else_stays(whole, tmp_path):
    (tmp_path / "megatron.sh").write_text("mine")
    arguments = ("export", whole, "--to", "megatron", "-o", str(tmp_path))

    assert "no plan was exported to it" in fail(2, *arguments)
    assert (tmp_path / "megatron.sh").read_text() == "mine"
    succeed(*arguments, "--force")
    succeed(*arguments)
