"""Two halves of a micro-batch train like one.

The computation under each all-reduce is the one that the price of the level assumes.
"""

from __future__ import annotations

import dataclasses
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils._python_dispatch import TorchDispatchMode

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.sub_pipeline import HalfTime, block_s, linear_s, row_s
from parplan.costmodels.schedules.schedule import Schedule
from parplan.executor.checking.shrunk_plan import shrunk
from parplan.executor.rules.all_rules import nearest_legal, refusals, validate
from parplan.executor.tensors import begin_fork
from parplan.executor.training.train import build_trainer
from parplan.planner.plan.plan import Plan
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.spec import Positions, Precision
from tests.helpers.executor_plans import GPT, LLAMA, MIXTRAL, make_plan
from tests.helpers.executor_world import (
    GRADIENT_TOLERANCE,
    OPTIONS,
    Worlds,
    require_parity,
    run_plans,
    run_reference,
    worst_gradient,
)

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"),
]

SHORT = dataclasses.replace(GPT, num_layers=2)
SHORT_LLAMA = dataclasses.replace(LLAMA, num_layers=2)
NEOX = dataclasses.replace(
    SHORT,
    name="tiny-neox",
    positions=Positions.ROTARY,
    rotary_fraction=0.25,
    parallel_residual=True,
    tied_embeddings=False,
)
DROPOUT = dataclasses.replace(SHORT, dropout=0.25)
LIST = ("norm1", "attention", "attention_out", "residual1", "norm2", "fc1", "activation")
FOUR: dict[str, Any] = {"tp": 2, "num_micro_batches": 4, "global_batch_size": 16}
SCHEDULES = {
    "interleaved": {"schedule": Schedule.INTERLEAVED, "virtual_stages": 2},
    "zbv": {"schedule": Schedule.ZBV, "virtual_stages": 2},
    "gpipe": {"schedule": Schedule.GPIPE},
    "early": {"schedule": Schedule.EARLY_RECOMPUTE, "recompute": "full"},
}


def overlapped(plan: Plan, level: int) -> Plan:
    return dataclasses.replace(plan, pipeline=dataclasses.replace(plan.pipeline, tp_overlap=level))


def levels(name: str, plan: Plan) -> dict[str, Plan]:
    return {f"{name}-level-{level}": overlapped(plan, level) for level in (1, 2, 3)}


GPT_LEVELS, LLAMA_LEVELS = (
    levels("gpt", make_plan(SHORT, tp=2)),
    levels("llama", make_plan(SHORT_LLAMA, tp=2)),
)
PLANS = {
    **{name: GPT_LEVELS[name] for name in ("gpt-level-1", "gpt-level-3")},
    "llama-level-2": LLAMA_LEVELS["llama-level-2"],
    "neox-level-3": overlapped(make_plan(NEOX, tp=2), 3),
    "gpt-level-2-a-list": overlapped(make_plan(SHORT, tp=2, recompute=LIST), 2),
    "llama-level-3-full-recompute": overlapped(make_plan(SHORT_LLAMA, tp=2, recompute="full"), 3),
}
SLOW = {
    **{name: plan for name, plan in (GPT_LEVELS | LLAMA_LEVELS).items() if name not in PLANS},
    **levels("dp2-gpt-zero-mixed", make_plan(GPT, dp=2, zero=(0, 1, 2, 3), **FOUR)),
    **levels(
        "dp2-llama-zero3-full-recompute",
        make_plan(LLAMA, dp=2, zero=(3,), recompute="full", **FOUR),
    ),
    **levels("dp2-bf16-zero2", make_plan(SHORT, dp=2, zero=(2,), precision=Precision.BF16, **FOUR)),
    **levels("pp2-gpt-tied", make_plan(GPT, pp=2, **FOUR)),
    **{
        f"pp2-llama-{name}": overlapped(make_plan(LLAMA, pp=2, **FOUR, **how), 3)
        for name, how in SCHEDULES.items()
    },
}


WORLDS = Worlds(PLANS | SLOW, SLOW)


