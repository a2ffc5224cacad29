"""The plan of the memory objective and Megatron's plan on 8 gloo ranks: losses and bytes.

    # gpt-tiny, seconds
    python -m benchmarks.executor.executed
    # GPT-2's 12 blocks of 768 on sequences of 128, some minutes
    python -m benchmarks.executor.executed gpt-100m

Losses must be equal, and measured bytes are compared with predicted ones. There is no pipeline:
MemTracker sees one micro-batch at a time. Megatron's plan is tensor x data parallelism with its
default flags (replicated optimizer, no sequence parallelism, no recompute). States by class are the
bytes that ranks hold after a step; the peak is MemTracker's over a whole step, on the fullest rank.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed._tools.mem_tracker import MemTracker

from benchmarks.prices.activations import GPT_100M, gpt_tiny
from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import ParallelLayout
from parplan.executor.rules.all_rules import validate
from parplan.executor.run_options import Options
from parplan.executor.training.train import build_trainer
from parplan.executor.watch.state_bytes import Meter
from parplan.planner.objective import Objective
from parplan.planner.plan.plan import Plan
from parplan.planner.request import Constraints, PlanRequest, SearchOptions
from parplan.planner.search.estimate import estimate_plan
from parplan.planner.search.find_plan import find_plan
from parplan.profiles.machines.machine_catalog import (
    load_cluster,
    load_stack,
    with_gpus,
)
from parplan.profiles.models.spec import ModelSpec, TrainingSpec
from parplan.profiles.units import GIB, MIB

WORLD, STEPS = 8, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A rank's measurements: losses, predicted and measured state bytes, and the peak of a step."""

    losses: list[float]
    predicted: list[int]
    states: list[int]
    peak: int


def plans(model: ModelSpec, seq_length: int, tp: int) -> dict[str, Plan]:
    """Return our plan and Megatron's on the same ranks and batch.

    Ours is the least redundant at any slowdown.
    """
    stack = load_stack("torchtitan")
    training = TrainingSpec(
        global_batch_size=16,
        seq_length=seq_length,
        precision="fp32",
        stack=stack,
        attention=stack.attention,
    )
    cluster = with_gpus(load_cluster("cpu"), WORLD, WORLD)
    layout = ParallelLayout(
        mesh=Mesh(pp=1, dp=WORLD // tp, tp=tp),
        schedule=Schedule.ONE_F_ONE_B,
        virtual_stages=1,
        micro_batch_size=2,
        num_micro_batches=16 // 2 // (WORLD // tp),
        sequence_parallel=False,
    )
    by_name = {
        "megatron": estimate_plan(
            PlanRequest(model=model, cluster=cluster, training=training), layout
        )
    }
    for label, degrees in (("memory", None), ("memory at tp 2", (2,))):
        pins = Constraints(pp=(1,), micro_batch_size=(2,), tp=degrees)
        options = SearchOptions(max_slowdown=9.0)
        by_name[label] = find_plan(
            PlanRequest(
                model=model,
                cluster=cluster,
                training=training,
                objective=Objective.MEMORY,
                constraints=pins,
                options=options,
            )
        )
    return by_name


def run(plan: Plan) -> list[Run]:
    """Return the measurements of every rank, in a world of its own."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, args=(plan, folder), nprocs=WORLD, start_method="fork")
        return [
            Run(**json.loads((Path(folder) / f"rank{rank}").read_text())) for rank in range(WORLD)
        ]


def _rank(rank: int, plan: Plan, folder: str) -> None:
    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.ERROR)
    store = dist.FileStore(f"{folder}/store", WORLD)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=600)
    )
    tracker = MemTracker()
    sample = Meter.sample

    def after_backward(meter: Meter) -> None:
        sample(meter)
        tracker.reset_mod_stats()  # it would take a second micro-batch for a loop in the model

    Meter.sample = after_backward  # type: ignore[method-assign]
    trainer = build_trainer(
        plan, Options(steps=STEPS, seed=7, learning_rate=1e-3), torch.device("cpu")
    )
    losses = [result.loss for result in trainer.run()]
    _, predicted, measured = trainer.state_bytes()
    tracker.track_external(*trainer.pipeline.stages, trainer.optimizer)
    with tracker:
        trainer.gradients(0)
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    total = next(
        n_bytes for kind, n_bytes in peak.items() if str(kind).endswith("Total") or kind == "Total"
    )
    (Path(folder) / f"rank{rank}").write_text(
        json.dumps(
            {
                "losses": losses,
                "predicted": [predicted.parameters, predicted.gradients, predicted.optimizer],
                "states": [measured.parameters, measured.gradients, measured.optimizer],
                "peak": total,
            }
        )
    )
    dist.destroy_process_group()


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "gpt-tiny"
    model, seq_length, tp = (GPT_100M, 128, 4) if name == "gpt-100m" else (gpt_tiny(), 64, 4)
    first: list[float] = []
    for label, plan in plans(replace(model, dropout=0.0), seq_length, tp).items():
        validate(plan)
        ranks = run(plan)
        worst = max(ranks, key=lambda rank: rank.peak)
        first = first or worst.losses
        predicted = max(m.total - m.reserve for m in plan.predicted.memory_gib) * GIB
        exact = all(rank.predicted == rank.states for rank in ranks)
        apart = max(
            abs(a / b - 1) for rank in ranks for a, b in zip(rank.losses, first, strict=True)
        )
        zeros = sorted({layer.zero for layer in plan.layer_plans.values()})
        print(
            f"{name} {label}: {plan.mesh}, ZeRO {zeros}, recompute "
            f"{sorted({p.recompute for p in plan.layer_plans.values()})}"
        )
        print(
            f"  losses {' '.join(f'{loss:.6f}' for loss in worst.losses)}, at most "
            f"{apart:.1e} from Megatron's"
        )
        states = " ".join(f"{b / MIB:.2f}" for b in worst.states)
        print(
            f"  states of the fullest rank, MiB: {states}; "
            f"{'equal to predicted on all 8 ranks' if exact else 'NOT as predicted'}"
        )
        redundant_mib = plan.predicted.redundancy_gib.total * 1024
        print(
            f"  peak of a step: measured {worst.peak / MIB:.1f} MiB, "
            f"predicted {predicted / MIB:.1f}; "
            f"redundant over all ranks, predicted {redundant_mib:.1f} MiB",
            flush=True,
        )


if __name__ == "__main__":
    main()
