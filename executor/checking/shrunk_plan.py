"""A plan of a small model with the structure of a large one, which a few CPUs can run.

It shows whether the large plan trains correctly. It has the same mesh axes of more than 1,
schedule, virtual stages if any, layer plans (ZeRO stage, recompute list and placements) in the
order of the stages, kinds of norm, positions, attention and residual, tied embeddings, grouped
heads, and locations and eviction of chunks, in the smallest budget. Degrees shrink to 2, virtual
stages to at most 4, and runs of equal blocks, micro-batches and all sizes shrink too. Precision is
fp32 and nothing is dropped out: only then can the plan be compared with one process.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.schedules.schedule import Schedule, legal, rank_of
from parplan.executor.checking.small_model import (
    SEQ_LENGTH,
    small_model,
    small_tuning,
    text_blocks,
)
from parplan.planner.plan.pipeline_plan import PipelinePlan
from parplan.planner.plan.plan import LayerPlan, LayerRun, Plan, StagePlan
from parplan.planner.plan.plan_chunks import rechunked, require_matching_chunks
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.documents import Documents
from parplan.profiles.models.operator_graph import BlockClass
from parplan.profiles.models.spec import Precision, TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.stack import ContextForm

DEGREE = 2
MOST_VIRTUAL_STAGES = 4
MOST_MICRO_BATCHES = 4
MOST_RANKS = 8


def shrunk_pools(plans: Sequence[Plan]) -> tuple[Plan, ...]:
    """Return the small plans of pools that divide the batch, whose small models are the same.

    Each has every layer that one of them needs. Raises ConfigError as `shrunk` does.
    """
    kept = frozenset(itertools.chain.from_iterable(map(_kept_alone, plans)))
    return tuple(shrunk(plan, kept) for plan in plans)


def _kept_alone(plan: Plan) -> list[int]:
    """Return the numbers of the layers of the small plan."""
    mesh = _mesh(plan)
    return _stages(plan, mesh.pp, _pipeline(plan, mesh), frozenset())[1]


def shrunk(plan: Plan, kept_layers: frozenset[int] = frozenset()) -> Plan:
    """Return the small plan; its predictions are those of the large one and do not apply.

    It trains its sequences alone, also where they are those of one pool. It has the layers of the
    given numbers, or as few as its structure needs. Raises ConfigError if there is no small plan,
    or the plan's chunks do not hold its blocks.
    """
    if plan.module is not None:
        raise ConfigError(
            f"the module {plan.module.text} has the size that it has",
            hint="run a small one of its kind: python -m parplan.executor",
        )
    mesh = _mesh(plan)
    pipeline = _pipeline(plan, mesh)
    stages, layers = _stages(plan, mesh.pp, pipeline, kept_layers)
    kept = [layer - 1 for layer in layers[1:-1]]
    training = replace(
        plan.training,
        global_batch_size=pipeline.micro_batch_size * sum(pipeline.micro_batches(mesh.dp)),
        seq_length=SEQ_LENGTH,
        documents=_documents(plan.training),
        fine_tuning=small_tuning(plan.training.fine_tuning, text_blocks(plan.model, kept)),
        precision=Precision.FP32,
        gradient_precision=Precision.FP32,
        products=None,
    )
    small = replace(
        plan,
        model=small_model(plan.model, kept, plan.training.fine_tuning),
        training=training,
        mesh=mesh,
        pipeline=pipeline,
        stages=stages,
        batch_share=None,
        layer_plans={
            name: _layer_plan(each, plan.mesh, mesh) for name, each in plan.layer_plans.items()
        },
    )
    small = replace(small, layer_plans=dict(_of_small_classes(small)))
    if plan.chunks is None:
        return small
    require_matching_chunks(plan)  # the small plan gets new chunks
    return rechunked(small)


def _of_small_classes(plan: Plan) -> Iterator[tuple[str, LayerPlan]]:
    """Yield layer plans with the names that the classes of their blocks have in the small model.

    Plans of no layer stay as they are.
    """
    graph = build_graph(plan.model, plan.training, 1)
    runs = (run for stage in plan.stages for run in stage.layers)
    keys = {run.plan: graph.key(run.first) for run in runs}
    for name, layer_plan in plan.layer_plans.items():
        key = keys.get(name)
        yield (
            name,
            replace(layer_plan, block=key.name) if isinstance(key, BlockClass) else layer_plan,
        )


def _documents(training: TrainingSpec) -> Documents | None:
    """Return documents that are as long a part of a short sequence on average."""
    if training.documents is None:
        return None
    part = training.documents.mean_length / training.seq_length
    return Documents(mean=max(1.0, part * SEQ_LENGTH))


def _mesh(plan: Plan) -> Mesh:
    """Return the small mesh: degrees of 2, and a custom schedule's pp.

    dp is 4 if fewer than all replicas hold one copy of the states and there is room. Two-level
    context parallelism takes cp 4, for which tp gives way. A grid takes tp 4, in 2 rows, for which
    dp gives way. Raises ConfigError.
    """
    custom = plan.pipeline.schedule is Schedule.CUSTOM
    pp = plan.mesh.pp if custom else min(plan.mesh.pp, DEGREE)
    if pp > MOST_RANKS:
        raise ConfigError(
            f"the lists of a custom schedule are of {pp} pipeline ranks, a small plan "
            f"has at most {MOST_RANKS}",
            hint="make one of fewer ranks, and check that",
        )
    form = plan.mesh.context_form
    least_cp = {None: 1, ContextForm.TWO_LEVEL: DEGREE * DEGREE}.get(form, DEGREE)
    tp_rows = min(plan.mesh.tp_rows, DEGREE)
    tp = max(1, min(plan.mesh.tp, DEGREE * tp_rows, MOST_RANKS // (pp * least_cp)))
    if tp_rows > 1 and tp < DEGREE * tp_rows:
        raise ConfigError(
            f"a grid takes tp {DEGREE * tp_rows}, and a small plan of pp {pp} has at most "
            f"{MOST_RANKS} ranks",
            hint="make one of fewer pipeline ranks, and check that",
        )
    cp = min(least_cp, MOST_RANKS // (pp * tp))
    if form is not None and cp < least_cp:
        raise ConfigError(
            f"{form} takes cp {least_cp}, and a small plan of pp {pp} has at most {MOST_RANKS} "
            "ranks",
            hint="make one of fewer pipeline ranks, and check that",
        )
    holds_copies = any(_holds_copies(each, plan.mesh) for each in plan.layer_plans.values())
    most_dp = 2 * DEGREE if holds_copies else DEGREE
    dp = min(plan.mesh.dp, most_dp, MOST_RANKS // (pp * cp * tp))
    etp = tp if plan.mesh.etp > 1 else 1
    ep = min(plan.mesh.ep, DEGREE, dp * cp * tp // etp)
    return Mesh(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, etp=etp, context_form=form, tp_rows=tp_rows)


def _holds_copies(layer_plan: LayerPlan, mesh: Mesh) -> bool:
    """Return True if fewer than all replicas hold one copy of the layer's states."""
    return layer_plan.highest_zero > 0 and layer_plan.zero_ranks not in (None, mesh.replicas)


