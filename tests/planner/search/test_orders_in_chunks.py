"""Blocks in chunks that recompute come first where that is leaner and no slower."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.commands.options.target_options import TargetOptions
from parplan.commands.requests.requests import request_of
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.step import price_step
from parplan.planner.objective import Objective
from parplan.planner.plan.reprice import reprice
from parplan.planner.request import Constraints, SearchOptions
from parplan.planner.search.find_plan import find_plan
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.units import GIB

TARGET = TargetOptions(
    model="olmo-2-7b",
    gpus=2,
    gpu="v100-32gb",
    global_batch_size=8,
    seq_length=2048,
    stack="fsdp1",
)
PINS = Constraints(
    pp=(1,),
    tp=(2,),
    micro_batch_size=(1,),
    offload=(Offload.OPTIMIZER,),
    recompute=(Recompute.NONE, Recompute.FULL),
    megatron_sharding=True,
)


@pytest.mark.parametrize("objective", [Objective.THROUGHPUT, Objective.MEMORY])
def test_the_other_order_of_the_blocks_is_no_better(objective: Objective) -> None:
    request = request_of(TARGET)
    request = replace(
        request,
        model=replace(request.model, num_layers=4),
        constraints=PINS,
        options=SearchOptions(memory_limit_bytes=12 * GIB, max_slowdown=0.02),
        objective=objective,
    )
    plan = reprice(find_plan(request))
    (stage,) = plan.strategy.stages
    blocks = [choice for choice in stage if choice.kind is LayerKind.BLOCK]
    homes = [block.home for block in blocks]
    turned = (replace(block, home=home) for block, home in zip(blocks[::-1], homes, strict=True))
    other = replace(plan.strategy, stages=((stage[0], *turned, stage[-1]),))

    price = price_step(other, plan.price_cache)

    assert len(set(blocks)) > 1, "some blocks recompute"
    assert price.step_s > plan.price.step_s or price.peak_bytes >= plan.price.peak_bytes
