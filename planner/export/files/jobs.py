"""The scripts that start a run on every node: torchrun's own, a Slurm job, a Kubernetes job."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from parplan.planner.export.files.head import MARK
from parplan.planner.export.files.quoting import shell_word
from parplan.planner.export.files.script import kubernetes_job, script, slurm_job, torchrun_lines
from parplan.planner.plan.traced_plan import AnyPlan, model_name
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.hardware import Cluster

_MOST_NAME = 63  # characters of a name in Kubernetes (RFC 1123)


def hosts_of(cluster: Cluster) -> tuple[int, int]:
    """Returns the machines that start processes, and the GPUs of each."""
    per_host = cluster.gpus_per_node // cluster.hosts_per_node
    return cluster.num_gpus // per_host, per_host


def _slurm(plan: AnyPlan, command: str, head: tuple[str, ...]) -> tuple[str, str]:
    return "slurm.sbatch", slurm_job(head, _name(plan), *hosts_of(plan.cluster), command)


def _kubernetes(plan: AnyPlan, command: str, head: tuple[str, ...]) -> tuple[str, str]:
    return "kubernetes.yaml", kubernetes_job(head, _name(plan), *hosts_of(plan.cluster), command)


JOBS: Mapping[str, Callable[[AnyPlan, str, tuple[str, ...]], tuple[str, str]]] = {
    "slurm": _slurm,
    "kubernetes": _kubernetes,
}


def job(
    name: str, plan: AnyPlan, files: Mapping[str, str], head: tuple[str, ...]
) -> dict[str, str]:
    """Returns the file of a job by its name: it starts the first script of an export.

    Raises ConfigError for files without a script, and for the nodes of pools.
    """
    if plan.cluster.pool_names:
        raise ConfigError(
            f"a {name} job numbers its nodes in any order, and each stage of the plan is on the "
            "nodes of its own pool",
            hint="leave out --launch, and start the script on every node with its NODE_RANK",
        )
    started = next((file for file in files if file.endswith(".sh")), None)
    if started is None:
        raise ConfigError(
            f"{', '.join(files)}: there is no script for a {name} job to start",
            hint="leave out --launch, and start your own program",
        )
    file, text = JOBS[name](plan, f"bash {started}", head)
    return {file: text}


def _name(plan: AnyPlan) -> str:
    """Returns the name of a job: letters, digits and hyphens (RFC 1123)."""
    name = re.sub(r"[^a-z0-9-]+", "-", model_name(plan).lower()).strip("-")
    return name[:_MOST_NAME].strip("-") or "training"


def run_files(plan: AnyPlan, path: Path, launch: str | None) -> dict[str, str]:
    """Returns the files that run a plan with parplan's own executor.

    path      the plan's file, as the nodes reach it; one that begins with a hyphen is no option
    launch    the job that starts the script; None for the script alone
    """
    hosts, per_host = hosts_of(plan.cluster)
    head = (f"{model_name(plan)}, {MARK} {path.name}", "for parplan's own executor")
    file = f"./{path}" if str(path).startswith("-") else f"{path}"
    program = ["-m parplan.executor", shell_word(file), '"$@"']
    files = {"torchrun.sh": script(head, torchrun_lines(hosts, per_host, program))}
    return files | (job(launch, plan, files, head) if launch else {})
