"""A plan of a small model with the structure of a large one: what can be run on a few CPUs to see
whether a plan trains rightly.

Kept: every mesh axis that is more than 1, the schedule, virtual stages where there are any, every
layer plan (its ZeRO stage, recompute list and placements) in the order of the stages, kinds of
norm, positions, attention and residual, tied embeddings, grouped heads, homes and eviction of
chunks, in the smallest budget. Made small: degrees to 2, virtual stages to at most 4, runs of alike
blocks, micro-batches, all sizes. Precision is fp32, and nothing is dropped out: only then can one
process be compared with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.schedules.schedule import Schedule, rank_of
from parplan.planner.plan.pipeline_plan import PipelinePlan
from parplan.planner.plan.plan import LayerPlan, LayerRun, Plan, StagePlan
from parplan.planner.plan.plan_chunks import rechunked, require_own_chunks
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.spec import ModelSpec, Precision

DEGREE, MOST_CHUNKS, MOST_MICRO_BATCHES, MOST_RANKS = 2, 4, 4, 8
SEQ_LENGTH, HEADS, HEAD_DIM, FFN, VOCAB, PADDED = 16, 4, 8, 64, 100, 128
EXPERTS = 4


def shrunk(plan: Plan) -> Plan:
    """The small plan; of its predictions nothing holds. Raises ConfigError where there is none, and
    for chunks of other blocks.
    """
    if plan.module is not None:
        raise ConfigError(
            f"the module {plan.module.text} has the size that it has",
            hint="run a small one of its kind: python -m parplan.executor",
        )
    mesh = _mesh(plan)
    pipeline = _pipeline(plan, mesh)
    stages = _stages(plan, mesh.pp, pipeline)
    num_layers = sum(run.blocks is not None for stage in stages for run in stage.layers)
    training = replace(
        plan.training,
        global_batch_size=pipeline.micro_batch_size * pipeline.num_micro_batches * mesh.dp,
        seq_length=SEQ_LENGTH,
        precision=Precision.FP32,
        gradient_precision=Precision.FP32,
        fp8_matmuls=False,
    )
    small = replace(
        plan,
        model=_model(plan.model, num_layers),
        training=training,
        mesh=mesh,
        pipeline=pipeline,
        stages=stages,
        layer_plans={
            name: _layer_plan(found, plan.mesh, mesh) for name, found in plan.layer_plans.items()
        },
    )
    if plan.chunks is None:
        return small
    require_own_chunks(plan)  # the small plan gets others
    return rechunked(small)


def _mesh(plan: Plan) -> Mesh:
    """Degrees of 2; 4 data-parallel ranks where fewer than all of them hold one copy, if there is
    room; a custom schedule's pp.
    """
    custom = plan.pipeline.schedule is Schedule.CUSTOM
    pp = plan.mesh.pp if custom else min(plan.mesh.pp, DEGREE)
    if pp > MOST_RANKS:
        raise ConfigError(
            f"the lists of a custom schedule are of {pp} pipeline ranks, a small plan has at most {MOST_RANKS}",
            hint="make one of fewer ranks, and check that",
        )
    tp = min(plan.mesh.tp, DEGREE, MOST_RANKS // pp)
    several = any(_holds_copies(found, plan.mesh) for found in plan.layer_plans.values())
    dp = min(plan.mesh.dp, DEGREE * (1 + several), MOST_RANKS // (pp * tp))
    return Mesh(pp=pp, dp=dp, tp=tp, ep=min(plan.mesh.ep, DEGREE, dp))


def _holds_copies(layer_plan: LayerPlan, mesh: Mesh) -> bool:
    """Whether fewer than all data-parallel ranks hold one copy of the layer's states."""
    return layer_plan.zero > 0 and layer_plan.zero_ranks not in (None, mesh.dp)


def _layer_plan(layer_plan: LayerPlan, before: Mesh, mesh: Mesh) -> LayerPlan:
    return replace(
        layer_plan, zero_ranks=max(1, mesh.dp // 2) if _holds_copies(layer_plan, before) else None
    )


def _pipeline(plan: Plan, mesh: Mesh) -> PipelinePlan:
    found = plan.pipeline
    if found.schedule is Schedule.CUSTOM:
        return replace(found, micro_batch_size=min(found.micro_batch_size, DEGREE))
    most = MOST_MICRO_BATCHES if mesh.pp > 1 else MOST_MICRO_BATCHES // 2
    count = min(found.num_micro_batches, most)
    return replace(
        found,
        virtual_stages=min(found.virtual_stages, MOST_CHUNKS),
        micro_batch_size=min(found.micro_batch_size, DEGREE),
        num_micro_batches=-(-count // mesh.pp) * mesh.pp
        if found.schedule is Schedule.INTERLEAVED
        else count,
    )


def _stages(plan: Plan, pp: int, pipeline: PipelinePlan) -> tuple[StagePlan, ...]:
    """The plan's stages drawn together to as many as the small pipeline has, one block for each run
    of alike ones.

    Two where all is one stage, and where blocks overlap with the next.
    """
    count, before = pp * pipeline.virtual_stages, len(plan.stages)
    custom = pipeline.schedule is Schedule.CUSTOM
    ranks = [
        plan.stages[k].rank if custom else rank_of(pipeline.schedule, k, pp) for k in range(count)
    ]
    runs: list[list[LayerRun]] = [[] for _ in range(count)]
    for index, stage in enumerate(plan.stages):
        runs[index * count // before].extend(stage.layers)
    alike, first, stages = 2 if count == 1 or pipeline.tp_overlap == 3 else 1, 0, []
    for index, found in enumerate(runs):
        layers = tuple(_short(found, first, alike))
        first += sum(run.blocks is not None for run in layers)
        stages.append(StagePlan(rank=ranks[index], layers=layers))
    return tuple(stages)


def _short(runs: list[LayerRun], first: int, alike: int) -> Iterator[LayerRun]:
    """Runs of one block each, numbered from `first`: of each layer plan of a stage as many as it
    has, up to `alike`.
    """
    seen: dict[str, int] = {}
    for run in runs:
        if run.blocks is None:
            yield run
            continue
        more = min(run.blocks[1] - run.blocks[0] + 1, alike - seen.get(run.plan, 0))
        for _ in range(more):
            yield LayerRun(plan=run.plan, blocks=(first, first))
            first += 1
        seen[run.plan] = seen.get(run.plan, 0) + more


def _model(model: ModelSpec, num_layers: int) -> ModelSpec:
    grouped = model.num_kv_heads != model.num_heads
    kv_heads = 1 if model.num_kv_heads == 1 else HEADS // 2 if grouped else HEADS
    hidden = HEADS * HEAD_DIM if model.q_size == model.hidden_size else HEADS * HEAD_DIM * 3 // 2
    padded = model.padded_vocab_size > model.vocab_size
    return replace(
        model,
        name=f"{model.name}, shrunk",
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=HEADS,
        num_kv_heads=kv_heads,
        head_dim=HEAD_DIM,
        num_experts=min(model.num_experts, EXPERTS),
        experts_per_token=min(model.experts_per_token, EXPERTS // 2),
        ffn_hidden_size=0 if model.num_experts else FFN,
        expert_ffn_hidden_size=FFN if model.num_experts else 0,
        vocab_size=VOCAB if padded else PADDED,
        max_seq_length=SEQ_LENGTH,
        dropout=0.0,
        vocab_multiple=PADDED if padded else 1,
    )
