"""A plan that two gloo processes ran under torch.profiler: its traces price its step."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.profiler import ProfilerActivity, profile, schedule

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import ParallelLayout
from parplan.executor.run_options import Options
from parplan.executor.training.train import build_trainer
from parplan.planner.calibration.run_factors import calibrate
from parplan.planner.calibration.trace_measured import measured_by_traces
from parplan.planner.plan.derived import layout_of
from parplan.planner.plan.plan import Plan
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack, with_gpus
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import Precision, TrainingSpec
from parplan.profiles.traces.trace_files import read_traces
from tests.helpers.planning import estimate_plan

WARM_UP = 2
RECORDED = 3


def tiny(*, dp: int, tp: int) -> Plan:
    training = TrainingSpec(
        global_batch_size=4 * dp,
        seq_length=64,
        precision=Precision.FP32,
        stack=load_stack("parplan"),
    )
    layout = ParallelLayout(
        mesh=Mesh(pp=1, dp=dp, tp=tp),
        schedule=Schedule.ONE_F_ONE_B,
        virtual_stages=1,
        micro_batch_size=2,
        num_micro_batches=2,
        sequence_parallel=False,
    )
    cluster = with_gpus(load_cluster("cpu"), 2)
    return estimate_plan(load_model("gpt-tiny").spec, cluster, training, layout)


def train(rank: int, plan: Plan, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    options = Options(steps=WARM_UP + RECORDED, record=False)
    trainer = build_trainer(plan, options, torch.device("cpu"))
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=WARM_UP, active=RECORDED, repeat=1),
        on_trace_ready=lambda each: each.export_chrome_trace(str(folder / f"rank{rank}.json")),
    ) as profiler:
        for step in range(options.steps):
            trainer.gradients(step)
            trainer.update(step)
            profiler.step()
    dist.destroy_process_group()
    sys.exit(0)


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("mesh", "cause"), [({"dp": 2, "tp": 1}, "data"), ({"dp": 1, "tp": 2}, "tensor")]
)
def test_traces_of_two_gloo_ranks_price_their_step(tmp_path, mesh, cause):
    plan = tiny(**mesh)
    mp.start_processes(train, args=(plan, tmp_path), nprocs=2, start_method="spawn")

    traces = read_traces([tmp_path])
    measured = measured_by_traces(traces, plan)
    profile_of_run = calibrate([measured.run])

    assert [(trace.rank, trace.world_size, len(trace.steps)) for trace in traces] == [
        (0, 2, RECORDED),
        (1, 2, RECORDED),
    ]
    for account in measured.accounts:
        assert sum(account.by_cause.values()) == pytest.approx(account.step_s)
        assert {"forward", "backward", "optimizer", cause} <= set(account.by_cause)
    factors = profile_of_run.calibration
    assert all(
        factors.factor(each).measured for each in ("forward", "backward", "optimizer", cause)
    )
    run = profile_of_run.runs[0]
    assert run.calibrated_s == pytest.approx(run.measured_s, rel=0.02)
    there = replace(plan.cluster, calibration=factors)
    again = estimate_plan(plan.model, there, plan.training, layout_of(plan))
    assert again.predicted.step_time_s.value == pytest.approx(run.calibrated_s, rel=1e-5)
