"""Whole plans with and without chunks: losses, gradients, moved bytes and peak device bytes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from parplan.costmodels.chunks.chunk_states import ChunkStates
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.host.state_location import Access, Eviction
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.executor.chunks import chunk_manager as manager
from parplan.executor.chunks.chunk_buffers import BudgetError, Buffer, ChunkCopies
from parplan.executor.chunks.chunk_manager import OrderError
from parplan.executor.data.batches import synthetic_batches
from parplan.executor.pipeline import pipeline
from parplan.executor.training.train import ranks_of
from parplan.executor.watch.allocated import PeakBytes, allocated_bytes
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.plan_chunks import rank_chunks_of
from parplan.planner.search.estimate import ChunkRequest
from parplan.profiles.errors import InfeasibleError
from parplan.profiles.models.spec import Precision
from tests.helpers.chunked_runs import Found, chunked_plan, first_step, joined, run, smallest
from tests.helpers.executor_plans import GPT, LLAMA, MIXTRAL

DEEP = replace(GPT, num_layers=6)
HOST = ChunkRequest(host_blocks=6, optimizer_blocks=0)
MIXED = ChunkRequest(host_blocks=2, optimizer_blocks=1)
OPERATORS = replace(MIXED, access=Access.OPERATOR)
RELATIVE = 1e-6  # of sums in another order, to the largest entry of a gradient
LEAST = 1e-4  # of what gradients are compared with: some are zero

Step = Callable[[Plan], Found]


@pytest.fixture
def step() -> Iterator[Step]:
    """The first step of a plan of one rank, here, in a group that has no threads: other tests fork.

    What was there before is not looked at, now and later: that takes longer than the steps.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    gc.freeze()
    yield first_step
    dist.destroy_process_group()


def at(device_bytes: int, request: ChunkRequest = MIXED, **choices) -> Plan:
    return chunked_plan(replace(request, device_bytes=device_bytes), **choices)


def require_bytes(ranks: list[Found]) -> None:
    """Requires that the moved bytes are the predicted ones."""
    for rank in ranks:
        assert all(counted == predicted for counted, predicted in rank.moved.values()), rank.moved


def require_all(ranks: list[Found], slack_bytes: int = 0) -> None:
    """Requires also that all tensors together stay within the device's budget."""
    require_bytes(ranks)
    for rank in ranks:
        assert rank.chunk_bytes < rank.device_bytes <= rank.budget_bytes + slack_bytes


def require_close(ranks: list[Found], plain: list[Found]) -> None:
    (loss, gradients), (expected_loss, expected) = joined(ranks), joined(plain)
    assert loss == pytest.approx(expected_loss, rel=RELATIVE)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).abs().max() <= RELATIVE * max(
            float(gradient.abs().max()), LEAST
        ), name


def require_equal(actual: Found, plain: Found) -> None:
    assert actual.loss == plain.loss
    assert actual.gradients.keys() == plain.gradients.keys()
    assert all(
        torch.equal(actual.gradients[name], gradient) for name, gradient in plain.gradients.items()
    )


def require_like_plain_on_one_rank(
    step: Step, num_micro_batches: int, shares: tuple[float, ...]
) -> dict[tuple[float, Eviction], int]:
    """Requires plain results at every budget, with every policy.

    Budgets are shares of the smallest. Returns the bytes that came to the device.
    """
    choices = {"model": DEEP, "num_micro_batches": num_micro_batches}
    plain, least = step(chunked_plan(None, **choices)), smallest(HOST, **choices)
    moved = {}
    for share in shares:
        for eviction in Eviction:
            chunk_step = step(at(int(share * least), replace(HOST, eviction=eviction), **choices))
            require_equal(chunk_step, plain)
            require_all([chunk_step])
            moved[share, eviction] = chunk_step.moved["in"][0]
    return moved


def test_one_rank_moves_what_is_predicted_and_gets_the_gradients_of_the_plain_plan_to_the_bit(step):
    moved = require_like_plain_on_one_rank(step, 4, (1.0,))

    assert moved[1.0, Eviction.OPT] == min(moved.values()) < max(moved.values())


@pytest.mark.slow
@pytest.mark.parametrize("num_micro_batches", [1, 2, 4])
def test_one_rank_at_every_budget(step, num_micro_batches):
    moved = require_like_plain_on_one_rank(
        step, num_micro_batches, (1.0, 1.04, 1.08, 1.15, 1.3, 3.0)
    )

    assert all(moved[3.0, eviction] < moved[1.0, eviction] for eviction in Eviction)


