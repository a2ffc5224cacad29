"""The check of every plan that is read: its parts must fit together.

A plan states some facts more than once, for people and for the executor: devices and mesh, batch
and micro-batches, pipeline and stages, layers and model. Where two of them differ, the plan is
ambiguous and is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from parplan.costmodels.communication.mesh import Mesh, illegal_expert_parallel
from parplan.costmodels.host.state_location import OFFLOAD_OF, Access, StateLocation
from parplan.costmodels.layers.context_parallel import illegal_context
from parplan.costmodels.schedules.actions import check_rows
from parplan.costmodels.schedules.schedule import Schedule, rank_of
from parplan.planner.plan.equal_shares import illegal_micro_batches
from parplan.planner.plan.pipeline_plan import PipelinePlan, PipelineStage
from parplan.planner.plan.plan import LayerPlan, Plan
from parplan.planner.plan.traced_plan import AnyPlan, ShardStage, TracedPlan
from parplan.profiles.errors import ConfigError, unknown_name_error
from parplan.profiles.machines.unequal_cluster import UnequalCluster
from parplan.profiles.models.operator_graph import ModelGraph
from parplan.profiles.models.spec import Positions
from parplan.profiles.models.transformer import build_graph

_AGAIN = "make the plan again"
IN_CHUNKS = OFFLOAD_OF[StateLocation.HOST]  # only blocks in chunks offload these states


def require_consistent(plan: AnyPlan, where: str) -> None:
    """Raises ConfigError with `where` and key for the first part that does not fit the others."""
    _require_layout(plan, where)
    _require_prediction(plan, where)
    _require_pools(plan, where)
    if isinstance(plan, TracedPlan):
        _require_stages(plan.stages, len(plan.shards), where)
        _require_traced(plan, where)
    else:
        _require_stages(plan.stages, plan.model.num_blocks + 2, where)
        _require_described(plan, where)
        _require_share(plan, where)


def _require_share(plan: Plan, where: str) -> None:
    """Raises ConfigError unless the sequences of a plan lie inside the batch of all pools."""
    whole, own = plan.whole_batch, plan.training.global_batch_size
    if not 0 <= whole.first <= whole.of - own:
        found = f"{own} sequences from {whole.first} on, of {whole.of}"
        raise _unfit(where, "batch_share", found)


def _require_pools(plan: AnyPlan, where: str) -> None:
    """Raises ConfigError unless the stages fill the pools of an unequal cluster."""
    cluster, pools = plan.cluster, plan.pools
    if not isinstance(cluster, UnequalCluster):
        if pools:
            raise _unfit(where, "stages", "they name pools, the cluster has none")
        return
    named = () if isinstance(plan, TracedPlan) else {(s.rank, s.pool) for s in plan.stages}
    if sorted(named) != list(enumerate(pools)) or len(pools) != plan.mesh.pp:
        raise _unfit(where, "stages", "every pipeline rank lies on one pool of the cluster")
    for name, stages in Counter(pools).items():
        if name not in cluster.by_name:
            raise unknown_name_error("pool", name, cluster.by_name, where=f"{where}: stages")
        gpus = cluster.by_name[name].cluster.num_gpus
        if stages * plan.mesh.ranks_per_stage != gpus:
            raise _unfit(
                where,
                "stages",
                f"pool {name} has {stages} of {plan.mesh.ranks_per_stage} ranks on {gpus} GPUs",
            )


def _require_described(plan: Plan, where: str) -> None:
    """Raises ConfigError for layer plans or chunks that do not fit the model and the mesh."""
    reason = illegal_expert_parallel(plan.mesh, plan.model) or illegal_context(
        plan.mesh, plan.model, plan.cluster
    )
    if reason:
        raise _unfit(where, "mesh", reason)
    if (
        plan.model.positions is Positions.LEARNED
        and plan.training.seq_length > plan.model.max_seq_length
    ):
        raise _unfit(
            where,
            "training",
            f"seq_length is {plan.training.seq_length}, "
            f"the model learns {plan.model.max_seq_length} positions",
        )
    graph = build_graph(plan.model, plan.training, plan.pipeline.micro_batch_size)
    for name, layer_plan in plan.layer_plans.items():
        try:
            layer_class = graph.layer_class(layer_plan.key(graph))
        except ConfigError as error:
            raise _unfit(where, f"layer_plans.{name}", error.message) from None
        operators = [operator.name for operator in layer_class.operators]
        _require_layer_plan(layer_plan, plan.mesh, operators, f"{where}: layer_plans.{name}")
        if plan.chunks is None and any(what in IN_CHUNKS for what in layer_plan.offload):
            raise _unfit(
                where,
                f"layer_plans.{name}",
                f"offload is {', '.join(layer_plan.offload)}, and the plan has no chunks",
            )
        if plan.chunks is not None and layer_plan.own_zero:
            raise _unfit(
                where,
                f"layer_plans.{name}",
                f"own_zero names {next(iter(layer_plan.own_zero))}, and chunks are sharded alike",
            )
    if plan.mesh.tp == 1 and plan.pipeline.tp_overlap:
        raise _unfit(
            where, "pipeline", f"tp_overlap is {plan.pipeline.tp_overlap}, the mesh has tp 1"
        )
    size = plan.pipeline.micro_batch_size
    if plan.pipeline.tp_overlap and size % 2:
        raise _unfit(
            where,
            "pipeline",
            f"tp_overlap is {plan.pipeline.tp_overlap}, a micro-batch of {size} has no halves",
        )
    _require_known_plans(plan, graph, where)
    for name, layer in plan.predicted.redundancy_gib.layers.items():
        key = f"{where}: predicted.redundancy_gib.layers"
        if name not in plan.layer_plans:
            raise unknown_name_error("layer plan", name, plan.layer_plans, where=key)
        _require_rank(layer.stage, plan.mesh.pp, f"{key}.{name}: stage")
    if plan.chunks is not None:
        if [rank.stage for rank in plan.chunks.ranks] != list(range(plan.mesh.pp)):
            raise ConfigError(
                f"{where}: chunks.ranks has {len(plan.chunks.ranks)} stages, "
                f"the mesh has pp {plan.mesh.pp}",
                hint=_AGAIN,
            )
        for index, group in enumerate(plan.chunks.groups):
            _require_rank(group.stage, plan.mesh.pp, f"{where}: chunks.groups.{index}: stage")


def _require_traced(plan: TracedPlan, where: str) -> None:
    """Raises ConfigError for shards, or choices of stages, that do not fit the module."""
    if plan.chunks is not None and plan.chunks.access is Access.OPERATOR:
        raise _unfit(
            where, "chunks", "access is operator, the shards of a traced module are used whole"
        )
    ranges = [(f"shards.{i}", each.first, each.end) for i, each in enumerate(plan.shards)]
    _require_gapless("shards", ranges, plan.traced.num_operators, "operators", where)
    if plan.mesh.ep > 1 or (plan.mesh.tp > 1 and not plan.shardings):
        raise _unfit(
            where,
            "mesh",
            f"it is {plan.mesh}, nothing says how the operators of a traced module are divided",
        )
    _require_shardings(plan, where)
    for index, stage in enumerate(plan.stages):
        if stage.zero not in range(4):
            raise ConfigError(
                f"{where}: stages.{index}: zero is {stage.zero}, it must be 0, 1, 2 or 3",
                hint=_AGAIN,
            )
        _require_recompute(plan, stage, f"stages.{index}", where)


def _require_recompute(plan: TracedPlan, stage: ShardStage, key: str, where: str) -> None:
    """Raises ConfigError unless shards of the stage run again, each as a whole or by one list."""
    again = [*stage.recompute, *(shard for each in stage.recompute_lists for shard in each.shards)]
    for shard in again:
        if not stage.first <= shard < stage.end:
            raise _unfit(
                where, key, f"it recomputes layer {shard}, and has {stage.first} to {stage.end - 1}"
            )
        if again.count(shard) > 1:
            raise _unfit(where, key, f"it recomputes layer {shard} twice")
        size = plan.shards[shard].end - plan.shards[shard].first
        wrong = [place for place in stage.places_again(shard) if not 0 <= place < size]
        if wrong:
            raise _unfit(
                where, key, f"it recomputes operator {wrong[0]} of layer {shard}, which has {size}"
            )


def _require_shardings(plan: TracedPlan, where: str) -> None:
    """Raises ConfigError for a division of operators that no shard has."""
    sizes: dict[str, int] = {}
    for shard in plan.shards:
        size = shard.end - shard.first
        sizes[shard.layer] = min(size, sizes.get(shard.layer, size))
    for layer, splits in plan.shardings.items():
        if layer not in sizes:
            raise _unfit(where, f"shardings.{layer}", "no shard has this layer")
        for index, split in enumerate(splits):
            if not 0 <= split.place < sizes[layer]:
                raise _unfit(
                    where,
                    f"shardings.{layer}.{index}",
                    f"place is {split.place}, shards of {layer} have {sizes[layer]} operators",
                )


def _unfit(where: str, key: str, problem: str) -> ConfigError:
    return ConfigError(f"{where}: {key}: {problem}", hint=_AGAIN)


def _require_layout(plan: AnyPlan, where: str) -> None:
    """Raises ConfigError unless devices, batch and stages (by rank) fit mesh and pipeline."""
    mesh, pipeline = plan.mesh, plan.pipeline
    ranks = [stage.rank for stage in plan.stages]
    if mesh.num_ranks != plan.cluster.num_gpus:
        raise _unfit(
            where,
            "mesh",
            f"{mesh} has {mesh.num_ranks} ranks, the cluster has {plan.cluster.num_gpus} devices, "
            f"nodes {plan.cluster.nodes} x {plan.cluster.gpus_per_node}",
        )
    _require_batch(plan, where)
    num_stages = mesh.pp * pipeline.virtual_stages
    if len(ranks) != num_stages:
        raise _unfit(
            where,
            "stages",
            f"there are {len(ranks)}, pp {mesh.pp} x virtual_stages {pipeline.virtual_stages} "
            f"are {num_stages}",
        )
    for index, rank in enumerate(ranks):
        _require_rank(rank, mesh.pp, f"{where}: stages.{index}: rank")
    if pipeline.schedule is Schedule.CUSTOM:
        _require_actions(pipeline, mesh.pp, ranks, where)
        return
    for index, rank in enumerate(ranks):
        needed = rank_of(pipeline.schedule, index, mesh.pp)
        if rank != needed:
            raise _unfit(
                where,
                f"stages.{index}",
                f"rank is {rank}, schedule {pipeline.schedule} runs it on {needed}",
            )


def _require_batch(plan: AnyPlan, where: str) -> None:
    """Raises ConfigError unless the micro-batches of all replicas are legal and fill the batch."""
    mesh, pipeline = plan.mesh, plan.pipeline
    shares = pipeline.micro_batches_of_replicas
    if shares and (len(shares) != mesh.dp or isinstance(plan, TracedPlan)):
        on = "a traced module" if isinstance(plan, TracedPlan) else f"dp {mesh.dp}"
        raise _unfit(where, "pipeline", f"micro_batches_of_replicas has {len(shares)}, with {on}")
    reason = illegal_micro_batches(pipeline, mesh.pp)
    if reason:
        raise _unfit(where, "pipeline", reason)
    sequences = pipeline.micro_batch_size * sum(pipeline.micro_batches(mesh.dp))
    if sequences != plan.training.global_batch_size:
        counts = " + ".join(map(str, shares)) or str(pipeline.num_micro_batches)
        raise _unfit(
            where,
            "pipeline",
            f"{counts} micro-batches of {pipeline.micro_batch_size} "
            f"on dp {mesh.dp} are {sequences} sequences, "
            f"global_batch_size is {plan.training.global_batch_size}",
        )


def _require_actions(pipeline: PipelinePlan, pp: int, ranks: list[int], where: str) -> None:
    """Raises ConfigError unless a custom schedule is legal and names the stages of each rank."""
    try:
        homes = check_rows(
            pipeline.actions, pp, pipeline.virtual_stages, pipeline.num_micro_batches
        )
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}", hint=error.hint) from None
    for index, rank in enumerate(ranks):
        if homes[index] != rank:
            raise _unfit(
                where, f"stages.{index}", f"rank is {rank}, the actions have it on {homes[index]}"
            )


def _require_rank(rank: int, pp: int, what: str) -> None:
    if rank not in range(pp):
        raise ConfigError(f"{what} is {rank}, the mesh has pp {pp}", hint=_AGAIN)


def _require_layer_plan(
    layer_plan: LayerPlan, mesh: Mesh, operators: list[str], where: str
) -> None:
    """Raises ConfigError unless a layer plan fits the mesh and names operators of its layer."""
    ranks = layer_plan.zero_ranks
    replicas = "dp" if mesh.cp == 1 else "dp x cp"
    if layer_plan.highest_zero and ranks is not None and mesh.replicas % ranks:
        raise ConfigError(
            f"{where}: zero_ranks {ranks} does not divide {replicas} {mesh.replicas}", hint=_AGAIN
        )
    for key, names in (
        ("recompute", layer_plan.recompute),
        ("keep_on_host", layer_plan.keep_on_host),
        ("own_zero", tuple(layer_plan.own_zero)),
    ):
        unknown = next((name for name in names if name not in operators), None)
        if unknown is not None:
            raise _unfit(where, key, f"it names {unknown}, the layer has {', '.join(operators)}")


def _require_stages(stages: Iterable[PipelineStage], num_layers: int, where: str) -> None:
    """Raises ConfigError unless the stages run every layer of the model in order."""
    ranges = []
    for index, stage in enumerate(stages):
        if not stage.layers:
            raise _unfit(where, f"stages.{index}", "it has no layers")
        ranges += [
            (f"stages.{index}.layers.{number}", run.first, run.last + 1)
            for number, run in enumerate(stage.layers)
        ]
    _require_gapless("stages", ranges, num_layers, "layers", where)


def _require_known_plans(plan: Plan, graph: ModelGraph, where: str) -> None:
    """Raises ConfigError unless the layers run on layer plans of their class."""
    for index, stage in enumerate(plan.stages):
        key = f"stages.{index}"
        for run in stage.layers:
            if run.plan not in plan.layer_plans:
                raise unknown_name_error(
                    "layer plan", run.plan, plan.layer_plans, where=f"{where}: {key}"
                )
            layer = plan.layer_plans[run.plan].key(graph)
            for each in range(run.first, run.last + 1):
                kind = graph.key(each)
                if layer != kind:
                    raise _unfit(
                        where,
                        key,
                        f"layer {each} is of kind {kind}, its plan {run.plan} is of kind {layer}",
                    )


def _require_prediction(plan: AnyPlan, where: str) -> None:
    """Raises ConfigError unless the prediction is of these stages."""
    predicted, pp = plan.predicted, plan.mesh.pp
    if [memory.stage for memory in predicted.memory_gib] != list(range(pp)):
        raise ConfigError(
            f"{where}: predicted.memory_gib has {len(predicted.memory_gib)} stages, "
            f"the mesh has pp {pp}",
            hint=_AGAIN,
        )
    if predicted.redundancy_gib.stages and len(predicted.redundancy_gib.stages) != pp:
        raise _unfit(
            where,
            "predicted.redundancy_gib",
            f"it has {len(predicted.redundancy_gib.stages)} stages, the mesh has pp {pp}",
        )


def _require_gapless(
    part: str, ranges: Iterable[tuple[str, int, int]], size: int, what: str, where: str
) -> None:
    """Raises ConfigError unless the ranges, each with its key, follow one another to `size`."""
    after = 0
    for key, first, end in ranges:
        if first != after or end <= first:
            raise _unfit(
                where, key, f"it has {what} {first} to {end - 1}, it must begin with {after}"
            )
        after = end
    if after != size:
        raise _unfit(where, part, f"they have {after} {what}, there are {size}")