def alone(plan: Plan) -> Plan:
    return overlapped(dataclasses.replace(plan, mesh=Mesh(pp=1, dp=1, tp=1)), 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", WORLDS.params())
def test_halves_train_like_one_process(name):
    plan = WORLDS.plans[name]
    validate(plan)
    training_outcome, expected = WORLDS.outcome(name), run_reference(alone(plan))

    require_parity(plan, training_outcome, expected)
    assert all(predicted == measured for predicted, measured in training_outcome.states.values())


class Order(TorchDispatchMode):
    """Products and attentions issued from begin to wait of each all-reduce, by pass.

    The all-reduces are those of halves of `elements`.
    """

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements = elements
        self.found: dict[str, list[int]] = {"forward": [], "backward": []}
        self._under_way: dict[int, tuple[str, int]] = {}
        self._products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if name in ("mm", "addmm", "bmm") or "attention" in name:
            self._products += 1
        elif func.namespace == "_c10d_functional" and args[0].numel() == self.elements:
            storage = (out if name == "all_reduce" else args[0]).untyped_storage()._cdata
            if name == "all_reduce":
                which = "forward" if torch._C._current_graph_task_id() < 0 else "backward"
                self._under_way[storage] = which, len(self.found[which])
                self.found[which].append(-self._products)
            elif storage in self._under_way:  # one that runs again has been waited for
                which, index = self._under_way.pop(storage)
                self.found[which][index] += self._products
        return out


def _ordered(rank: int, plans: list[Plan], folder: str) -> None:
    begin_fork()
    torch.set_num_threads(1)
    world = plans[0].mesh.num_ranks
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", world), rank=rank, world_size=world
    )
    actual = []
    for plan in plans:
        trainer = build_trainer(plan, OPTIONS, torch.device("cpu"))
        half = 1 if plan.pipeline.tp_overlap == 0 else 2
        order = Order(
            plan.pipeline.micro_batch_size
            * plan.training.seq_length
            * plan.model.hidden_size
            // half
        )
        with order:
            trainer.gradients(0)
        actual.append((order.found, torch._C._distributed_c10d._get_work_registry_size()))
    torch.save(actual, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


Found = tuple[dict[str, list[int]], int]


def ordered(plans: list[Plan]) -> list[Found]:
    """Operations that rank 0 of every plan issued, and the number of transfers never waited for."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            _ordered, args=(plans, folder), nprocs=plans[0].mesh.num_ranks, start_method="fork"
        )
        return torch.load(Path(folder) / "rank0.pt")


BLOCKS = 2
ONE_BATCH = make_plan(SHORT, tp=2, num_micro_batches=1)
# products and attentions under the all-reduces of two blocks, in the order of their begin:
# attention has 3 forward and 5 backward, of which the projections have 1 and 2 each, the
# feed-forward network 2 and 4
UNDER = {
    1: {"forward": [1, 0, 1, 0] * 2, "backward": [2, 0, 2, 0] * 2},
    2: {"forward": [3, 2, 2, 0] * 2, "backward": [4, 5, 5, 0] * 2},
    3: {"forward": [3, 2, 2, 3, 3, 2, 2, 0], "backward": [4, 5, 5, 4, 4, 5, 5, 0]},
}


@cache
def orders() -> dict[str, Found]:
    plans = {f"level-{level}": overlapped(ONE_BATCH, level) for level in range(4)}
    plans["again"] = overlapped(make_plan(SHORT, tp=2, num_micro_batches=1, recompute="full"), 3)
    return dict(zip(plans, ordered(list(plans.values())), strict=True))


@pytest.mark.parametrize("level", [1, 2, 3])
def test_each_all_reduce_is_waited_for_when_what_hides_it_has_been_issued(level):
    assert orders()[f"level-{level}"][0] == UNDER[level]


def test_without_halves_every_all_reduce_is_waited_for_at_once():
    actual = orders()["level-0"][0]

    assert actual == {
        which: [0] * (2 * BLOCKS + 1) for which in ("forward", "backward")
    }  # one of the embedding, or the head


@pytest.mark.parametrize("level", [1, 2, 3])
def test_as_many_all_reduces_are_exposed_as_the_price_says(level):
    compute_s, sent_s = 10.0, 1.0
    parts = [HalfTime(compute_s, sent_s)] * 2
    priced_s = {
        1: 2 * BLOCKS * (linear_s(compute_s, sent_s) - 2 * compute_s),
        2: BLOCKS * (block_s(parts) - 4 * compute_s),
        3: row_s(parts, BLOCKS) - BLOCKS * 4 * compute_s,
    }

    for under in orders()[f"level-{level}"][0].values():
        assert under.count(0) * sent_s == priced_s[level]


def test_a_recomputation_that_ends_early_leaves_no_transfer_behind():
    actual, left = orders()["again"]

    # forward, and again in the backward pass up to the first half of the feed-forward network
    assert (len(actual["forward"]), len(actual["backward"])) == (4 * BLOCKS, 7 * BLOCKS)
    assert left == 0


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 3])
def test_sharding_leaves_the_order_as_it_is(zero):
    plan = make_plan(SHORT, dp=2, tp=2, zero=(zero,), num_micro_batches=1, global_batch_size=16)

    ((actual, _),) = ordered([overlapped(plan, 3)])

    assert actual == UNDER[3]


@pytest.mark.slow
def test_ranks_that_drop_out_draw_one_mask_and_draw_it_again():
    plans = [
        overlapped(make_plan(DROPOUT, tp=2, recompute=recompute), 2) for recompute in ("full", ())
    ]

    repeated, kept = run_plans(plans)  # which also compares the ranks

    assert worst_gradient(repeated, kept)[0] <= GRADIENT_TOLERANCE


TP2 = make_plan(SHORT, tp=2)
HOST = make_plan(SHORT, tp=2, recompute="full")
HOST = dataclasses.replace(
    HOST,
    layer_plans={
        name: dataclasses.replace(layer_plan, keep_on_host=layer_plan.recompute)
        for name, layer_plan in HOST.layer_plans.items()
    },
)


@pytest.mark.parametrize(
    ("plan", "message", "lower"),
    [
        pytest.param(
            overlapped(make_plan(SHORT, dp=2), 1), "tp_overlap 1 with tp 1", 0, id="one-rank"
        ),
        pytest.param(
            overlapped(make_plan(MIXTRAL, tp=2, sp=True), 2),
            "a mixture of experts",
            0,
            id="experts",
        ),
        pytest.param(
            overlapped(make_plan(SHORT, tp=2, global_batch_size=6), 2),
            "micro-batches of 3",
            0,
            id="odd",
        ),
        pytest.param(
            overlapped(make_plan(SHORT, tp=2, sp=True), 3),
            "divided otherwise, by sequence",
            0,
            id="sequence-parallel",
        ),
        pytest.param(
            overlapped(make_plan(DROPOUT, tp=2, recompute="full"), 3),
            "which would draw no mask",
            2,
            id="dropout-again",
        ),
        pytest.param(
            overlapped(HOST, 3), "half of whose input would stay", 2, id="recomputed-on-the-host"
        ),
    ],
)
def test_plans_without_two_halves_are_refused(plan, message, lower):
    with pytest.raises(ConfigError, match=message) as refused:
        validate(plan)

    assert refused.value.hint == f"set tp_overlap to {lower}"
    assert [rule.name for rule, _ in refusals(plan)] == ["halves"]
    nearest = nearest_legal(plan)
    assert nearest == overlapped(plan, lower)


def test_what_comes_close_to_a_refusal_is_accepted():
    for plan in (make_plan(DROPOUT, tp=2, recompute=("norm1",)), HOST):
        validate(overlapped(plan, 2))


def test_the_small_plan_of_a_check_has_blocks_that_overlap_with_the_next():
    plan = overlapped(make_plan(GPT, pp=2, **FOUR), 3)

    small = shrunk(plan)

    assert small.pipeline.tp_overlap == 3
    assert [stage.end - stage.first for stage in small.stages] == [3, 3]
    validate(small)
