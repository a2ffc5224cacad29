"""Chunks of experts that ranks divide train as one process does, and move the predicted bytes."""

from __future__ import annotations

import pytest

from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.plan.plan import Plan
from parplan.planner.search.estimate import ChunkRequest
from parplan.profiles.models.spec import Precision
from tests.helpers.chunked_runs import AMPLE, chunked_plan, smallest
from tests.helpers.executor_plans import MIXTRAL
from tests.helpers.executor_world import Worlds, require_as_one_process

BF16 = Precision.BF16


def in_chunks(optimizer_blocks: int = 0, **layout: object) -> Plan:
    """One block on the host, the other with its states on the device or there."""
    request = ChunkRequest(host_blocks=1, optimizer_blocks=optimizer_blocks, device_bytes=AMPLE)
    return chunked_plan(request, MIXTRAL, **layout)


def in_the_smallest_budget(**layout: object) -> Plan:
    request = ChunkRequest(host_blocks=2, optimizer_blocks=0)
    least = smallest(request, model=MIXTRAL, **layout)
    return chunked_plan(
        ChunkRequest(host_blocks=2, optimizer_blocks=0, device_bytes=least), MIXTRAL, **layout
    )


PLANS = {
    "dp2-ep2": in_chunks(dp=2, ep=2),
    "dp4-ep2": in_chunks(optimizer_blocks=1, dp=4, ep=2),
    "dp2-ep2-smallest": in_the_smallest_budget(dp=2, ep=2),
    "dp2-tp2-ep2": in_chunks(dp=2, tp=2, ep=2, sp=True),
    "dp2-tp2-ep2-etp2": in_chunks(dp=2, tp=2, ep=2, etp=2, sp=True, num_micro_batches=2),
    "pp2-dp2-ep2": in_chunks(pp=2, dp=2, ep=2, num_micro_batches=2),
    "dp2-ep2-bf16": in_chunks(dp=2, ep=2, precision=BF16, gradients=BF16),
    "dp4-ep2-bf16-recompute": in_chunks(
        dp=4, ep=2, precision=BF16, recompute=Recompute.FULL, num_micro_batches=2
    ),
}
WORLDS = Worlds(PLANS, slow={*PLANS} - {"dp2-tp2-ep2"})


@pytest.mark.multiproc
@pytest.mark.parametrize("name", WORLDS.params())
def test_experts_over_ranks_train_in_chunks_as_in_one_process(name: str) -> None:
    require_as_one_process(WORLDS, name)

    for moved in WORLDS.outcome(name).moved.values():
        for pair in (moved.in_bytes, moved.out_bytes, moved.gathered_bytes, moved.reduced_bytes):
            assert pair.predicted == pair.measured
        assert moved.device_bytes.measured <= moved.device_bytes.predicted
