"""Invented runs: the spans of a plan's timeline under other prices, on clocks that disagree."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.model_states import StateBytes
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.plan.plan import Plan
from parplan.planner.runs.run_account import (
    RankMeasured,
    RecordedStep,
    TimedSteps,
    make_run,
    predict,
)
from parplan.planner.runs.run_file import RunEnvironment, RunFile
from parplan.profiles.machines.calibration_factors import Calibration, Factor
from parplan.profiles.machines.machine_catalog import (
    load_cluster,
    load_stack,
    with_gpus,
)
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import TrainingSpec
from tests.helpers.planning import estimate_plan

BYTES = StateBytes(10, 20, 30)


@cache
def estimated(
    *,
    pp: int = 1,
    dp: int = 1,
    tp: int = 1,
    virtual_stages: int = 1,
    zero: int = 0,
    gpu: str = "a100-80gb",
    stack: str = "torchtitan",
    recompute: Recompute = Recompute.NONE,
    schedule: Schedule = Schedule.ONE_F_ONE_B,
    num_micro_batches: int = 4,
) -> Plan:
    """A small GPT laid out by hand."""
    mesh = Mesh(pp=pp, dp=dp, tp=tp)
    entry = load_model("gpt-2.5b")
    training = TrainingSpec(
        global_batch_size=2 * num_micro_batches * dp, seq_length=1024, stack=load_stack(stack)
    )
    layout = ParallelLayout(
        mesh=mesh,
        schedule=Schedule.INTERLEAVED if virtual_stages > 1 else schedule,
        virtual_stages=virtual_stages,
        micro_batch_size=2,
        num_micro_batches=num_micro_batches,
        sequence_parallel=False,
    )
    return estimate_plan(
        entry.spec,
        with_gpus(load_cluster(gpu), mesh.num_ranks),
        training,
        layout,
        zero=zero,
        recompute=recompute,
    )


def factors(plan: Plan, **values: float) -> Calibration:
    """Calibration of a machine whose prices are off by these factors."""
    off = {
        cause: Factor(value=value, measured=True, source="made up")
        for cause, value in values.items()
    }
    return Calibration(
        stack=plan.training.stack.name, precision=plan.training.precision.value, **off
    )


def run_of(
    plan: Plan,
    truth: Calibration | None = None,
    *,
    allocated: int | None = None,
    reserved: int | None = None,
) -> RunFile:
    """A run of `plan` on a machine of which `truth` holds.

    It has three recorded steps after a slow one, all ranks in step.
    """
    real = replace(plan, cluster=replace(plan.cluster, calibration=truth)) if truth else plan
    timeline = predict(real).timeline
    assert timeline is not None
    ranks = []
    for pp in range(plan.mesh.pp):
        for dp in range(plan.mesh.dp):
            for tp in range(plan.mesh.tp):
                ahead_s = 1000.0 * len(ranks)
                starts = [ahead_s + 5.0 + number * 2 * timeline.step_s for number in range(3)]
                steps = tuple(
                    RecordedStep(
                        started_s=start,
                        seconds=timeline.step_s,
                        spans=tuple(
                            replace(span, start_s=start + span.start_s, end_s=start + span.end_s)
                            for span in timeline.spans[pp]
                        ),
                    )
                    for start in starts
                )
                ranks.append(
                    RankMeasured(
                        pp=pp,
                        dp=dp,
                        tp=tp,
                        predicted=BYTES,
                        held=BYTES,
                        allocated_bytes=allocated,
                        reserved_bytes=reserved,
                        host_rss_bytes=1000,
                        steps=steps,
                        ahead_s=ahead_s,
                    )
                )
    step_s = timeline.step_s
    environment = RunEnvironment(
        torch="2.13.0",
        device=f"NVIDIA {plan.cluster.device.name.upper()}",
        world_size=len(ranks),
        cpu_count=2,
    )
    return make_run(
        plan,
        environment,
        ranks,
        TimedSteps(
            seconds=[9 * step_s, step_s, step_s, step_s],
            losses=[4.0, 3.0, 2.0, 1.0],
            warm_up=1,
        ),
        clock_error_s=0.0,
        date="2026-11-01",
    )
