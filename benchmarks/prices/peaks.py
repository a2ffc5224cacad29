"""Predicted and measured peak memory of CPU runs, on the rank with the largest error.

    # gpt-tiny on 1 and 2 ranks, two minutes
    python benchmarks/prices/peaks.py
    # 12 blocks of 768, vocabulary 32,000, sequences of 256: ten minutes, 5 GiB
    python benchmarks/prices/peaks.py gpt-100m

Every row is a run under torchrun, as a user starts it; the measured peak is `peak_allocated_bytes`
of its run.json (docs/reference/run-file.md). Interleaved and zero-bubble schedules are priced by
bounds, all others action by action.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.plan import plan as plans
from parplan.planner.plan.plan import Plan
from parplan.planner.request import PlanRequest
from parplan.planner.runs import run_file as runs
from parplan.planner.search.estimate import UniformChoices, estimate_plan
from parplan.profiles.machines.machine_catalog import (
    load_cluster,
    load_stack,
    with_gpus,
)
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import ModelSpec, Precision, TrainingSpec
from parplan.profiles.units import MIB

ROOT = Path(__file__).resolve().parents[2]
STEPS = 3  # the second is counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run: its mesh, micro-batch and ZeRO stage."""

    pp: int = 1
    dp: int = 1
    tp: int = 1
    micro_batch_size: int = 1
    zero: int = 0
    virtual_stages: int = 1

    def plan(self, model: ModelSpec, global_batch_size: int, seq_length: int) -> Plan:
        mesh = Mesh(pp=self.pp, dp=self.dp, tp=self.tp)
        training = TrainingSpec(
            global_batch_size=global_batch_size,
            seq_length=seq_length,
            precision=Precision.FP32,
            stack=load_stack("parplan"),
        )
        layout = ParallelLayout(
            mesh=mesh,
            virtual_stages=self.virtual_stages,
            micro_batch_size=self.micro_batch_size,
            sequence_parallel=self.tp > 1,
            schedule=Schedule.INTERLEAVED if self.virtual_stages > 1 else Schedule.ONE_F_ONE_B,
            num_micro_batches=global_batch_size // self.dp // self.micro_batch_size,
        )
        cluster = with_gpus(load_cluster("cpu"), mesh.num_ranks, mesh.num_ranks)
        return estimate_plan(
            PlanRequest(model=model, cluster=cluster, training=training),
            layout,
            UniformChoices(zero=self.zero),
        )


def gpt_100m() -> ModelSpec:
    return replace(
        load_model("gpt-tiny").spec,
        name="gpt-100m",
        num_layers=12,
        hidden_size=768,
        num_heads=12,
        num_kv_heads=12,
        head_dim=64,
        ffn_hidden_size=3072,
        vocab_size=32_000,
        max_seq_length=1024,
        dropout=0.0,
    )


def cases(global_batch_size: int) -> Iterator[Case]:
    """Yield cases of one rank with one and several micro-batches, and two along every axis."""
    half = global_batch_size // 2
    yield from (Case(micro_batch_size=size) for size in (global_batch_size, global_batch_size // 4))
    yield from (Case(dp=2, micro_batch_size=half, zero=zero) for zero in range(4))
    yield Case(dp=2, micro_batch_size=half // 2, zero=3)
    yield Case(tp=2, micro_batch_size=global_batch_size)
    yield from (Case(pp=2, micro_batch_size=half, virtual_stages=stages) for stages in (1, 2))


def peaks(plan: Plan) -> list[tuple[float, float]]:
    """Return predicted and measured bytes of every rank of a run of `plan`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.yaml"
        plans.write_plan(plan, path)
        subprocess.run(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nproc-per-node",
                str(plan.mesh.num_ranks),
                "-m",
                "parplan.executor",
                str(path),
                "--steps",
                str(STEPS),
            ],
            cwd=ROOT,
            check=True,
            capture_output=True,
        )
        measured = [
            rank.peak_allocated_bytes for rank in runs.read_run(path.with_name("run.json")).ranks
        ]
    return [(peak.predicted or 0.0, peak.measured or 0.0) for peak in measured]


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "gpt-tiny"
    model, batch, seq_length = (
        (gpt_100m(), 4, 256) if name == "gpt-100m" else (load_model("gpt-tiny").spec, 16, 64)
    )
    print(
        f"{name}, {batch} x {seq_length} tokens, dropout {model.dropout:g}; MiB of "
        "the rank furthest off"
    )
    print(
        f"{'mesh':<22}{'ZeRO':>5}{'micro-batches':>15}{'predicted':>12}{'measured':>12}{'measured/predicted':>20}"
    )
    for case in cases(batch):
        plan = case.plan(model, batch, seq_length)
        predicted, measured = max(peaks(plan), key=lambda peak: abs(peak[1] / peak[0] - 1))
        stages = f", v {case.virtual_stages}" if case.virtual_stages > 1 else ""
        split = f"{plan.pipeline.num_micro_batches} of {case.micro_batch_size}"
        print(
            f"{f'{plan.mesh}{stages}':<22}{case.zero:>5}{split:>15}{predicted / MIB:>12.2f}"
            f"{measured / MIB:>12.2f}{measured / predicted:>20.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
