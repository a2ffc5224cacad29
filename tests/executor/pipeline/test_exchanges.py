"""Every rank posts its exchanges, and only these, as batched operations."""

from __future__ import annotations

import tempfile
from collections import Counter
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from parplan.costmodels.schedules.schedule import Schedule
from parplan.executor.rules.all_rules import nearest_legal
from parplan.executor.training.train import build_trainer
from parplan.planner.plan.plan import Plan
from tests.helpers.executor_plans import GPT, make_plan
from tests.helpers.executor_world import OPTIONS

pytestmark = pytest.mark.multiproc

P, M = 4, 6
KIN = {
    # exchanges with the next rank, by rank
    Schedule.ONE_F_ONE_B: [M - 3, M - 2, M - 1, 0],
    Schedule.EARLY_RECOMPUTE: [M - 3, M - 2, M - 1, 0],
    Schedule.LAST_NO_RECOMPUTE: [M - 3, M - 2, M - 2, 0],
    Schedule.SCP: [M - 3, M - 3, M - 3, 0],
    Schedule.GPIPE: [0, 0, 0, 0],
}


def plan_of(schedule: Schedule) -> Plan:
    made = make_plan(
        GPT,
        pp=P,
        num_micro_batches=M,
        global_batch_size=M,
        schedule=schedule,
        recompute="full",
    )
    legal = nearest_legal(made)
    assert legal is not None
    assert legal.pipeline == made.pipeline
    return legal


def _rank(rank: int, plans: list[Plan], folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", P)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=P, timeout=timedelta(seconds=60)
    )
    torch.save([_posted(plan) for plan in plans], f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


def _posted(plan: Plan) -> Counter[str]:
    """This rank's batched operations of a step: those of a send and a receive, and others."""
    posted: Counter[str] = Counter()
    batched = dist.batch_isend_irecv

    def batch(operations: list[dist.P2POp]) -> list[dist.Work]:
        kinds = sorted(operation.op.__name__ for operation in operations)
        posted["exchanges" if kinds == ["irecv", "isend"] else "others"] += 1
        return batched(operations)

    trainer = build_trainer(plan, OPTIONS, torch.device("cpu"))
    with patch.object(dist, "batch_isend_irecv", batch):
        trainer.pipeline.step(*trainer.batches(0))
    return posted


def test_each_rank_of_1f1b_and_its_kin_posts_its_exchanges_as_batched_operations():
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            _rank, args=(list(map(plan_of, KIN)), folder), nprocs=P, start_method="fork"
        )
        posted = [
            torch.load(Path(folder) / f"rank{rank}.pt", weights_only=False) for rank in range(P)
        ]

    for number, (schedule, with_next) in enumerate(KIN.items()):
        for rank, here in enumerate(with_next):
            before = with_next[rank - 1] if rank else 0
            counts = posted[rank][number]
            assert counts["exchanges"] == here + before, (schedule, rank)
            assert counts["others"] == 0
