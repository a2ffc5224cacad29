"""Plans that a split backward cannot run: they are refused, and fail as the refusal says."""

from __future__ import annotations

import tempfile
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.pipelining import schedules as torch_schedules

from parplan.costmodels.schedules.schedule import Schedule
from parplan.executor.models.operators import Linear
from parplan.executor.pipeline.pipeline import build_pipeline
from parplan.executor.placed_layers import action_rows
from parplan.executor.rules.all_rules import validate
from parplan.executor.training.train import build_trainer
from parplan.profiles.errors import ConfigError
from tests.helpers.executor_plans import GPT, LLAMA, make_plan
from tests.helpers.executor_world import OPTIONS

ZBV = {"schedule": Schedule.ZBV, "virtual_stages": 2}
ZERO_3 = make_plan(LLAMA, pp=2, dp=2, zero=(3,), **ZBV)
ZERO_1 = make_plan(LLAMA, pp=2, dp=2, zero=(1,), **ZBV)
FULL = make_plan(LLAMA, pp=2, dp=2, recompute="full", **ZBV)
FULL_1F1B = make_plan(LLAMA, pp=2, dp=2, recompute="full")
STUCK = make_plan(
    GPT, pp=2, schedule=Schedule.CUSTOM, actions=("0F0,0B0,0F1,0B1", "1F0,1F1,1B0,1B1")
)

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"),
]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        pytest.param(
            ZERO_3,
            "splits the backward pass of a layer of zero 3: what is freed between",
            id="zero3",
        ),
        pytest.param(
            FULL,
            "recomputed in full: the layer would run again for every parameter",
            id="full-recompute",
        ),
        pytest.param(
            STUCK, "wait for each other for ever: rank 0 at 0B0, rank 1 at 1F1", id="deadlock"
        ),
        pytest.param(
            replace(
                ZERO_1, stages=tuple(replace(s, rank=k % 2) for k, s in enumerate(ZERO_1.stages))
            ),
            r"their ranks are \[0, 1, 0, 1\]",
            id="no-v",
        ),
    ],
)
def test_it_is_refused_before_any_process_starts(plan, message):
    with pytest.raises(ConfigError, match=message):
        validate(plan)


@pytest.mark.parametrize(
    "plan",
    [ZERO_1, FULL_1F1B, make_plan(LLAMA, pp=2, recompute=("norm1", "norm2", "activation"), **ZBV)],
)
def test_what_it_can_be_combined_with_is_accepted(plan):
    validate(plan)


def test_lists_that_wait_for_each_other_cannot_be_completed_by_torch_either():
    lists = {
        rank: [torch_schedules._Action.from_str(text) for text in row.split(",")]
        for rank, row in enumerate(action_rows(STUCK))
    }

    with pytest.raises(AssertionError, match="can't schedule sends/recvs"):
        torch_schedules._add_send_recv(lists, lambda stage: stage % 2, 2)


def _rank(rank: int, plans: list, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 4)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=4, timeout=timedelta(seconds=60)
    )
    torch.save([*map(_observed, plans), _spans(ZERO_1)], f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


def _observed(plan) -> tuple[list[str], Counter[str]]:
    """This rank's parameters without a gradient after a step, and its count of forward products."""
    calls: Counter[str] = Counter()
    trainer = build_trainer(plan, OPTIONS, torch.device("cpu"))
    for stage in trainer.pipeline.stages:
        for name, module in stage.body.named_modules():
            if isinstance(module, Linear) and "lm_head" not in name:
                module.register_forward_pre_hook(lambda *_: calls.update(["products"]))
    trainer.pipeline.step(trainer.batches(0))
    missing = [
        name
        for stage in trainer.pipeline.stages
        for name, p in stage.body.named_parameters()
        if p.grad is None
    ]
    return missing, calls


def _spans(plan) -> list[str]:
    """Spans of this rank's computation in a step, in order."""
    seen: list[str] = []

    def span(work: str, stage: int, micro_batch: int):
        if stage >= 0:
            seen.append(f"{stage}{work}{micro_batch}")
        return nullcontext()

    trainer = build_trainer(plan, OPTIONS, torch.device("cpu"))
    pipeline = build_pipeline(plan, trainer.ranks, seed=0, after_backward=lambda: None, span=span)
    pipeline.step(trainer.batches(0))
    return seen


@cache
def observed() -> list[list]:
    """By rank: `_observed` of four plans, run without the check, and `_spans` of one."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            _rank, args=([ZERO_3, ZERO_1, FULL, FULL_1F1B], folder), nprocs=4, start_method="fork"
        )
        return [
            torch.load(Path(folder) / f"rank{rank}.pt", weights_only=False) for rank in range(4)
        ]


@pytest.mark.slow
def test_zero_3_would_lose_gradients_and_zero_1_does_not():
    lost = [name for (missing, _), *_ in observed() for name in missing]

    assert any(name.startswith("block") for name in lost)
    assert [ranks[1][0] for ranks in observed()] == [[]] * 4


def test_full_recompute_would_run_every_layer_once_for_each_of_its_parameters():
    split = [ranks[2][1]["products"] for ranks in observed()]
    whole = [ranks[3][1]["products"] for ranks in observed()]

    assert all(
        calls == 2 * 2 * 4 * 2 for calls in whole
    )  # blocks, micro-batches, products, forward and recompute
    assert sum(split) > 3 * sum(whole)


def test_a_span_surrounds_every_computation_in_the_order_of_the_lists():
    lists = [[str(action) for action in row.split(",")] for row in action_rows(ZERO_1)]

    for rank, (*_, spans) in enumerate(observed()):
        assert (
            list(dict.fromkeys(spans)) == lists[rank // 2]
        )  # the loss is a second span of its forward
        assert len(spans) == len(lists[rank // 2]) + (2 if rank // 2 == 0 else 0)