@pytest.mark.parametrize(
    "choices",
    [
        pytest.param(
            {"model": replace(LLAMA, dropout=0.1), "recompute": Recompute.FULL},
            id="recomputed-blocks-that-drop-out",
        ),
        pytest.param({"recompute": Recompute.SELECTIVE}, id="recomputed-attention"),
        pytest.param({"model": MIXTRAL}, id="a-mixture-of-experts"),
        pytest.param({"offload": (Offload.ACTIVATIONS,)}, id="activations-on-the-host"),
        pytest.param(
            {"model": LLAMA, "offload": (Offload.LOOKUP,)}, id="the-token-table-on-the-host"
        ),
    ],
)
def test_what_is_recomputed_drops_out_is_routed_or_leaves_the_device_is_the_same(step, choices):
    choices = {"num_micro_batches": 2, **choices}

    chunk_step = step(at(smallest(MIXED, **choices), **choices))

    require_equal(chunk_step, step(chunked_plan(None, **choices)))
    require_bytes([chunk_step])


@pytest.mark.parametrize(
    "choices",
    [
        pytest.param({}, id="no-recompute", marks=pytest.mark.slow),
        pytest.param({"recompute": Recompute.FULL}, id="recomputed-blocks", marks=pytest.mark.slow),
        pytest.param(
            {"recompute": Recompute.SELECTIVE}, id="recomputed-attention", marks=pytest.mark.slow
        ),
        pytest.param(
            {"model": replace(LLAMA, dropout=0.1), "recompute": Recompute.FULL},
            id="recomputed-blocks-that-drop-out",
        ),
        pytest.param(
            {"model": MIXTRAL, "recompute": Recompute.FULL}, id="a-recomputed-mixture-of-experts"
        ),
        pytest.param(
            {"model": replace(GPT, parallel_residual=True), "recompute": Recompute.FULL},
            id="parallel-residual",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {
                "num_micro_batches": 1,
                "recompute": Recompute.FULL,
                "precision": Precision.BF16,
                "gradients": Precision.BF16,
            },
            id="gradients-in-the-place-of-parameters",
        ),
        pytest.param({"offload": (Offload.ACTIVATIONS,)}, id="activations-on-the-host"),
    ],
)
def test_blocks_that_are_used_an_operator_at_a_time_give_the_same_and_move_what_is_predicted(
    step, choices
):
    choices = {"num_micro_batches": 2, **choices}

    chunk_step = step(at(smallest(OPERATORS, **choices), OPERATORS, **choices))

    require_equal(chunk_step, step(chunked_plan(None, **choices)))
    require_bytes([chunk_step])


def test_a_rank_that_runs_operators_in_another_order_is_stopped(step, monkeypatch):
    plan = at(10**9, OPERATORS)
    by_block = replace(plan, chunks=replace(plan.chunks, access=Access.BLOCK))
    monkeypatch.setattr(
        pipeline, "rank_chunks_of", lambda _, rank: rank_chunks_of(at(10**9, MIXED), rank)
    )

    assert step(by_block).loss > 0
    with pytest.raises(OrderError, match="of block 0, part 1"):
        step(plan)


@pytest.mark.parametrize("gradients", [Precision.BF16, Precision.FP32])
def test_in_16_bits_gradients_are_those_of_the_plain_plan_also_in_the_place_of_parameters(
    step, gradients
):
    choices = {"precision": Precision.BF16, "gradients": gradients}
    plan = at(smallest(MIXED, **choices), **choices)

    chunk_step = step(plan)

    assert rank_chunks_of(plan, 0).in_parameters == (gradients is Precision.BF16)
    require_equal(chunk_step, step(chunked_plan(None, **choices)))
    require_bytes([chunk_step])


class SlowStream:
    """Copies in one direction, in order.

    No copy is made before somebody waits for it or for a later one.
    """

    def __init__(self) -> None:
        self.begun: list[tuple[Tensor, Tensor]] = []
        self.most_waiting = 0
        self.made = 0

    def begin(self, to: Tensor, source: Tensor) -> SlowCopy:
        self.begun.append((to, source))
        self.most_waiting = max(self.most_waiting, len(self.begun) - self.made)
        return SlowCopy(self, len(self.begun))

    def make(self, number: int) -> None:
        while self.made < number:
            to, source = self.begun[self.made]
            to.copy_(source)
            self.made += 1


