"""Constraints on plans for a traced module, checked before any rank computes."""

from __future__ import annotations

from parplan.costmodels.schedules.schedule import SPLIT
from parplan.executor.run_options import Options
from parplan.planner.plan.derived import layout_of
from parplan.planner.plan.traced_plan import TracedPlan
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.spec import Precision


def validate_traced_plan(plan: TracedPlan, options: Options | None = None) -> None:
    """Raise ConfigError for a plan, or options, that the executor cannot run.

    Such a plan would not run at all, or to other results than one process.
    """
    training = plan.training
    if training.precision is Precision.FP16 or training.gradient_precision is not Precision.FP32:
        raise ConfigError(
            f"training: precision {training.precision} with gradients in "
            f"{training.gradient_precision}",
            hint="use bf16 or fp32, and fp32 gradients",
        )
    if training.precision is not Precision.FP32 and not training.has_masters:
        raise ConfigError(
            "training.stack: master_bytes is 0, and a traced module keeps fp32 masters",
            hint="make a plan with --state-precision fp32",
        )
    if plan.mesh.cp > 1:
        raise ConfigError(
            f"mesh: cp is {plan.mesh.cp}, and a traced module reads whole sequences",
            hint=f"set cp to 1, context_form to null and dp to {plan.mesh.replicas}",
        )
    _check_stages(plan)
    _check_chunks(plan)
    if options is not None and options.data is not None:
        raise ConfigError(
            "--data: a traced module draws its own batches",
            hint="let the function's batch read the file",
        )
    if options is not None and options.compile:
        raise ConfigError(
            "--compile: the shards of a traced module are not compiled", hint="leave --compile out"
        )


def _check_chunks(plan: TracedPlan) -> None:
    if plan.chunks is None:
        return
    zero = 3 if plan.mesh.dp > 1 else 0
    other = next((stage for stage in plan.stages if stage.zero != zero), None)
    if other is not None:
        raise ConfigError(
            f"stages: zero {other.zero} of a stage with chunks", hint=f"set zero to {zero}"
        )
    if layout_of(plan).recomputes_ahead:
        raise ConfigError(
            f"pipeline: schedule {plan.pipeline.schedule} recomputes shards in chunks ahead of "
            "their backward passes",
            hint="use 1f1b, gpipe or interleaved",
        )
    for rank in plan.chunks.ranks:
        if rank.device_bytes < rank.smallest_bytes:
            raise ConfigError(
                f"chunks.ranks: stage {rank.stage} has device_bytes {rank.device_bytes}, it needs "
                f"{rank.smallest_bytes}",
                hint=f"set device_bytes to {rank.smallest_bytes}",
            )


def _check_stages(plan: TracedPlan) -> None:
    pipeline, pp = plan.pipeline, plan.mesh.pp
    split = any(letter in row for row in pipeline.actions for letter in "IW")
    if pipeline.schedule in SPLIT or split:
        raise ConfigError(
            f"pipeline: schedule {pipeline.schedule} splits backward passes, a stage of a "
            "traced module has one",
            hint="use 1f1b or interleaved",
        )
    ranks = [stage.rank for stage in plan.stages]
    expected = [k % pp for k in range(pp * pipeline.virtual_stages)]
    if ranks != expected:
        raise ConfigError(
            f"stages: {len(ranks)} on ranks {', '.join(map(str, ranks))}; pp {pp} with "
            f"{pipeline.virtual_stages} virtual stages has them on {', '.join(map(str, expected))}",
            hint="make the plan again",
        )
