"""Records of a run: every action once, in the schedule's order, on clocks that agree."""

from __future__ import annotations

import tempfile
from datetime import timedelta
from itertools import groupby, pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from parplan.costmodels.schedules.schedule import Schedule, actions
from parplan.executor.run_options import Options
from parplan.executor.training.train import build_trainer
from parplan.executor.watch.run_recorder import Clock, RunRecorder, clock_offsets, collect
from parplan.planner.plan.plan import Plan
from parplan.planner.runs.run_file import RunFile, read_run, write_run
from tests.helpers.executor_plans import make_plan

CPU = torch.device("cpu")
STEPS = 6


def recorded(plan: Plan) -> tuple[RunFile, set[str]]:
    """Returns the run of `plan` in a new world, and names of profiler ranges.

    The names are those that torch's profiler saw on rank 0 in the last steps.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            _rank, args=(plan, folder), nprocs=plan.mesh.num_ranks, start_method="fork"
        )
        return read_run(Path(folder) / "run.json"), set(
            (Path(folder) / "ranges").read_text().split()
        )


def _rank(rank: int, plan: Plan, folder: str) -> None:
    torch.set_num_threads(1)
    world = plan.mesh.num_ranks
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    trainer = build_trainer(plan, Options(steps=STEPS), CPU)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in trainer.run():
            pass
    run = collect(plan, trainer.recorder, trainer.state_bytes(), CPU)
    assert (run is not None) == (rank == 0)
    if run is not None:
        write_run(run, Path(folder) / "run.json")
        Path(folder, "ranges").write_text(
            " ".join({event.name for event in profile.events() if " " not in event.name})
        )
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({}, id="loop"),
        pytest.param({"pp": 2}, id="1f1b"),
        pytest.param(
            {"pp": 2, "schedule": Schedule.INTERLEAVED, "virtual_stages": 2}, id="interleaved"
        ),
        pytest.param({"pp": 2, "schedule": Schedule.SCP}, id="scp"),
    ],
)
def test_every_action_is_a_span_in_the_order_of_the_schedule(layout):
    plan = make_plan(num_micro_batches=4, **layout)

    run, ranges = recorded(plan)

    pipeline, pp = plan.pipeline, plan.mesh.pp
    for rank in run.ranks:
        expected = actions(
            pipeline.schedule, rank.pp, pp, pipeline.num_micro_batches, pipeline.virtual_stages
        )
        spans = sorted(rank.spans, key=lambda span: span.start_s)
        assert [name for name, _ in groupby(span.name for span in spans if span.work in "FRB")] == [
            f"{action.work}{action.chunk * pp + rank.pp}.{action.micro_batch}"
            for action in expected
        ]
        assert spans[0].work == "data"
        assert spans[-1].work == "optimizer"
        assert all(first.end_s <= then.start_s for first, then in pairwise(spans))
        assert 0.0 <= spans[0].start_s < spans[-1].end_s < 2 * run.steps.most_s
    assert {"F0.0", "F0.3", "B0.3", "optimizer"} <= ranges
    _whole(run, plan)


def _whole(run: RunFile, plan: Plan) -> None:
    """Requires the contents that every run file has."""
    assert run.the_plan() == plan
    assert (run.recorded_steps, len(run.steps.seconds), run.steps.warm_up) == (STEPS - 2, STEPS, 2)
    assert run.steps.loss[-1] < run.steps.loss[0] + 0.5
    assert [rank.rank for rank in run.ranks] == list(range(plan.mesh.num_ranks))
    assert all(
        rank.gradients_bytes.predicted == rank.gradients_bytes.measured > 0 for rank in run.ranks
    )
    assert all(
        rank.host_rss_bytes > 10**7 and rank.peak_allocated_bytes.measured is None
        for rank in run.ranks
    )
    measured = {(part.work, part.stage) for part in run.parts if part.measured_s is not None}
    assert {(work, stage) for work in "FB" for stage in range(len(plan.stages))} <= measured
    if plan.mesh.pp > 1:
        assert {("receive_F", 1), ("receive_B", 0), ("tied", 0)} <= measured
    assert run.clock_error_s == 0.0  # one machine, one clock
    assert run.figures.tokens_per_s.measured == pytest.approx(
        plan.training.tokens_per_step / run.steps.median_s
    )


def test_only_the_last_steps_are_recorded():
    recorder = RunRecorder(CPU, 10)
    for step in range(10):
        recorder.start()
        with recorder.span("F", 0, step):
            pass
        recorder.finish(1.0, 2.0)

    assert [step.spans[0].micro_batch for step in recorder.steps] == [5, 6, 7, 8, 9]
    assert len(recorder.seconds) == 10


@pytest.mark.parametrize(("num_steps", "expected"), [(0, 0), (1, 1), (2, 1), (3, 1), (4, 2)])
def test_the_first_steps_are_recorded_only_where_there_are_no_others(num_steps, expected):
    recorder = RunRecorder(CPU, num_steps)
    for _ in range(max(1, num_steps)):
        recorder.start()
        with recorder.span("data", -1, -1):
            pass
        recorder.finish(1.0, 2.0)

    assert len(recorder.steps) == expected


def test_clocks_of_other_machines_are_set_by_the_barriers_that_all_left():
    here = Clock("a", (1.0, 2.0, 3.0))

    offsets, error_s = clock_offsets(
        [here, Clock("a", (1.5, 2.5, 3.5)), Clock("b", (101.0, 102.002, 103.004))]
    )

    assert offsets == [0.0, 0.0, pytest.approx(100.002)]
    assert error_s == pytest.approx(0.002)


def test_machines_without_a_name_do_not_share_a_clock():
    assert clock_offsets([Clock("", (1.0,)), Clock("", (5.0,))]) == ([0.0, 4.0], 0.0)
