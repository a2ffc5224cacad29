"""Shell scripts that start a program on every node, and the jobs that start such a script."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from parplan.planner.export.fields.arguments import Words
from parplan.planner.export.files.quoting import commented, shell_word
from parplan.profiles.documents.yaml_text import yaml_flow

INDENT = "    "
_RENDEZVOUS = (
    '--node-rank "${NODE_RANK:-0}"',
    '--master-addr "${MASTER_ADDR:-localhost}"',
    '--master-port "${MASTER_PORT:-29500}"',
)


def torchrun_lines(nodes: int, gpus_per_node: int, program: Iterable[str]) -> list[str]:
    """Returns the lines of a torchrun command with the node's rank from the environment."""
    first = f"torchrun --nnodes {nodes} --nproc-per-node {gpus_per_node}"
    lines = [f"{first} {_RENDEZVOUS[0]}", *(f"{INDENT}{each}" for each in _RENDEZVOUS[1:])]
    lines += [f"{INDENT}{each}" for each in program]
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def array(name: str, arguments: Iterable[tuple[str, Words]]) -> list[str]:
    """Returns a shell array with one argument a line."""
    lines = [
        f"{INDENT}{' '.join((argument, *map(shell_word, words)))}" for argument, words in arguments
    ]
    return [f"{name}=(", *lines, ")"]


def script(head: Iterable[str], body: Iterable[str]) -> str:
    """Returns a shell script with a head of comments."""
    return "\n".join(("#!/bin/bash", *commented(head), "set -euo pipefail", *body, ""))


def slurm_job(head: Iterable[str], name: str, nodes: int, gpus_per_node: int, command: str) -> str:
    """Returns an sbatch file that starts `command` once on every node."""
    started = f"NODE_RANK=$SLURM_NODEID exec {command}"
    return "\n".join(
        (
            "#!/bin/bash",
            f"#SBATCH --job-name={name}",
            f"#SBATCH --nodes={nodes}",
            "#SBATCH --ntasks-per-node=1",
            f"#SBATCH --gpus-per-node={gpus_per_node}",
            "#SBATCH --exclusive",
            *commented(head),
            "set -euo pipefail",
            'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "export MASTER_PORT=${MASTER_PORT:-29500}",
            f"srun --kill-on-bad-exit=1 bash -c {shell_word(started)}",
            "",
        )
    )


def kubernetes_job(
    head: Iterable[str], name: str, nodes: int, gpus_per_node: int, command: str
) -> str:
    """Returns a PyTorchJob that starts `command` once on every node.

    Kubeflow's training operator (kubeflow.org/v1) gives every pod MASTER_ADDR, MASTER_PORT and, as
    RANK, its number: the first pod is the Master, the others are Workers.
    """
    started = ["bash", "-c", f"NODE_RANK=$RANK exec {command}"]
    replicas: Mapping[str, int] = {"Master": 1, "Worker": nodes - 1}
    lines = [*commented(head), "apiVersion: kubeflow.org/v1", "kind: PyTorchJob"]
    lines += ["metadata:", f"  name: {yaml_flow(name)}", "spec:", "  pytorchReplicaSpecs:"]
    for role, count in replicas.items():
        if count:
            lines += [
                f"    {role}:",
                f"      replicas: {count}",
                "      restartPolicy: Never",
                "      template:",
                "        spec:",
                "          containers:",
                "            - name: pytorch",
                "              image: IMAGE  # name yours",
                f"              command: {json.dumps(started)}",
                "              resources:",
                f"                limits: {{nvidia.com/gpu: {gpus_per_node}}}",
            ]
    return "\n".join((*lines, ""))
