"""The peak of a CPU run: torch's profiler, torch's MemTracker, and the prices."""

from __future__ import annotations

import gc
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed._tools.mem_tracker import MemTracker

from benchmarks.prices.peaks import Case
from parplan.executor.memory.host_copies import HostCopies
from parplan.executor.run_options import Options
from parplan.executor.training.train import build_trainer
from parplan.executor.watch.allocated import MarkedBytes, PeakBytes, _most, allocated_bytes
from parplan.executor.watch.run_recorder import collect
from parplan.planner.plan.plan import Plan
from parplan.profiles.models.model_catalog import load_model
from tests.helpers.cases import mostly_slow

CPU = torch.device("cpu")


def measured(plan: Plan) -> tuple[float, float, float]:
    """Peak bytes of a step of the first rank: predicted, measured, counted by MemTracker."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, args=(plan, folder), nprocs=1, start_method="fork")
        predicted, recorded, counted = json.loads((Path(folder) / "peaks").read_text())
    return predicted, recorded, counted


def _rank(rank: int, plan: Plan, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", 1), rank=rank, world_size=1
    )
    trainer = build_trainer(plan, Options(steps=3), CPU)
    for _ in trainer.run():
        pass
    run = collect(plan, trainer.recorder, trainer.state_bytes(), CPU)
    peak = run.ranks[0].peak_allocated_bytes
    tracker = MemTracker()
    tracker.track_external(*trainer.pipeline.stages, trainer.optimizer)
    with tracker:
        trainer.gradients(0)
    snapshot = tracker.get_tracker_snapshot("peak")[CPU]
    total = next(num_bytes for kind, num_bytes in snapshot.items() if str(kind).endswith("Total"))
    Path(folder, "peaks").write_text(json.dumps([peak.predicted, peak.measured, total]))
    dist.destroy_process_group()


@pytest.mark.multiproc
@pytest.mark.parametrize("dropout", mostly_slow([0.1, 0.0], {0.1}))
def test_the_peak_of_a_run_is_what_memtracker_counts_and_what_is_predicted(dropout):
    model = replace(load_model("gpt-tiny").spec, dropout=dropout)

    predicted, recorded, counted = measured(Case(micro_batch_size=16).plan(model, 16, 64))

    assert recorded == pytest.approx(counted, rel=0.01)
    assert predicted == pytest.approx(recorded, rel=0.01)


def test_what_was_there_before_and_the_most_of_a_step_count_together():
    before = torch.ones(1000)
    allocated, peak = allocated_bytes(gc.get_objects()), PeakBytes()

    with peak.counted():
        first = torch.ones(5000)
        second = first + 1
        del first
        third = second[:10].clone()
        del second, third

    assert peak.num_bytes == pytest.approx(
        allocated + 2 * 4 * 5000, abs=64
    )  # numbers that are added are tensors for a moment
    assert before.sum() == 1000


def test_inside_a_profile_of_ones_own_nothing_is_counted():
    peak = PeakBytes()

    with torch.autograd.profiler.profile(), peak.counted():
        torch.ones(10)

    assert peak.num_bytes is None


def test_blocks_that_another_thread_gave_back_are_left_out():
    assert (
        _most([(0, 1, 10), (1, 2, 5), (2, 1, -10), (3, 3, 100), (4, 2, -5), (5, 4, 7), (6, 4, -7)])
        == 15
    )


def test_memory_of_numpy_a_second_view_and_a_lazy_parameter_are_not_the_allocators():
    tensor, lazy = torch.zeros(8), torch.nn.LazyLinear(2).weight

    assert (
        allocated_bytes([tensor, tensor[:2], lazy, torch.from_numpy(np.zeros(1000)), "text"])
        == tensor.nbytes
    )


def test_marks_divide_a_step_and_copies_on_the_host_are_left_out():
    marked = MarkedBytes(lambda: 1000)

    with marked.counted():
        first = torch.empty(100)
        del first
        second = torch.empty(25)
        marked.mark()
        copy, _ = HostCopies(CPU).copy(second, to_host=True)
        del copy
        marked.mark()
        del second
        marked.mark()

    assert [(span.most, span.end) for span in marked.spans] == [
        (1400, 1100),
        (1100, 1100),
        (1100, 1000),
    ]