def _layer_plan(layer_plan: LayerPlan, before: Mesh, mesh: Mesh) -> LayerPlan:
    return replace(
        layer_plan,
        zero_ranks=max(1, mesh.replicas // 2) if _holds_copies(layer_plan, before) else None,
    )


def _pipeline(plan: Plan, mesh: Mesh) -> PipelinePlan:
    large = plan.pipeline
    if large.schedule is Schedule.CUSTOM:
        return replace(large, micro_batch_size=min(large.micro_batch_size, DEGREE))
    most = MOST_MICRO_BATCHES if mesh.pp > 1 else MOST_MICRO_BATCHES // 2
    count = min(large.num_micro_batches, most)
    if large.schedule is Schedule.INTERLEAVED:
        count = -(-count // mesh.pp) * mesh.pp
    return replace(
        large,
        virtual_stages=min(large.virtual_stages, MOST_VIRTUAL_STAGES),
        micro_batch_size=min(large.micro_batch_size, DEGREE),
        num_micro_batches=count,
        micro_batches_of_replicas=_shares(large, count, mesh),
    )


def _shares(large: PipelinePlan, count: int, mesh: Mesh) -> tuple[int, ...]:
    """Return unequal shares where the plan has some: the first rank has the most.

    There are none where the small mesh has one replica, or the schedule takes no fewer.
    """
    if not large.micro_batches_of_replicas or mesh.dp == 1:
        return ()
    fewer = (
        number
        for number in range(1, count)
        if not legal(large.schedule, mesh.pp, number, large.virtual_stages)
    )
    least = next(fewer, None)
    return () if least is None else (count, *(least,) * (mesh.dp - 1))


def _stages(
    plan: Plan, pp: int, pipeline: PipelinePlan, kept_layers: frozenset[int]
) -> tuple[tuple[StagePlan, ...], list[int]]:
    """Return the plan's stages, merged into as many as the small pipeline has.

    The second value is the number in the plan of each layer that is left.

    A run of equal blocks becomes one block; two if all layers form one stage, or if blocks overlap
    with the next one. Where `kept_layers` are given, these are left instead.
    """
    count, before = pp * pipeline.virtual_stages, len(plan.stages)
    custom = pipeline.schedule is Schedule.CUSTOM
    ranks = [
        plan.stages[k].rank if custom else rank_of(pipeline.schedule, k, pp) for k in range(count)
    ]
    runs: list[list[LayerRun]] = [[] for _ in range(count)]
    for index, stage in enumerate(plan.stages):
        runs[index * count // before].extend(stage.layers)
    most_blocks = 2 if count == 1 or pipeline.tp_overlap == 3 else 1
    kept: list[int] = []
    stages = []
    for index, stage_runs in enumerate(runs):
        layers = []
        short = _chosen(stage_runs, kept_layers) if kept_layers else _short(stage_runs, most_blocks)
        for name, number in short:
            layers.append(LayerRun(plan=name, first=len(kept), last=len(kept)))
            kept.append(number)
        stages.append(StagePlan(rank=ranks[index], layers=tuple(layers)))
    return tuple(stages), kept


def _chosen(runs: list[LayerRun], kept_layers: frozenset[int]) -> Iterator[tuple[str, int]]:
    """Yield those of the layers with a number in `kept_layers`, as `_short` does."""
    return ((run.plan, number) for run in runs for number in run.indices if number in kept_layers)


def _short(runs: list[LayerRun], most_blocks: int) -> Iterator[tuple[str, int]]:
    """Yield layers by the name of their plan and their number in the plan.

    Each layer plan of a stage has as many layers as before, at most `most_blocks`.
    """
    seen: dict[str, int] = {}
    for run in runs:
        more = min(len(run.indices), most_blocks - seen.get(run.plan, 0))
        yield from ((run.plan, run.first + place) for place in range(more))
        seen[run.plan] = seen.get(run.plan, 0) + more