@dataclass
class SlowCopy:
    stream: SlowStream
    number: int

    def synchronize(self) -> None:
        self.stream.make(self.number)


class SlowCopies(ChunkCopies):
    """A GPU's streams when they are as late as they can be."""

    made: ClassVar[list[SlowCopies]] = []

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.inwards, self.outwards = self.streams = SlowStream(), SlowStream()
        self.made.append(self)

    def _copy(
        self, to: Tensor, source: Tensor, buffer: Buffer, stream: None, *, dropped: bool = False
    ) -> SlowCopy:
        buffer.wait()
        inwards = to is buffer.flat
        copy = self.streams[not inwards].begin(to, source.clone() if dropped else source)
        if not dropped:
            buffer.is_over(copy.synchronize)
        return copy

    def settle(self) -> None:
        self.outwards.make(len(self.outwards.begun))
        super().settle()


@pytest.mark.parametrize(
    "choices",
    [
        pytest.param({"num_micro_batches": 4}, id="fp32"),
        pytest.param(
            {"precision": Precision.BF16, "gradients": Precision.BF16},
            id="gradients-in-the-place-of-parameters",
        ),
    ],
)
def test_copies_that_come_as_late_as_they_are_waited_for_give_the_same_gradients(
    step, choices, monkeypatch
):
    monkeypatch.setattr(manager, "ChunkCopies", SlowCopies)

    chunk_step = step(at(smallest(MIXED, **choices) + 100_000, **choices))

    require_equal(chunk_step, step(chunked_plan(None, **choices)))
    assert all(stream.most_waiting > 1 for stream in SlowCopies.made.pop().streams)


def test_below_the_smallest_budget_there_is_no_plan_and_the_error_says_the_number():
    least = smallest(MIXED)

    with pytest.raises(InfeasibleError, match=f"need at least {least:,} bytes of the device"):
        at(least - 1)


def test_a_schedule_for_a_larger_device_meets_the_budget_and_stops_there(step, monkeypatch):
    ample = at(10**9)
    held = step(ample).chunk_bytes
    monkeypatch.setattr(
        pipeline,
        "rank_chunks_of",
        lambda plan, rank: replace(rank_chunks_of(plan, rank), device_bytes=held - 1),
    )

    with pytest.raises(BudgetError, match=f"the budget is {held - 1} bytes"):
        step(ample)


def test_during_every_pass_chunks_hold_the_bytes_that_the_schedule_counts(step, monkeypatch):
    plan = at(smallest(MIXED, num_micro_batches=2) + 40_000, num_micro_batches=2)
    built = pipeline.build_pipeline(
        plan, ranks_of(plan, torch.device("cpu")), seed=7, after_backward=lambda: None
    )
    held = list[int]()
    begin, end = ChunkStates.begin, ChunkStates.end

    def begun(states, *moment):
        begin(states, *moment)
        held.append(built.chunks.ledger.total_bytes)

    def ended(states, *moment):
        end(states, *moment)
        held[-1] = max(held[-1], built.chunks.ledger.total_bytes)

    monkeypatch.setattr(ChunkStates, "begin", begun)
    monkeypatch.setattr(ChunkStates, "end", ended)
    built.step(synthetic_batches(plan, 0, 7)(0))

    assert held == [moment.chunk_bytes for moment in built.chunks.schedule.moments]
    assert len(set(held)) > 1


def test_to_build_a_rank_takes_one_block_more_of_the_device_than_its_states(step):
    plan = at(10**9, HOST, model=DEEP)
    gc.collect()
    before, peak = allocated_bytes(gc.get_objects()), PeakBytes()

    with peak.counted():
        built = pipeline.build_pipeline(
            plan, ranks_of(plan, torch.device("cpu")), seed=7, after_backward=lambda: None
        )

    chunks, outside = built.chunks, sum(parameter.nbytes for parameter in built.parameters)
    block = sum(
        place.shape.numel() * 4
        for chunk in chunks.chunks
        for place in chunk.places
        if place.block == 0
    )
    largest = max(place.shape.numel() * 4 for chunk in chunks.chunks for place in chunk.places)
    chunk = 4 * chunks.chunks[0].elements
    assert peak.num_bytes - before - chunks.host_bytes - outside <= block + largest + chunk


