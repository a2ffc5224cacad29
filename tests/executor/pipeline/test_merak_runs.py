"""Merak's schedules train like 1F1B and hold as many micro-batches as their lists say.

The schedules are early recompute, last-no-recompute and the shifted critical path. They recompute
while the gradient is still being made.
"""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from parplan.costmodels.schedules.actions import ActionKind, parse_row
from parplan.costmodels.schedules.schedule import Schedule
from parplan.executor.models.operators import Linear
from parplan.executor.placed_layers import action_rows
from parplan.executor.rules.all_rules import nearest_legal, validate
from parplan.executor.training.compiled import validate_compiled
from parplan.executor.training.train import Trainer, build_trainer
from parplan.planner.plan.derived import blocks_of
from parplan.planner.plan.plan import Plan
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.operator_graph import LayerKind
from tests.helpers.cases import mostly_slow
from tests.helpers.executor_plans import GPT, LLAMA, make_plan
from tests.helpers.executor_world import (
    GRADIENT_TOLERANCE,
    OPTIONS,
    gradient_error,
    run_reference,
    whole_gradients,
)

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"),
]

DROPOUT = dataclasses.replace(GPT, dropout=0.25)
LIST = ("norm1", "qkv", "attention", "norm2", "fc1", "activation")
EARLY = Schedule.EARLY_RECOMPUTE
LAST = Schedule.LAST_NO_RECOMPUTE
SCP = Schedule.SCP


def plan_of(
    model=GPT,
    *,
    schedule: Schedule,
    pp: int,
    micro_batches: int = 4,
    on_host: tuple[str, ...] = (),
    **settings,
) -> Plan:
    """A plan whose last stage recomputes nothing where the schedule says so."""
    plan = make_plan(model, schedule=schedule, pp=pp, num_micro_batches=micro_batches, **settings)
    plans = {
        name: dataclasses.replace(
            layer_plan, keep_on_host=on_host if layer_plan.layer is LayerKind.BLOCK else ()
        )
        for name, layer_plan in plan.layer_plans.items()
    }
    legal_layouts = nearest_legal(dataclasses.replace(plan, layer_plans=plans))
    assert legal_layouts is not None
    assert legal_layouts.pipeline == plan.pipeline
    validate(legal_layouts)
    return legal_layouts


