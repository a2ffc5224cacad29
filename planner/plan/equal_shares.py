"""The nearest pipeline of a plan whose data-parallel ranks have equal shares of the batch."""

from __future__ import annotations

from dataclasses import replace

from parplan.costmodels.schedules.schedule import legal
from parplan.planner.plan.pipeline_plan import PipelinePlan
from parplan.planner.plan.traced_plan import AnyPlan
from parplan.profiles.divisors import divisors


def with_equal_shares(plan: AnyPlan) -> PipelinePlan | None:
    """Returns the pipeline of a plan with equal micro-batches that make up its global batch.

    Their size is the legal one nearest to the plan's. Returns None where no size is legal.
    """
    pipeline, mesh = plan.pipeline, plan.mesh
    batch = plan.training.global_batch_size
    sizes = divisors(batch // mesh.dp) if batch % mesh.dp == 0 else ()
    equal = [
        replace(
            pipeline,
            micro_batch_size=size,
            num_micro_batches=batch // size // mesh.dp,
            micro_batches_of_replicas=(),
        )
        for size in sizes
    ]
    possible = (each for each in equal if not illegal_micro_batches(each, mesh.pp))
    return min(
        possible,
        key=lambda each: abs(each.micro_batch_size - pipeline.micro_batch_size),
        default=None,
    )


def equal_shares_text(equal: PipelinePlan) -> str:
    """Returns the change that gives a pipeline with equal shares, in its fields."""
    return (
        f"set micro_batch_size to {equal.micro_batch_size} and num_micro_batches to "
        f"{equal.num_micro_batches}"
    )


def illegal_micro_batches(pipeline: PipelinePlan, pp: int) -> str | None:
    """Returns why the schedule cannot run the micro-batches of some replica, or None."""
    reasons = (
        legal(pipeline.schedule, pp, count, pipeline.virtual_stages)
        for count in sorted({pipeline.num_micro_batches, *pipeline.micro_batches_of_replicas})
    )
    return next((reason for reason in reasons if reason), None)