TWO_RANKS = {
    "data-parallel": {"dp": 2},
    "data-parallel-accumulating": {"dp": 2, "num_micro_batches": 4},
    "1f1b": {"pp": 2, "num_micro_batches": 4},
    "tensor-parallel": {"tp": 2, "sp": True},
}
SLOW_RANKS = {
    "gpipe": {"pp": 2, "num_micro_batches": 4, "schedule": Schedule.GPIPE},
    "interleaved": {
        "pp": 2,
        "num_micro_batches": 4,
        "schedule": Schedule.INTERLEAVED,
        "virtual_stages": 2,
    },
    "data-parallel-bf16": {"dp": 2, "num_micro_batches": 2, "recompute": Recompute.FULL},
    "tensor-parallel-whole": {"tp": 2, "num_micro_batches": 4},
    "llama": {"dp": 2, "num_micro_batches": 4, "model": LLAMA},
}
FOUR_RANKS = {
    "data-and-pipeline": {"dp": 2, "pp": 2, "num_micro_batches": 4},
    "data-and-tensor": {"dp": 2, "tp": 2, "sp": True, "num_micro_batches": 2},
    "data": {"dp": 4, "num_micro_batches": 2},
}


def require_like_plain(
    cases: dict[str, dict],
    budgets: tuple[float, ...],
    evictions: tuple[Eviction, ...],
    request: ChunkRequest = MIXED,
) -> None:
    """Every case in one world, with every budget, in shares of the smallest, and policy."""
    plans, names = [], []
    for name, choices in cases.items():
        least = smallest(request, **choices)
        chunked = [
            at(int(share * least), replace(request, eviction=eviction), **choices)
            for share in budgets
            for eviction in evictions
        ]
        plans += [chunked_plan(None, **choices), *chunked]
        names += [f"{name} plain", *[name] * len(chunked)]
    for name, plan, ranks in zip(names, plans, run(plans), strict=True):
        if name.endswith("plain"):
            plain = ranks
            continue
        require_close(ranks, plain)
        require_all(ranks, _copied_by_gloo(plan))


def _copied_by_gloo(plan: Plan) -> int:
    """Bytes that gloo copies to sum a whole group; NCCL makes no such copy."""
    assert plan.chunks is not None
    widths = plan.training.gradient_precision.num_bytes * plan.mesh.dp
    return (
        max(group.chunk_elements for group in plan.chunks.groups) * widths
        if plan.mesh.dp > 1
        else 0
    )


@pytest.mark.multiproc
def test_two_ranks_move_gather_and_reduce_what_is_predicted():
    require_like_plain(TWO_RANKS, (1.0,), (Eviction.OPT,))


BY_OPERATORS = {
    "data-parallel": {"dp": 2, "num_micro_batches": 2},
    "data-parallel-recomputed": {"dp": 2, "num_micro_batches": 2, "recompute": Recompute.FULL},
    "1f1b-recomputed": {"pp": 2, "num_micro_batches": 4, "recompute": Recompute.FULL},
    "tensor-parallel-recomputed": {"tp": 2, "sp": True, "recompute": Recompute.FULL},
}
QUICK = {name: BY_OPERATORS[name] for name in ("data-parallel-recomputed", "1f1b-recomputed")}


@pytest.mark.slow
@pytest.mark.multiproc
def test_two_ranks_that_use_an_operator_at_a_time_move_gather_and_reduce_what_is_predicted():
    require_like_plain(QUICK, (1.1,), (Eviction.OPT,), OPERATORS)


@pytest.mark.slow
@pytest.mark.multiproc
def test_two_ranks_by_operators_with_two_budgets():
    require_like_plain(BY_OPERATORS, (1.0, 1.1), (Eviction.OPT,), OPERATORS)


@pytest.mark.slow
@pytest.mark.multiproc
def test_two_ranks_with_every_policy_and_several_budgets():
    require_like_plain(TWO_RANKS | SLOW_RANKS, (1.0, 1.15, 2.0), tuple(Eviction))


@pytest.mark.slow
@pytest.mark.multiproc
def test_four_ranks_along_two_axes():
    require_like_plain(FOUR_RANKS, (1.0, 1.3), (Eviction.OPT, Eviction.LRU))
