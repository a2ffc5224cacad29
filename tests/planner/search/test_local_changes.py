"""Small changes of a pipeline's best strategy count what its closed form does not."""

from __future__ import annotations

from dataclasses import replace

from parplan.commands.options.target_options import TargetOptions
from parplan.commands.requests.requests import request_of
from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.request import Constraints
from parplan.planner.search.find_plan import find_plan


def test_a_tail_that_ranks_before_hide_does_not_keep_a_faster_column_away() -> None:
    target = TargetOptions(
        model="llama3-70b",
        gpus=24,
        gpu="rtx4090-24gb",
        seq_length=32768,
        global_batch_size=2,
        stack="torchtitan",
    )
    pins = Constraints(
        pp=(3,),
        tp=(4,),
        cp=(2,),
        zero=(0,),
        micro_batch_size=(1,),
        recompute=(Recompute.NONE,),
    )
    request = request_of(target)
    request = replace(request, model=replace(request.model, num_layers=4), constraints=pins)

    plan = find_plan(request)

    # The closed form adds the longest tail of all ranks, and prefers a step of 2.641 s.
    assert plan.predicted.step_time_s.value <= 2.6141
