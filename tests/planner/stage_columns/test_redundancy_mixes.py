"""Mixes of options that are near in seconds and redundant bytes."""

from dataclasses import replace

from parplan.commands.options.target_options import TargetOptions
from parplan.commands.requests.requests import request_of
from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.objective import Objective
from parplan.planner.request import Constraints, PlanRequest
from parplan.planner.search.find_plan import find_plan
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack, with_gpus
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import TrainingSpec

PINS = {"pp": (1,), "tp": (8,), "micro_batch_size": (8,), "sequence_parallel": (True,)}


def least_redundant(**more):
    return find_plan(
        PlanRequest(
            model=load_model("gpt-20b").spec,
            cluster=with_gpus(load_cluster("h100-80gb"), 16),
            training=TrainingSpec(
                global_batch_size=16, seq_length=512, stack=load_stack("megatron-core")
            ),
            objective=Objective.MEMORY,
            constraints=Constraints(**PINS, **more),
        )
    )


def test_a_search_that_may_recompute_holds_no_more_twice_than_one_that_may_not():
    """Recompute frees bytes that are not redundant: its mixes were searched by held bytes alone."""
    free, never = least_redundant(), least_redundant(recompute=(Recompute.NONE,))

    assert free.search.gap == never.search.gap == 0.0
    held = free.predicted.redundancy_gib.total
    assert held <= never.predicted.redundancy_gib.total * (1 + 1e-4)


def test_blocks_at_one_zero_stage_have_mixed_redundant_bytes_too():
    """A few blocks more on a slower, leaner option fit a larger slowdown."""

    def held_within(slowdown):
        target = TargetOptions(
            model="llama3-8b",
            gpus=8,
            gpu="a100-40gb",
            stack="megatron-deepspeed",
            global_batch_size=16,
        )
        request = request_of(target)
        pins = Constraints(pp=(1,), tp=(8,), zero=(1,), micro_batch_size=(1,))
        return find_plan(
            replace(
                request,
                objective=Objective.MEMORY,
                model=replace(request.model, num_layers=8),
                constraints=pins,
                options=replace(request.options, max_slowdown=slowdown),
            )
        ).search.value

    assert held_within(0.05) < held_within(0.02) * 0.6
