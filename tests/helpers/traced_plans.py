"""Plans of traced modules by hand, with shards of about as many operators each.

They are cut where the program allows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parplan.costmodels.host.offload import Offload
from parplan.costmodels.schedules.schedule import Schedule
from parplan.executor.traced.program_cut import cut_program
from parplan.planner.layer_options.traced_shardings import split_plans, traced_shardings
from parplan.planner.plan.pipeline_plan import LayerRange
from parplan.planner.plan.plan import PLAN_VERSION
from parplan.planner.plan.traced_plan import (
    RecomputeList,
    ShardPlan,
    ShardStage,
    SplitPlan,
    TracedPlan,
    TracedSummary,
)
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.module_source import ModuleSource
from parplan.profiles.models.operator_graph import LayerKind, layer_class
from parplan.profiles.models.spec import Precision
from parplan.profiles.models.tp_rules import TpRules
from parplan.profiles.tracing.program import Program
from parplan.profiles.tracing.record import record
from parplan.profiles.tracing.trace import trace
from parplan.profiles.tracing.traced_source import open_workload
from tests.helpers.executor_plans import make_plan


def hand_plan(
    module: str | Mapping[str, Any] | ModuleSource,
    *,
    pp: int = 1,
    dp: int = 1,
    tp: int = 1,
    virtual_stages: int = 1,
    shards_a_stage: int = 2,
    zero: int = 0,
    recompute: bool = False,
    lists: bool = False,
    num_micro_batches: int = 4,
    micro_batch_size: int = 1,
    schedule: Schedule = Schedule.ONE_F_ONE_B,
    precision: Precision = Precision.FP32,
    offload: tuple[Offload, ...] = (),
    rules: TpRules | None = None,
) -> TracedPlan:
    """A plan of a factory's module, of a Hugging Face config's, or of a source.

    With `recompute` the first shard of every stage is recomputed; with `lists` every second
    operator that can run again is, of the other shards.
    """
    like = make_plan(
        pp=pp,
        dp=dp,
        tp=tp,
        num_micro_batches=num_micro_batches,
        global_batch_size=dp * num_micro_batches * micro_batch_size,
        schedule=schedule,
        virtual_stages=virtual_stages,
        precision=precision,
    )
    source = module if isinstance(module, ModuleSource) else _source(module)
    program = record(
        open_workload(source, seq_length=like.training.seq_length), micro_batch_size, precision
    )
    count = pp * virtual_stages
    stages = tuple(
        ShardStage(
            rank=k % pp,
            layers=(LayerRange(first=k * shards_a_stage, last=(k + 1) * shards_a_stage - 1),),
            zero=zero,
            recompute=(k * shards_a_stage,) if recompute else (),
        )
        for k in range(count)
    )
    summary = TracedSummary(
        name=source.text,
        num_parameters=0,
        num_operators=len(program.calls),
        flops_per_sequence=0,
        unit="samples",
    )
    plan = TracedPlan(
        plan_version=PLAN_VERSION,
        module=source,
        traced=summary,
        cluster=like.cluster,
        training=like.training,
        mesh=like.mesh,
        pipeline=like.pipeline,
        shards=(),
        stages=stages,
        predicted=like.predicted,
        search=like.search,
        offload=offload,
        tp_rules=rules,
    )
    cut = _with_shards(plan, program, count * shards_a_stage)
    cut = _with_lists(cut, program) if lists else cut
    return replace(cut, shardings=_shardings(cut)) if tp > 1 else cut


def _with_lists(plan: TracedPlan, program: Program) -> TracedPlan:
    def listed(number: int) -> RecomputeList:
        shard = plan.shards[number]
        calls = enumerate(program.calls[shard.first : shard.end])
        places = [place for place, call in calls if program.is_repeatable(call)]
        return RecomputeList(shards=(number,), places=tuple(places[::2]))

    def changed(stage: ShardStage) -> ShardStage:
        numbers = (k for k in range(stage.first, stage.end) if k not in stage.recompute)
        return replace(stage, recompute_lists=tuple(map(listed, numbers)))

    return replace(plan, stages=tuple(map(changed, plan.stages)))


def _shardings(plan: TracedPlan) -> dict[str, tuple[SplitPlan, ...]]:
    """The first sharding of every shard that is worth searching."""
    model = trace(
        plan.module,
        seq_length=plan.training.seq_length,
        precision=plan.training.precision,
        rules=plan.tp_rules,
    )
    shardings = {}
    for shard in plan.shards:
        placed = [
            (place, traced.operator)
            for place, traced in enumerate(model.operators[shard.first : shard.end])
            if not traced.view and not traced.constant
        ]
        layer = layer_class(LayerKind.BLOCK, tuple(operator for _, operator in placed))
        shardings[shard.layer] = split_plans(placed, traced_shardings(layer, plan.mesh.tp)[0])
    return shardings


def _with_shards(plan: TracedPlan, program: Program, count: int) -> TracedPlan:
    """Each end is moved on until the executor can cut there."""
    size = len(program.calls)
    ends: list[int] = []
    for index in range(1, count):
        end = max(size * index // count, (ends or [0])[-1] + 1)
        while not _cuts(plan, program, [*ends, end]):
            end += 1
        ends.append(end)
    return replace(plan, shards=_shards(program, [*ends, size]))


def _cuts(plan: TracedPlan, program: Program, ends: list[int]) -> bool:
    """Tells if every end so far may be the end of a stage."""
    shards = _shards(program, [*ends, len(program.calls)])
    stages = tuple(
        ShardStage(rank=k, layers=(LayerRange(first=k, last=k),), zero=0)
        for k in range(len(shards))
    )
    try:
        cut_program(replace(plan, shards=shards, stages=stages), program)
    except ConfigError:
        return False
    return True


def _shards(program: Program, ends: list[int]) -> tuple[ShardPlan, ...]:
    return tuple(
        ShardPlan(
            name=f"shard {i}",
            layer=chr(ord("A") + i),
            first=first,
            end=end,
            starts=program.calls[first].meta["name"],
            parameters=0,
        )
        for i, (first, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True))
    )


def _source(module: str | Mapping[str, Any]) -> ModuleSource:
    if isinstance(module, str):
        return ModuleSource(factory=module)
    return ModuleSource(huggingface=module)
