"""Step times of the levels of sub-pipelined tensor parallelism on CPUs, as ratios to level 0.

    # gpt-tiny and two blocks of gpt-100m on 2 gloo ranks of a core each
    python -m benchmarks.executor.overlap

gloo sums on the cores that compute, so no level can gain here. The ratios are the price of halves,
smaller products and twice as many calls, which the overlap has to earn back. All levels hold the
same model, take the same micro-batches and step in turn, in a rotating order, in the same
processes; a ratio is the median over the rounds.
"""

from __future__ import annotations

import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.prices.activations import GPT_100M
from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import TP_OVERLAP_LEVELS, ParallelLayout
from parplan.executor.run_options import Options
from parplan.executor.training.train import StepResult, build_trainer
from parplan.planner.plan.plan import Plan
from parplan.planner.request import PlanRequest
from parplan.planner.search.estimate import UniformChoices, estimate_plan
from parplan.profiles.machines.machine_catalog import (
    load_cluster,
    load_stack,
    with_gpus,
)
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import ModelSpec, TrainingSpec

WARM_UP, ROUNDS = 2, 10
MODELS = {
    "gpt-tiny": (load_model("gpt-tiny").spec, 128),
    "2 blocks of gpt-100m": (replace(GPT_100M, num_layers=2), 256),
}


def plan_of(model: ModelSpec, seq_length: int, level: int) -> Plan:
    """Return a plan of 2 micro-batches of 4 sequences at tp 2."""
    mesh, stack = Mesh(pp=1, dp=1, tp=2), load_stack("parplan")
    training = TrainingSpec(
        global_batch_size=8,
        seq_length=seq_length,
        precision="fp32",
        stack=stack,
        attention=stack.attention,
    )
    layout = ParallelLayout(
        mesh=mesh,
        schedule=Schedule.ONE_F_ONE_B,
        virtual_stages=1,
        micro_batch_size=4,
        num_micro_batches=2,
        sequence_parallel=False,
        tp_overlap=level,
    )
    return estimate_plan(
        PlanRequest(model=model, cluster=with_gpus(load_cluster("cpu"), 2, 2), training=training),
        layout,
        UniformChoices(zero=0),
    )


def measure(plans: list[Plan]) -> list[list[float]]:
    """Return the seconds of the steps of every plan, round by round."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, args=(plans, folder), nprocs=2, start_method="fork")
        return json.loads((Path(folder) / "times").read_text())


def _rank(rank: int, plans: list[Plan], folder: str) -> None:
    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.ERROR)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=600)
    )
    options = Options(steps=WARM_UP + ROUNDS, seed=0, learning_rate=1e-4)
    runs = [build_trainer(plan, options, torch.device("cpu")).run() for plan in plans]
    times: list[list[float]] = [[] for _ in plans]
    for number in range(WARM_UP + ROUNDS):
        for turn in range(len(plans)):
            which = (turn + number) % len(plans)
            seconds = _timed(runs[which])
            if number >= WARM_UP:
                times[which].append(seconds)
    if rank == 0:
        (Path(folder) / "times").write_text(json.dumps(times))
    dist.destroy_process_group()


def _timed(steps: Iterator[StepResult]) -> float:
    dist.barrier()
    started = time.perf_counter()
    next(steps)
    dist.barrier()
    return time.perf_counter() - started


def main() -> None:
    print(
        f"{'model':<22}{'level 0':>10}"
        + "".join(f"{f'level {level}':>20}" for level in TP_OVERLAP_LEVELS[1:])
        + f"   seconds a step, and ratios to level 0 (quartiles): medians of {ROUNDS}"
    )
    for name, (model, seq_length) in MODELS.items():
        base, *levels = measure([plan_of(model, seq_length, level) for level in TP_OVERLAP_LEVELS])
        cells = []
        for times in levels:
            low, middle, high = statistics.quantiles(
                (a / b for a, b in zip(times, base, strict=True)), n=4
            )
            cells.append(f"{middle:.2f} ({low:.2f}-{high:.2f})")
        print(
            f"{name:<22}{statistics.median(base):>10.3f}"
            + "".join(f"{cell:>20}" for cell in cells),
            flush=True,
        )


if __name__ == "__main__":
    main()
