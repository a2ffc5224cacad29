"""Every rank posts its exchanges, and only these, as batched operations."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from parplan.costmodels.schedules.instructions import Exchange
from parplan.costmodels.schedules.schedule import Schedule, in_flight
from parplan.executor.pipeline.runtime import most_in_flight
from parplan.executor.placed_layers import plan_instructions
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
    Schedule.ZBV: None,  # those that its lists happen to have
}
DEEP = replace(GPT, num_layers=8)


def plan_of(schedule: Schedule) -> Plan:
    made = make_plan(
        DEEP if schedule is Schedule.ZBV else GPT,
        pp=P,
        virtual_stages=2 if schedule is Schedule.ZBV else 1,
        num_micro_batches=M,
        global_batch_size=M,
        schedule=schedule,
        recompute="none" if schedule is Schedule.ZBV else "full",
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


def _posted(plan: Plan) -> tuple[Counter[str], int]:
    """This rank's batched operations of a step by kind, and the most micro-batches that it held.

    The kinds are exchanges, of a send and a receive, and others.
    """
    posted: Counter[str] = Counter()
    batched = dist.batch_isend_irecv

    def batch(operations: list[dist.P2POp]) -> list[dist.Work]:
        kinds = sorted(operation.op.__name__ for operation in operations)
        posted["exchanges" if kinds == ["irecv", "isend"] else "others"] += 1
        return batched(operations)

    trainer = build_trainer(plan, OPTIONS, torch.device("cpu"))
    with patch.object(dist, "batch_isend_irecv", batch):
        trainer.pipeline.step(trainer.batches(0))
    held = most_in_flight(trainer.pipeline.steps)
    assert held is not None
    return posted, held


def test_each_rank_posts_its_exchanges_as_batched_operations_and_holds_what_its_list_says():
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            _rank, args=(list(map(plan_of, KIN)), folder), nprocs=P, start_method="fork"
        )
        posted = [
            torch.load(Path(folder) / f"rank{rank}.pt", weights_only=False) for rank in range(P)
        ]

    for number, (schedule, with_next) in enumerate(KIN.items()):
        lists = plan_instructions(plan_of(schedule))
        for rank in range(P):
            counts, held = posted[rank][number]
            listed = sum(isinstance(each, Exchange) for each in lists[rank])
            assert counts["exchanges"] == listed, (schedule, rank)
            if with_next is not None:
                assert listed == with_next[rank] + (with_next[rank - 1] if rank else 0)
            assert counts["others"] == 0
            virtual_stages = 2 if schedule is Schedule.ZBV else 1
            assert held == in_flight(schedule, rank, P, M, virtual_stages), (schedule, rank)
