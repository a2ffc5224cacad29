"""The cost of recording: one training step with and without spans, in turn, on one rank.

    # gpt-tiny on one CPU rank, half a minute
    python benchmarks/executor/recording.py

The spans are those of executor/watch/run_recorder.py. Prints the median step of both, their ratio,
and the time of one span by itself, in CPU seconds of this process: other processes do not count.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import ParallelLayout
from parplan.executor.run_options import Options
from parplan.executor.training.train import Trainer, build_trainer
from parplan.executor.watch.run_recorder import RunRecorder
from parplan.planner.plan.plan import Plan
from parplan.planner.request import PlanRequest
from parplan.planner.search.estimate import estimate_plan
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack, with_gpus
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import Precision, TrainingSpec

PAIRS = 100
SPANS = 20_000


def plan() -> Plan:
    """Return gpt-tiny in 16 micro-batches: many spans beside little work, the worst case."""
    training = TrainingSpec(
        global_batch_size=16,
        seq_length=64,
        precision=Precision.FP32,
        stack=load_stack("torchtitan"),
    )
    layout = ParallelLayout(
        mesh=Mesh(pp=1, dp=1, tp=1),
        schedule=Schedule.ONE_F_ONE_B,
        virtual_stages=1,
        micro_batch_size=1,
        num_micro_batches=16,
        sequence_parallel=False,
    )
    return estimate_plan(
        PlanRequest(
            model=load_model("gpt-tiny").spec,
            cluster=with_gpus(load_cluster("cpu"), 1),
            training=training,
        ),
        layout,
    )


def step_s(trainer: Trainer, *, record: bool) -> float:
    """CPU seconds of one step, recorded or not."""
    recorder = trainer.recorder
    recorder.first = 0 if record else sys.maxsize
    started = time.process_time()
    recorder.start()
    trainer.gradients(0).item()
    with recorder.span("optimizer", -1, -1):
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
    recorder.finish(0.0, 0.0)
    seconds = time.process_time() - started
    recorder.steps.clear()  # a run keeps five
    return seconds


def measured(trainer: Trainer, *, recorded_first: bool) -> tuple[float, float]:
    """CPU seconds of a step without and with recording.

    recorded_first  alternates between calls
    """
    seconds = {
        record: step_s(trainer, record=record) for record in (recorded_first, not recorded_first)
    }
    return seconds[False], seconds[True]


def span_s() -> float:
    """CPU seconds of one empty span."""
    recorder = RunRecorder(torch.device("cpu"), 1)
    recorder.start()
    started = time.process_time()
    for index in range(SPANS):
        with recorder.span("F", 0, index):
            pass
    return (time.process_time() - started) / SPANS


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    trainer = build_trainer(plan(), Options(steps=1), torch.device("cpu"))
    trainer.meter.active = False
    for _ in range(5):
        step_s(trainer, record=False)
    pairs = [measured(trainer, recorded_first=bool(turn % 2)) for turn in range(PAIRS)]
    off = statistics.median(plain for plain, _ in pairs)
    on = statistics.median(recorded for _, recorded in pairs)
    ratio = statistics.median(recorded / plain for plain, recorded in pairs)
    print(
        f"step without recording {1e3 * off:.2f} ms, with {1e3 * on:.2f} ms, median "
        f"ratio of {PAIRS} pairs {ratio:.4f}"
    )
    spans, one_s = 2 * plan().pipeline.num_micro_batches + 3, span_s()
    print(f"one span {1e6 * one_s:.1f} us, {spans} in a step: {one_s * spans / off:.2%} of it")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