PLANS = {
    "early-zero2-a-list": plan_of(GPT, schedule=EARLY, pp=2, dp=2, zero=(2,), recompute=LIST),
    "last-tp-sp-full": plan_of(
        LLAMA, schedule=LAST, pp=2, tp=2, sp=True, recompute="full", micro_batches=2
    ),
    "scp-zero3-full": plan_of(LLAMA, schedule=SCP, pp=2, dp=2, zero=(3,), recompute="full"),
    "scp-pp4-dropout-offload": plan_of(
        DROPOUT, schedule=SCP, pp=4, recompute="full", on_host=("norm1", "qkv")
    ),
}
PLANS |= {
    f"{schedule}-pp{pp}-{way}": plan_of(
        model,
        schedule=schedule,
        pp=pp,
        micro_batches=micro_batches,
        recompute=recompute_names,
        **settings,
    )
    for schedules, pp, micro_batches, way, model, recompute_names, settings in [
        (
            (EARLY, SCP),
            2,
            4,
            "dp2-tp2-sp-zero3",
            LLAMA,
            "full",
            {"dp": 2, "tp": 2, "sp": True, "zero": (3,), "recompute_ends": True},
        ),
        (
            (LAST,),
            2,
            4,
            "dp4-zero-mixed",
            GPT,
            ("attention", *LIST[3:]),
            {"dp": 4, "zero": (0, 3, 1, 2), "global_batch_size": 16},
        ),
        ((EARLY,), 4, 8, "tp2-dropout", DROPOUT, "full", {"tp": 2}),
        ((LAST,), 4, 4, "dp2-zero3-list", GPT, LIST, {"dp": 2, "zero": (3,)}),
        ((SCP,), 4, 4, "dp2-zero1-full", LLAMA, "full", {"dp": 2, "zero": (1,)}),
    ]
    for schedule in schedules
}
QUICK = {"early-zero2-a-list", "scp-pp4-dropout-offload"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Observations of one rank and step.

    They are its gradients, held micro-batches, spans in order, and the spans with forward products
    of blocks.
    """

    gradients: dict[str, torch.Tensor]
    in_flight: dict[int, int]
    spans: list[str]
    products: Counter[str]


def _world(rank: int, world: int, plans: list[Plan], folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    torch.save(
        [_seen(plan, dist.PrefixStore(f"plan{index}", store)) for index, plan in enumerate(plans)],
        f"{folder}/rank{rank}.pt",
    )
    dist.destroy_process_group()


def _seen(plan: Plan, store: dist.Store) -> Seen:
    trainer = build_trainer(plan, OPTIONS, torch.device("cpu"))
    spans: list[str] = []
    products: Counter[str] = Counter()
    for module in (
        module
        for stage in trainer.pipeline.stages
        for module in stage.body.modules()
        if isinstance(module, Linear)
    ):
        module.register_forward_pre_hook(lambda *_: products.update(spans[-1:]))
    _watch(trainer, store, spans)
    trainer.gradients(0)
    return Seen(
        gradients=whole_gradients(trainer),
        in_flight=trainer.pipeline.in_flight,
        spans=spans,
        products=products,
    )


def _watch(trainer: Trainer, store: dist.Store, spans: list[str]) -> None:
    """Writes down every span.

    A backward pass begins when the stage before, which needs its gradient, has recomputed.
    """
    ahead = {
        entry
        for rank, row in enumerate(action_rows(trainer.plan))
        for entry in parse_row(row, rank)
        if entry[1] is ActionKind.RECOMPUTE
    }
    replica = [trainer.ranks.coordinate(axis) for axis in ("dp", "tp")]

    @contextmanager
    def span(work: str, stage: int, micro_batch: int) -> Iterator[None]:
        spans.append(f"{stage}{work}{micro_batch}")
        if work == "B" and (stage - 1, ActionKind.RECOMPUTE, micro_batch) in ahead:
            store.wait([f"{stage - 1}R{micro_batch} {replica}"], timedelta(seconds=20))
        yield
        if work == "R":
            store.set(f"{stage}R{micro_batch} {replica}", "")

    for stage in trainer.pipeline.steps:
        stage.span = span


def _as_1f1b(plan: Plan) -> Plan:
    return dataclasses.replace(
        plan, pipeline=dataclasses.replace(plan.pipeline, schedule=Schedule.ONE_F_ONE_B)
    )


def seen(name: str) -> tuple[list[Seen], list[Seen]]:
    """Returns records of every rank for a plan, and for the same plan under 1F1B."""
    return _world_of(PLANS[name].mesh.num_ranks, name in QUICK)[name]


@cache
def _world_of(world: int, quick: bool) -> dict[str, tuple[list[Seen], list[Seen]]]:
    plans = {
        name: plan
        for name, plan in PLANS.items()
        if plan.mesh.num_ranks == world and (name in QUICK) is quick
    }
    both = [variant for plan in plans.values() for variant in (plan, _as_1f1b(plan))]
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_world, args=(world, both, folder), nprocs=world, start_method="fork")
        ranks = [
            torch.load(Path(folder) / f"rank{rank}.pt", weights_only=False) for rank in range(world)
        ]
    return {
        name: ([rank[2 * i] for rank in ranks], [rank[2 * i + 1] for rank in ranks])
        for i, name in enumerate(plans)
    }


EVERY = mostly_slow(PLANS, QUICK)


def _worst(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert actual.keys() <= expected.keys()
    return max(gradient_error(gradient, expected[name]) for name, gradient in actual.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_the_gradients_are_those_of_1f1b_and_of_one_process(name):
    plan = PLANS[name]
    actual, expected = seen(name)

    assert (
        max(_worst(a.gradients, b.gradients) for a, b in zip(actual, expected, strict=True))
        <= GRADIENT_TOLERANCE
    )
    if not plan.model.dropout:  # whose masks differ by rank
        whole = run_reference(plan).gradients
        assert max(_worst(rank.gradients, whole) for rank in actual) <= GRADIENT_TOLERANCE


@pytest.mark.parametrize("name", EVERY)
def test_every_stage_runs_its_list_and_holds_as_many_micro_batches_as_that_says(name):
    plan = PLANS[name]
    held = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1, ActionKind.RECOMPUTE: 0}
    lists = [parse_row(row, rank) for rank, row in enumerate(action_rows(plan))]

    for index, rank in enumerate(seen(name)[0]):
        stage = index // plan.mesh.ranks_per_stage
        assert list(dict.fromkeys(rank.spans)) == [f"{k}{work}{i}" for k, work, i in lists[stage]]
        assert rank.in_flight == {stage: max(accumulate(held[work] for _, work, _ in lists[stage]))}


@pytest.mark.parametrize("name", EVERY)
def test_a_recompute_is_over_before_the_gradient_is_made_and_nothing_runs_again_after_it(name):
    """The next stage delays its backward pass until the recompute is over (`_watch`).

    A recompute that waited for the gradient would wait for ever.
    """
    recomputes = 0
    for rank, plain in zip(*seen(name), strict=True):
        for early in (span for span in rank.spans if "R" in span):
            repeated = early.replace("R", "B")
            assert rank.products[early] == plain.products[repeated]
            assert rank.products[repeated] == 0
            recomputes += rank.products[early] > 0
        assert rank.products.total() == plain.products.total()
    assert recomputes > 0


@pytest.mark.parametrize(
    ("plan", "message", "hint"),
    [
        pytest.param(
            make_plan(GPT, pp=2, schedule=SCP, num_micro_batches=4, recompute="full"),
            "under scp the last stage has layers of block-0, which are recomputed",
            r"plans with recompute \[\]",
            id="last-stage",
        ),
        pytest.param(
            make_plan(GPT, pp=2, schedule=LAST, recompute=LIST),
            "the last stage has layers of block-0",
            r"recompute \[\]",
            id="kept",
        ),
        pytest.param(
            make_plan(GPT, pp=2, schedule=SCP, num_micro_batches=2),
            "needs at least 4 micro-batches, found 2",
            "set micro_batch_size to 2 and num_micro_batches to 4",
            id="few-micro-batches",
        ),
        pytest.param(
            make_plan(GPT, pp=2, schedule=SCP, num_micro_batches=1, global_batch_size=1),
            "needs at least 4 micro-batches, found 1",
            "set num_micro_batches to 4 and global_batch_size to 4",
            id="few-sequences",
        ),
        pytest.param(
            make_plan(GPT, pp=2, schedule=EARLY, virtual_stages=2),
            "early-recompute with virtual_stages 2",
            "to interleaved",
            id="virtual-stages",
        ),
    ],
)
def test_what_the_schedule_cannot_be_is_refused_with_the_nearest_plan_that_runs(
    plan, message, hint
):
    with pytest.raises(ConfigError, match=message) as refused:
        validate(plan)

    assert re.search(hint, refused.value.hint)
    nearest = nearest_legal(plan)
    assert nearest is not None
    validate(nearest)


def test_the_nearest_plan_recomputes_on_all_stages_but_the_last():
    plan = make_plan(GPT, pp=4, schedule=SCP, num_micro_batches=4, recompute="full")

    nearest: Any = nearest_legal(plan)

    repeated = [
        [
            bool(nearest.layer_plans[run.plan].recompute)
            for run in stage.layers
            if blocks_of(nearest, run)
        ]
        for stage in nearest.stages
    ]
    assert repeated == [[True], [True], [True], [False]]


def test_compiled_blocks_cannot_recompute_ahead():
    with pytest.raises(ConfigError, match="--compile: scp recomputes ahead of the gradient"):
        validate_compiled(PLANS["scp-zero3-full"], torch.device("cuda"))
